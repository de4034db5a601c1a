"""FlashInfer's side of bench_shared_prefix.py: cascade attention, in a process without JAX.

The process reads one line of JSON, a list with the fields of `Sizes` for each measurement. It writes a line of JSON for
each: its time, or why there is none. `MultiLevelCascadeAttentionWrapper` attends to the prefixes with all their rows,
then to each row's own tokens, and merges both. Its plan, which runs on the host, is not timed. The lower of two clocks
counts, as in `torch_process`.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import torch_process
from benchmarks.report import first_line

BLOCK_SIZE = 16
TOLERANCE = 2e-2  # the largest error of a row, relative to its norm
_WORKSPACE_BYTES = 256 << 20


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
      num_seqs, num_prefixes: sequences, and the prefixes that they share in equal parts.
      prefix_len, own_len: tokens of a prefix, and of each sequence behind it.
      heads: query heads, kv heads and the size of a head.
      copies: how many sets of block tables there are, which share no block.
    """

    num_seqs: int
    num_prefixes: int
    prefix_len: int
    own_len: int
    heads: tuple[int, int, int]
    copies: int

    @property
    def prefix_blocks(self) -> int:
        """How many blocks a prefix fills; it fills them to the end."""
        return self.prefix_len // BLOCK_SIZE

    @property
    def own_blocks(self) -> int:
        """How many blocks a sequence's own tokens need."""
        return -(-self.own_len // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        """How many blocks the pools have."""
        return self.copies * (self.num_prefixes * self.prefix_blocks + self.num_seqs * self.own_blocks)

    def tables(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Shuffled block ids for each copy: i32 [num_prefixes, prefix_blocks] and i32 [num_seqs, own_blocks]."""
        blocks = np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32).reshape(self.copies, -1)
        split = self.num_prefixes * self.prefix_blocks
        return [(row[:split].reshape(self.num_prefixes, -1), row[split:].reshape(self.num_seqs, -1)) for row in blocks]


def levels(sizes: Sizes, prefixes: np.ndarray, own: np.ndarray) -> tuple[list[np.ndarray], ...]:
    """The two levels of a plan, the prefixes and the own tokens.

    Returns:
      For each level: where each row's queries start, where its block ids start, all ids, and how many tokens the last
      block of each row holds. All i32.
    """
    per_prefix = sizes.num_seqs // sizes.num_prefixes
    starts = [np.arange(len(ids) + 1) * step for ids, step in ((prefixes, per_prefix), (own, 1))]
    firsts = [np.arange(len(ids) + 1) * ids.shape[1] for ids in (prefixes, own)]
    lengths = sizes.prefix_len, sizes.own_len
    last = [np.full(len(ids), (n - 1) % BLOCK_SIZE + 1) for ids, n in zip((prefixes, own), lengths, strict=True)]
    found = starts, firsts, [prefixes.reshape(-1), own.reshape(-1)], last
    return tuple([array.astype(np.int32) for array in arrays] for arrays in found)


def main() -> None:
    """Reads what to measure, and writes what was measured."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the compilers print to stdout
    for fields in json.loads(sys.stdin.readline()):
        try:
            answer = _measure(Sizes(**fields))
        except Exception as error:
            answer = {"absent": first_line(error)}
        results.write(json.dumps(answer) + "\n")
        results.flush()


def _measure(sizes: Sizes) -> dict[str, Any]:
    import flashinfer
    import torch

    num_heads, num_kv_heads, head_size = sizes.heads
    shape = sizes.num_blocks, num_kv_heads, BLOCK_SIZE, head_size
    pools = tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    query = torch.randn((sizes.num_seqs, num_heads, head_size), dtype=torch.bfloat16, device="cuda")
    tables, wrappers = sizes.tables(), []
    for prefixes, own in tables:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")
        plan = [[torch.from_numpy(array).cuda() for array in arrays] for arrays in levels(sizes, prefixes, own)]
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(*plan, num_heads, num_kv_heads, head_size, BLOCK_SIZE, **dtypes)
        wrappers.append(wrapper)

    def run(call: int, enable_pdl: bool) -> list[Any]:
        return [(slice(None), wrappers[call % len(wrappers)].run(query, pools))]

    error = _relative_error(sizes, query, pools, tables[0], run(0, False)[0][1])
    if not error < TOLERANCE:
        raise ValueError(f"wrong result, relative error {error:.2g}")
    found = {
        "sum of kernels": torch_process.by_kernels(run, 6 * sizes.copies),
        "CUDA graph": torch_process.by_graph(run, 6 * sizes.copies),
    }
    return {"us": min(found.values()), "all": found, "how": f"FlashInfer {flashinfer.__version__}, cascade"}


def _relative_error(sizes: Sizes, query: Any, pools: Sequence[Any], tables: tuple[np.ndarray, ...], out: Any) -> float:
    """The error of the last row, relative to its norm."""
    import torch

    prefixes, own = tables
    ids = torch.from_numpy(np.concatenate([prefixes[-1], own[-1]])).long().cuda()
    length = sizes.prefix_len + sizes.own_len
    key, value = (
        pool[ids].float().transpose(1, 2).flatten(0, 1)[:length] for pool in pools
    )  # [tokens, kv heads, size]
    grouped = query[-1].float().unflatten(0, (sizes.heads[1], -1))
    weights = torch.softmax(torch.einsum("kgd,tkd->kgt", grouped, key) * sizes.heads[2] ** -0.5, -1)
    expected = torch.einsum("kgt,tkd->kgd", weights, value).flatten(0, 1)
    return float((out[-1].float() - expected).norm() / expected.norm())


if __name__ == "__main__":
    main()
