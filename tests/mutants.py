"""Makes bugs on purpose, one at a time, and checks that the tests notice each of them.

    python -m tests.mutants                  all mutants; prints a line for each, exit code 1 if one survives
    python -m tests.mutants tp_rank          the mutants whose name contains this word

A mutant is a copy of the repository in which one piece of source is changed. It is killed if the tests that it names
fail on this copy; they are few, so that a run takes seconds. All mutants in this list are expected to be killed.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("paged_jax", "tests", "examples", "benchmarks", "pyproject.toml", "README.md")


class Mutant(NamedTuple):
    """A bug that is made on purpose.

    Attributes:
      name: the bug in a few words.
      file: the file to change, below `paged_jax/`.
      old: source that occurs exactly once in the file.
      new: the source that replaces it.
      tests: arguments for pytest, or "interpret" and the names of some cases of test_triton.py's
        `test_in_the_interpreter`, which then run alone.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "xla: tp_rank times kv heads",
        "kernels/xla/softmax.py",
        "offset = (sparse.tp_rank * num_heads + head)",
        "offset = (sparse.tp_rank * num_kv_heads + head)",
        "tests/test_decode.py -k sparse",
    ),
    Mutant(
        "xla: tp_rank times heads where kv heads step",
        "kernels/xla/softmax.py",
        "offset = (sparse.tp_rank * num_kv_heads + kv_head)",
        "offset = (sparse.tp_rank * num_heads + kv_head)",
        "tests/test_decode.py -k sparse",
    ),
    Mutant(
        "triton: tp_rank times kv heads",
        "kernels/triton/device/schedule.py",
        "shift = (sparse.tp_rank * cfg.problem.num_heads + head)",
        "shift = (sparse.tp_rank * cfg.problem.num_kv_heads + head)",
        "interpret sparse-step",
    ),
    Mutant(
        "triton: tp_rank times heads where kv heads step",
        "kernels/triton/device/schedule.py",
        "shift = (sparse.tp_rank * cfg.problem.num_kv_heads + kv_head)",
        "shift = (sparse.tp_rank * cfg.problem.num_heads + kv_head)",
        "interpret sparse-negative-step",
    ),
    Mutant(
        "triton: decode writes tokens of negative slots",
        "kernels/triton/device/attend.py",
        "given = (slot >= 0) & (slot // problem.block_size < new.num_blocks)",
        "given = slot // problem.block_size < new.num_blocks",
        "interpret fused-hnd-bfloat16 fused-nhd-e5m2 fused-vllm-int8 fused-unsplit fused-large-group",
    ),
    Mutant(
        "triton: decode writes tokens of slots past the pool",
        "kernels/triton/device/attend.py",
        "given = (slot >= 0) & (slot // problem.block_size < new.num_blocks)",
        "given = slot >= 0",
        "interpret fused-hnd-bfloat16 fused-nhd-e5m2 fused-vllm-int8 fused-unsplit fused-large-group",
    ),
    Mutant(
        "mosaic_gpu: writes tokens of negative slots",
        "kernels/mosaic_gpu/device/write.py",
        "has_slot = (slot >= 0) & (slot <",
        "has_slot = (slot > -2**31) & (slot <",
        "tests/test_mosaic_gpu_write.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: writes tokens of slots past the pool",
        "kernels/mosaic_gpu/device/write.py",
        "(slot < problem.num_blocks * problem.block_size)",
        "(slot < problem.num_blocks * problem.block_size + problem.block_size)",
        "tests/test_mosaic_gpu_write.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: a token that no program attends to is not written",
        "kernels/mosaic_gpu/device/write.py",
        "return NewToken(slot, is_seen, is_seen | is_unseen)",
        "return NewToken(slot, is_seen, is_seen)",
        "tests/test_mosaic_gpu_write.py -k interpreter",
    ),
    Mutant(
        "triton: the write drops the last token of a tile",
        "kernels/triton/device/write.py",
        "given = tokens < num_tokens",
        "given = (tokens < num_tokens) & (tokens % cfg.tokens != cfg.tokens - 1)",
        "interpret write-hnd-int8",
    ),
    Mutant(
        "triton: the write takes negative slots",
        "kernels/triton/device/write.py",
        "valid = (slot >= 0) & (slot // pool.block_size < num_blocks)",
        "valid = slot // pool.block_size < num_blocks",
        "interpret write-hnd-int8",
    ),
    Mutant(
        "triton: sequences of one length have one rank",
        "kernels/triton/device/schedule.py",
        "| ((lens[None, :] == lens[:, None]) & (ids[None, :] < ids[:, None]))",
        "",
        "interpret ranked",
    ),
    Mutant(
        "triton: ragged looks at 128 sequences",
        "kernels/triton/device/pieces.py",
        "for first in range(0, num_seqs + 1, 128):",
        "for first in range(0, 128, 128):",
        "interpret many-sequences",
    ),
    Mutant(
        "triton: sparse blocks that nobody attends to are read",
        "kernels/triton/device/tiles.py",
        "            wanted = wanted & (tokens >= stretch.begin) & (tokens < stretch.end)\n            inner",
        "            wanted = (tokens >= stretch.begin) & (tokens < stretch.end)\n            inner",
        "interpret sparse-step sparse-negative-step everything",
    ),
    Mutant(
        "triton: a negative scale of values counts as its size",
        "kernels/triton/device/tiles.py",
        "weights *= (v_factor / peak)[None, :]",
        "weights *= (tl.abs(v_factor) / peak)[None, :]",
        "interpret scales-of-any-sign",
    ),
    Mutant(
        "triton: scales that are all 0 divide by 0",
        "kernels/triton/device/tiles.py",
        "            peak = tl.where(peak > 0, peak, 1.0)\n",
        "",
        "interpret scales-of-any-sign",
    ),
    Mutant(
        "xla: a scale of 0 makes 0 / 0",
        "kernels/xla/cache_ops.py",
        "x = jnp.where(x == 0, x, x / lax.optimization_barrier(jnp.broadcast_to(scale, x.shape)))",
        "x = x / lax.optimization_barrier(jnp.broadcast_to(scale, x.shape))",
        "tests/test_cache_ops.py -k write",
    ),
    Mutant(
        "xla: a negative slot counts from the end",
        "kernels/xla/cache_ops.py",
        "block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)",
        "block = slot_mapping // block_size",
        "tests/test_cache_ops.py -k write",
    ),
    Mutant(
        "xla: swaps take negative destinations",
        "kernels/xla/cache_ops.py",
        "(src < src_key_cache.shape[0]) & (dst >= 0)",
        "(src < src_key_cache.shape[0])",
        "tests/test_cache_ops.py -k 'copy or swap'",
    ),
    Mutant(
        "xla: swaps copy nothing",
        "kernels/xla/cache_ops.py",
        "    dst = jnp.where(valid, dst, dst_key_cache.shape[0])",
        "    dst = jnp.where(valid & (dst < 0), dst, dst_key_cache.shape[0])",
        "tests/test_cache_ops.py -k swap",
    ),
    Mutant(
        "xla: unattended values reach the product",
        "kernels/xla/softmax.py",
        "value = jnp.where(seen[:, :, None, None], value, 0.0)",
        "value = jnp.where(seen[:, :, None, None] | True, value, 0.0)",
        "tests/test_decode.py -k 'test_decode and hnd'",
    ),
    Mutant(
        "xla: the window is one token wider",
        "kernels/xla/softmax.py",
        "visible &= at - t < options.sliding_window",
        "visible &= at - t <= options.sliding_window",
        "tests/test_decode.py -k window",
    ),
    Mutant(
        "xla: max_seq_len does not bound cached tokens of a prefix",
        "kernels/xla/ragged.py",
        "cached = jnp.minimum(context, options.max_seq_len)",
        "cached = context",
        "tests/test_xla.py -k max_seq_len",
    ),
    Mutant(
        "merge in the dtype of out",
        "ops/merge.py",
        "out = weight_a * out_a.astype(jnp.float32) + weight_b * out_b.astype(jnp.float32)",
        "out = weight_a.astype(out_a.dtype) * out_a + weight_b.astype(out_a.dtype) * out_b",
        "tests/test_merge.py",
    ),
    Mutant(
        "merge: an empty side weighs something",
        "ops/merge.py",
        "lse = jnp.where(empty, -jnp.inf, base)",
        "lse = base",
        "tests/test_merge.py",
    ),
    Mutant(
        "vmap: options that are batched are folded",
        "_vmap.py",
        "if any(jax.tree.leaves(in_batched.options)) or",
        "if",
        "tests/test_transforms.py -k vmap",
    ),
    Mutant(
        "vmap: pools that are batched alone are folded",
        "_vmap.py",
        "or in_batched.key_cache != in_batched.value_cache",
        "",
        "tests/test_transforms.py -k vmap",
    ),
    Mutant(
        "vmap: batched pools share their scales of slots",
        "_vmap.py",
        "return not (in_batched.key_cache and any(scale is not None and scale.ndim == 3 for scale in scales))",
        "return True",
        "tests/test_transforms.py -k vmap",
    ),
    Mutant(
        "the choice never picks a kernel",
        "_dispatch.py",
        "    for name in _on_cuda(op, operands):",
        "    for name in _on_cuda(op, operands)[:0]:",
        "tests/test_selection.py tests/test_transforms.py -k 'which or lowers_for_cuda'",
    ),
    Mutant(
        "every NotImplementedError falls through",
        "_dispatch.py",
        "        except Unsupported as refusal:",
        "        except NotImplementedError as refusal:",
        "tests/test_selection.py",
    ),
    Mutant(
        "the leader is not tried first",
        "_dispatch.py",
        "return leads is None or not leads(op, operands), name not in _FOR_EVERY_GPU",
        "return True, name not in _FOR_EVERY_GPU",
        "tests/test_selection.py",
    ),
    Mutant(
        "row counts of query and seq_lens may differ",
        "_validate.py",
        '    query = _checks.tokens("query", query, "num_seqs")\n    pool',
        '    query = _checks.tokens("query", query, "num_seqs")[: len(seq_lens)]\n    pool',
        "tests/test_validation.py -k decode",
    ),
    Mutant(
        "triton: offsets in nhd are in 32 bits",
        "kernels/triton/device/tiles.py",
        "start = ((blocks * pool.block_size + offsets) * pool.num_kv_heads + kv_head) * pool.head_size",
        "start = ((blocks.to(tl.int32) * pool.block_size + offsets) * pool.num_kv_heads + kv_head) * pool.head_size",
        "interpret offsets",
    ),
    Mutant(
        "metadata: a float table passes",
        "metadata.py",
        "def check_metadata(",
        "def check_metadata(*_, **__):\n    return None\n\n\ndef _unused(",
        "tests/test_metadata.py",
    ),
]


