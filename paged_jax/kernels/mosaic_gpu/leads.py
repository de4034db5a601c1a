"""Which calls get Hopper's kernels before Triton's: a table for decode, and one for ragged attention.

The first row whose condition holds decides. README.md shows both tables, and a test replays them over stored times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paged_jax.kernels.mosaic_gpu.ops import is_decode
from paged_jax.kernels.problem import Granularity
from paged_jax.options import num_kv_heads


@dataclass(frozen=True)
class Row[Call]:
    """A row of a table.

    Attributes:
      condition: the condition in words; the first row whose condition holds decides a call.
      first: the implementation that is tried first.
      gain: how much longer the other implementation takes, or the heading of benchmarks/LOG.md that says so. In decode,
        two percentages are means over the timed random cases that the row decides and whose times still hold. The first
        mean is over seeds 0 to 4 and 133, from which the rows were made; the second one is over seeds 5, 6 and 134, and
        "-" if they have no such case ("The choice by seeds"). Otherwise two percentages are the least and the most over
        the batches of ragged attention ("Random batches of ragged attention") or the cases ("Registers of decode") that
        the row decides.
      holds: the condition in code.
    """

    condition: str
    first: Literal["mosaic_gpu", "triton"]
    gain: str
    holds: Callable[[Call], bool]


class DecodeCall(NamedTuple):
    """The facts of a decode call on which its table depends.

    Attributes:
      by_group: whether the group alone decides, because the call writes tokens or has layout "vllm".
      group: query heads of a kv head.
      head_size: elements of a head.
      eight_bit: whether the caches have 8 bits.
      num_items: sequences times kv heads; None in v2, whose bits must be the same in every batch.
    """

    by_group: bool
    group: int
    head_size: int
    eight_bit: bool
    num_items: int | None

    @classmethod
    def of(cls, op: str, operands: Any) -> "DecodeCall":
        """The facts of a call of `op`."""
        query, cache, options = operands.query, operands.value_cache, operands.options
        kv_heads = num_kv_heads(cache, options.layout)
        return cls(
            by_group=op == "write_and_attend" or options.layout == "vllm",
            group=query.shape[-2] // kv_heads,
            head_size=query.shape[-1],
            eight_bit=cache.dtype.itemsize == 1,
            num_items=None if op == "paged_attention_v2" else operands.seq_lens.shape[0] * kv_heads,
        )


def _few(call: DecodeCall, most: int) -> bool:
    return call.num_items is not None and call.num_items <= most


DECODE: tuple[Row[DecodeCall], ...] = (
    Row(
        'writes tokens or layout "vllm", groups of 1 to 8 and 16',
        "mosaic_gpu",
        '"Groups of 16"',
        lambda call: call.by_group and (call.group <= 8 or call.group == 16),
    ),
    Row('writes tokens or layout "vllm", other groups', "triton", '"Groups of 16"', lambda call: call.by_group),
    Row("groups of more than 24", "triton", "not measured", lambda call: call.group > 24),
    Row(
        "heads of more than 256",
        "mosaic_gpu",
        "4% to 72% in 8 cases",
        lambda call: call.head_size > 256,
    ),
    Row("16 bits, up to 5 work items", "triton", "28%, 8%", lambda call: not call.eight_bit and _few(call, 5)),
    Row("8 bits, up to 2 work items", "triton", "25%, 23%", lambda call: call.eight_bit and _few(call, 2)),
    Row(
        "8 bits, heads of 64, groups of 9 to 15 and of more than 16",
        "triton",
        "39%, -",
        lambda call: call.eight_bit and call.head_size == 64 and call.group > 8 and call.group != 16,
    ),
    Row("8 bits", "mosaic_gpu", "44%, 31%", lambda call: call.eight_bit),
    Row(
        "heads of 80, groups other than 4 and 8",
        "triton",
        "16%, 3%",
        lambda call: call.head_size == 80 and call.group not in (4, 8),
    ),
    Row("heads of 112", "triton", "21%, 3%", lambda call: call.head_size == 112),
    Row("other decode", "mosaic_gpu", "14%, 9%", lambda call: True),
)


class RaggedCall(NamedTuple):
    """The facts of a ragged call on which its table depends.

    Attributes:
      few_queries: whether sequences have up to 4 queries on the mean.
      single: whether there is a single sequence.
      eight_bit: whether the caches have 8 bits.
      converts_together: whether all warps convert a tile of 8 bits together, because of new tokens or scales of slots.
      shares_pattern: whether all heads of a group share one block-sparse pattern.
    """

    few_queries: bool
    single: bool
    eight_bit: bool
    converts_together: bool
    shares_pattern: bool

    @classmethod
    def of(cls, op: str, operands: Any) -> "RaggedCall":
        """The facts of a call of `op`."""
        num_seqs, options, cache = operands.seq_lens.shape[0], operands.options, operands.key_cache
        num_rows, num_heads, _ = operands.query.shape
        scales = (Granularity.of(scale) for scale in (options.k_scale, options.v_scale))
        sparse, shares_pattern = options.block_sparse, False
        if sparse is not None:
            has_groups = num_heads > num_kv_heads(cache, options.layout)
            shares_pattern = not has_groups or max(sparse.head_sliding_step, 0) % sparse.vert_stride == 0
        return cls(
            few_queries=num_rows <= 4 * num_seqs,
            single=num_seqs == 1,
            eight_bit=cache.dtype.itemsize == 1,
            converts_together=op == "prefix_attention" or Granularity.SLOT in scales,
            shares_pattern=shares_pattern,
        )


RAGGED: tuple[Row[RaggedCall], ...] = (
    Row(
        "more than 4 queries a sequence, on the mean",
        "mosaic_gpu",
        "24% to 332% in 23 batches",
        lambda call: not call.few_queries,
    ),
    Row(
        "8 bits, with new tokens beside the cache or scales of slots",
        "triton",
        '"Ragged attention over 8 bits on Hopper"',
        lambda call: call.eight_bit and call.converts_together,
    ),
    Row(
        "16 bits, a single sequence",
        "triton",
        '"Random batches of ragged attention"',
        lambda call: not call.eight_bit and call.single,
    ),
    Row(
        "a block-sparse pattern that all heads of a group share",
        "triton",
        '10%, "Block-sparse patterns and 8 bits in layout vllm"',
        lambda call: call.shares_pattern,
    ),
    Row("other ragged attention", "mosaic_gpu", "16% to 37% in 7 batches", lambda call: True),
)


def leads(op: str, operands: Any) -> bool:
    """Whether a kernel of this folder is tried before the other implementations, if it takes the call."""
    if op in ("ragged_paged_attention", "prefix_attention"):
        if op == "prefix_attention" or not is_decode(*_batch(operands)):
            return _leads(RAGGED, RaggedCall.of(op, operands))
        # Decode's table was measured against Triton's decode kernel, which runs no ragged batch of several sequences.
        several = operands.seq_lens.shape[0] > 1
        return _leads(DECODE, DecodeCall.of(op, operands)) or (several and _leads(RAGGED, RaggedCall.of(op, operands)))
    if op in ("mla_paged_attention", "ragged_mla_attention"):
        return True
    if op not in ("paged_attention_v1", "paged_attention_v2", "paged_attention", "write_and_attend"):
        return False
    if operands.options.block_sparse is not None:  # only this op runs patterns in the ragged kernel
        return op == "paged_attention" and _leads(RAGGED, RaggedCall.of(op, operands))
    return _leads(DECODE, DecodeCall.of(op, operands))


def row_of[Call](rows: tuple[Row[Call], ...], call: Call) -> Row[Call]:
    """The row that decides a call."""
    return next(row for row in rows if row.holds(call))


def table(rows: tuple[Row, ...]) -> str:
    """A table as Markdown, as README.md shows it."""
    lines = ["| calls | first | the other one takes longer by |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {row.condition} | `{row.first}` | {row.gain} |" for row in rows)])


def _leads[Call](rows: tuple[Row[Call], ...], call: Call) -> bool:
    return row_of(rows, call).first == "mosaic_gpu"


def _batch(operands: Any) -> tuple[Any, ...]:
    """The arguments of `is_decode`."""
    caches = operands.key_cache, operands.value_cache, operands.block_tables
    return operands.query, *caches, operands.seq_lens, operands.options
