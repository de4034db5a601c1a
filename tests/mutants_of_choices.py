"""The bugs that `tests.mutants` makes on purpose in choices: of GPU implementations, and of how operands are split."""

from tests.mutants_made import Mutant

_TESTS = "tests/test_choices.py"

MUTANTS_OF_CHOICES = [
    Mutant(
        "choice: decode over 8 bits has twice as many bytes in flight",
        "kernels/mosaic_gpu/decode/choose.py",
        "_BYTES_IN_FLIGHT_OF_8_BITS = 64 * _KIB",
        "_BYTES_IN_FLIGHT_OF_8_BITS = 128 * _KIB",
        _TESTS,
    ),
    Mutant(
        "choice: longer splits are merged in clusters",
        "kernels/mosaic_gpu/decode/choose.py",
        "_CLUSTER_SPLIT_TOKENS = 256",
        "_CLUSTER_SPLIT_TOKENS = 512",
        _TESTS,
    ),
    Mutant(
        "choice: items of a window are as long as their contexts",
        "kernels/mosaic_gpu/decode/geometry.py",
        "min(self.problem.max_seq_len, window)",
        "self.problem.max_seq_len",
        _TESTS,
    ),
    Mutant(
        "choice: folded heads of layout vllm are copied one by one",
        "kernels/mosaic_gpu/decode/geometry.py",
        'self.problem.layout in ("hnd", "vllm")',
        'self.problem.layout in ("hnd",)',
        _TESTS,
    ),
    Mutant(
        "choice: XLA counts the items of ragged batches of 300 sequences",
        "kernels/mosaic_gpu/ragged/choose.py",
        "_MOST_COUNTED = 4 * WARPGROUP",
        "_MOST_COUNTED = 2 * WARPGROUP",
        _TESTS,
    ),
    Mutant(
        "choice: two programs share a context of latents",
        "kernels/mosaic_gpu/mla/choose.py",
        "_MOST_WIDTH = 4\n",
        "_MOST_WIDTH = 2\n",
        _TESTS,
    ),
    Mutant(
        "choice: Blackwell gets the small tiles of queries",
        "kernels/triton/tuning.py",
        "large = gpu.capability // 10 in (9, 10)",
        "large = gpu.capability // 10 in (9,)",
        _TESTS,
    ),
    Mutant(
        "choice: contexts are split although tiles of queries fill the GPU",
        "kernels/triton/ragged_tuning.py",
        "filled = problem.num_tokens // tuned.queries >= at_once",
        "filled = problem.num_tokens // tuned.queries >= 2 * at_once",
        _TESTS,
    ),
    Mutant(
        "choice: a program of latents has queries that no sequence has",
        "kernels/triton/mla_tuning.py",
        "min(per_seq, problem.max_query_len, most // heads)",
        "min(per_seq, most // heads)",
        _TESTS,
    ),
    Mutant(
        "splits: blocks are split under block-sparse patterns",
        "_splits.py",
        "options.sliding_window, options.block_sparse))",
        "options.sliding_window,))",
        "tests/test_context_parallel.py -k distances",
    ),
    Mutant(
        "splits: blocks of v2 are split, and so are its partitions",
        "_splits.py",
        '"paged_attention_v2": _Rule("n h g"',
        '"paged_attention_v2": _Rule("b n h g"',
        "tests/test_context_parallel.py -k partitions",
    ),
    Mutant(
        "splits: blocks of a swap are split",
        "_splits.py",
        '"swap_blocks": _Rule("any", ',
        '"swap_blocks": _Rule("any b", ',
        "tests/test_partition_unlike.py -k swap",
    ),
    Mutant(
        "splits: written pools do not vary as their scales do",
        "_splits.py",
        'written |= {half, f"{half[0]}_scale", f"src_{half}_cache"}',
        'written |= {half, f"src_{half}_cache"}',
        "tests/test_splits.py -k table",
    ),
    Mutant(
        "splits: devices that share a sequence's blocks have other sequences",
        "_splits.py",
        ' | {"b"}\n',
        "\n",
        "tests/test_splits.py -k table",
    ),
    Mutant(
        "metadata: the first decode row may have two tokens",
        "metadata.py",
        "(np.arange(len(query_lens)) >= num_prefills)",
        "(np.arange(len(query_lens)) > num_prefills)",
        "tests/test_metadata.py -k settles",
    ),
    Mutant(
        "choice: thin splits of a ragged batch are rounded up",
        "kernels/mosaic_gpu/ragged/kinds.py",
        "_WIDE_ROUNDED, _THIN_ROUNDED = 0.874, 0.5",
        "_WIDE_ROUNDED, _THIN_ROUNDED = 0.874, 0.874",
        _TESTS,
    ),
    Mutant(
        "choice: a window's items cost less than they see",
        "kernels/mosaic_gpu/ragged/sequence.py",
        "most = min(most, problem.sliding_window + kind.tokens)",
        "most = min(most, problem.sliding_window)",
        _TESTS,
    ),
]