def run(mutant: Mutant) -> tuple[bool, str]:
    """Runs a mutant's tests; returns whether it is killed, and pytest's last line."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, copy = ROOT / name, Path(folder, name)
            ignore = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, copy, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
        file = Path(folder, "paged_jax", mutant.file)
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return False, f"the source to change stands {text.count(mutant.old)} times in {mutant.file}"
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        if interpret := mutant.tests.startswith("interpret "):
            command = f"{sys.executable} -m tests.triton_interpreter {mutant.tests.removeprefix('interpret ')}"
            environment |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
        else:
            command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {mutant.tests}"
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or [""]
        lines = [line for line in lines if re.match(r"\w*(Error|Exception)\b|Segmentation", line)] or lines
        # pytest must report a failed test; in the interpreter, a mutant that writes to wild memory may end the process.
        return done.returncode == 1 or (interpret and done.returncode != 0), lines[-1]


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--workers", type=int, default=1, help="mutants tried at once")
    args = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if not args.words or any(word in m.name for word in args.words)]
    started, survivors = time.time(), 0
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for mutant, (killed, last) in zip(chosen, pool.map(run, chosen), strict=True):
            survivors += not killed
            print(f"{'killed  ' if killed else 'SURVIVED'} {mutant.name}  # {last}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived, {time.time() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
