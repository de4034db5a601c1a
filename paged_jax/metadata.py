"""The metadata of one step's batch, which says where each row's tokens are; it is built and checked on the host.

|---------- step N-1 ----------|
|---------------------- step N ------------------------|
|-- token A --|................|------ new tokens ------|
|------------ context_len -----|
|----------------------- seq_len ------------------------|
                               |------- query_len -------|
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from paged_jax._static import integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch, first its prefill rows and then its decode rows, as in vLLM's class of this name.

    A jitted step compiles again if a static field changes; `build_metadata` can round them up, so that steps share one
    compilation. Tokens at or past `query_start_loc[-1]` are padding.

    Attributes:
      slot_mapping: i32 [num_tokens], slot of each new token's key and value, -1 for padding.
      seq_lens: i32 [num_seqs], tokens of each sequence, this step's included.
      query_start_loc: i32 [num_seqs + 1], exclusive prefix sum of the query lengths.
      seq_start_loc: i32 [num_seqs + 1], exclusive prefix sum of `seq_lens`.
      context_lens: i32 [num_seqs], tokens cached before this step.
      block_tables: i32 [num_seqs, max_blocks_per_seq], -1 for none.
      num_prefills: number of prefill rows (static, as are all fields below).
      num_prefill_tokens: new tokens of the prefill rows, with padding if `build_metadata` was asked for more.
      num_decode_tokens: new tokens of the decode rows, with padding if `build_metadata` was asked for more.
      max_query_len: upper bound of the query lengths of the prefill rows; 1 if there are none.
      max_prefill_seq_len: upper bound of `seq_lens` over the prefill rows; 0 if there are none.
      max_decode_seq_len: upper bound of `seq_lens` over the decode rows; 0 if there are none.

    Example:
      >>> from paged_jax import AttentionMetadata, build_metadata
      >>> step = build_metadata([[0, 1], [2, 3]], seq_lens=[7, 6], query_lens=[7, 1], block_size=4)
      >>> isinstance(step, AttentionMetadata), step.num_prefills, step.num_decode_tokens
      (True, 1, 1)
    """

    # Any: a transformation may put other leaves than arrays here (specs, shapes, axes).
    slot_mapping: Any
    seq_lens: Any
    query_start_loc: Any
    seq_start_loc: Any
    context_lens: Any
    block_tables: Any
    num_prefills: int = dataclasses.field(metadata={"static": True})
    num_prefill_tokens: int = dataclasses.field(metadata={"static": True})
    num_decode_tokens: int = dataclasses.field(metadata={"static": True})
    max_query_len: int = dataclasses.field(metadata={"static": True})
    max_prefill_seq_len: int = dataclasses.field(metadata={"static": True})
    max_decode_seq_len: int = dataclasses.field(metadata={"static": True})


def build_metadata(
    block_tables: ArrayLike | Sequence[Sequence[int]],
    seq_lens: ArrayLike | Sequence[int],
    query_lens: ArrayLike | Sequence[int],
    block_size: int,
    *,
    num_prefills: int | None = None,
    num_prefill_tokens: int | None = None,
    num_decode_tokens: int | None = None,
    max_query_len: int | None = None,
    max_prefill_seq_len: int | None = None,
    max_decode_seq_len: int | None = None,
    max_blocks_per_seq: int | None = None,
) -> AttentionMetadata:
    """Builds one step's metadata on the host.

    The rows keep their order, in which the caller's tokens lie too: prefill rows come first. A decode row has one new
    token, or none if it is padding. A prefill row has any number, so a row that verifies speculative tokens is one.

    The keywords after `num_prefills` default to the batch's own values. Larger ones let steps of varying lengths share
    one compilation: the token counts pad `slot_mapping` with -1, `max_blocks_per_seq` widens the tables with -1, and
    the other bounds are recorded as given. Padding can only follow the last token, so that `num_prefill_tokens` cannot
    be raised if the batch has decode tokens.

    Args:
      block_tables: i32 [num_seqs, max_blocks_per_seq], or a list of ids for each row.
      seq_lens: i32 [num_seqs], tokens of each sequence, this step's included.
      query_lens: i32 [num_seqs], new tokens of each sequence.
      block_size: tokens in a block.
      num_prefills: number of prefill rows; by default the leading rows of more than one new token.
      num_prefill_tokens, num_decode_tokens, max_query_len, max_prefill_seq_len, max_decode_seq_len: see
        `AttentionMetadata`.
      max_blocks_per_seq: columns of the block tables.

    Returns:
      The metadata, whose leaves are NumPy arrays.

    Raises:
      ValueError: shapes disagree, rows are out of order, lengths do not fit, a new token has no block, a bound is
        below the batch's own value, or int32 cannot count the slots or the tokens of all sequences.
      TypeError: tables, lengths or sizes are not integers, or are traced.

    Example:
      The batch is a chunk of the last 3 tokens of a prompt of 5, and a decode row whose new token is its ninth.

      >>> from paged_jax import build_metadata
      >>> step = build_metadata([[7, 6], [5, 2]], seq_lens=[5, 9], query_lens=[3, 1], block_size=8)
      >>> step.num_prefills, step.slot_mapping.tolist(), step.query_start_loc.tolist()
      (1, [58, 59, 60, 16], [0, 3, 4])
    """
    block_size = integer("block_size", block_size)
    seq_lens, query_lens = _int32("seq_lens", seq_lens).copy(), _int32("query_lens", query_lens)
    tables = _pad_tables(block_tables, max_blocks_per_seq)
    num_prefills = _check_rows(tables, seq_lens, query_lens, block_size, num_prefills)
    given = num_prefill_tokens, num_decode_tokens, max_query_len, max_prefill_seq_len, max_decode_seq_len
    bounds = _bounds(seq_lens, query_lens, num_prefills, given)
    context_lens = seq_lens - query_lens
    slot_mapping = _slots(tables, context_lens, query_lens, block_size)
    padding = bounds["num_prefill_tokens"] + bounds["num_decode_tokens"] - len(slot_mapping)
    return AttentionMetadata(
        slot_mapping=np.pad(slot_mapping, (0, padding), constant_values=-1),
        seq_lens=seq_lens,
        query_start_loc=_start_loc("query_start_loc", query_lens),
        seq_start_loc=_start_loc("seq_start_loc", seq_lens),
        context_lens=context_lens,
        block_tables=tables,
        num_prefills=num_prefills,
        **bounds,
    )


def check_metadata(
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    num_blocks: int,
    block_size: int,
    *,
    query_start_loc: ArrayLike | None = None,
    slot_mapping: ArrayLike | None = None,
    sliding_window: int | None = None,
) -> None:
    """Checks on the host the values that attention and cache writes rely on without checking them.

    Table entries past a row's last block are not checked, because no op reads them; nor are entries of blocks that lie
    wholly before the sliding window of the row's first query, for ops with this window. The tables of
    `prefix_attention` may hold the blocks of the contexts alone: check these with `context_lens` in place of
    `seq_lens`, and without `query_start_loc`.

    Args:
      block_tables: i32 [num_seqs, max_blocks_per_seq].
      seq_lens: i32 [num_seqs].
      num_blocks: blocks in the cache.
      block_size: tokens in a block.
      query_start_loc: i32 [num_seqs + 1], or None not to check it.
      slot_mapping: i32 [num_tokens], or None not to check it. Negative slots are padding.
      sliding_window: the window of the ops that get these tables, or None.

    Raises:
      ValueError: a length is negative or does not fit in the table; a block id is out of range; query starts do not
        begin at 0, fall, or do not fit the row's length or the number of tokens; a slot is out of range or is written
        twice. The message names the first bad row or token and its value.
      TypeError: tables, lengths, starts, slots or sizes are not integers, or are traced.

    Example:
      >>> from paged_jax import check_metadata
      >>> check_metadata([[7, 8]], [9], num_blocks=8, block_size=8)
      Traceback (most recent call last):
      ValueError: row 0: block id 8 in column 1 must be in [0, 8)
    """
    num_blocks, block_size = integer("num_blocks", num_blocks), integer("block_size", block_size)
    block_tables, seq_lens = _integers("block_tables", block_tables), _int32("seq_lens", seq_lens)
    slot_mapping = None if slot_mapping is None else _integers("slot_mapping", slot_mapping)
    query_start_loc = None if query_start_loc is None else _integers("query_start_loc", query_start_loc)
    if block_tables.ndim != 2 or seq_lens.shape != block_tables.shape[:1]:
        raise ValueError(
            "block_tables must be [num_seqs, max_blocks_per_seq] and seq_lens [num_seqs], got shapes "
            f"{block_tables.shape} and {seq_lens.shape}"
        )
    _check_lens(seq_lens, block_tables.shape[1], block_size)
    starts = np.arange(block_tables.shape[1])[None, :] * block_size
    used = starts < seq_lens[:, None]
    if sliding_window is not None:
        query_lens = np.int32(1)
        if query_start_loc is not None and query_start_loc.shape == (len(seq_lens) + 1,):
            query_lens = np.diff(query_start_loc)
        used &= starts + block_size > (seq_lens - query_lens - integer("sliding_window", sliding_window) + 1)[:, None]
    bad = used & ((block_tables < 0) | (block_tables >= num_blocks))
    _raise_first(
        bad.any(axis=1),
        lambda row: (
            f"row {row}: block id {block_tables[row, bad[row].argmax()]} in column {bad[row].argmax()} "
            f"must be in [0, {num_blocks})"
        ),
    )
    if slot_mapping is not None and slot_mapping.ndim != 1:
        raise ValueError(f"slot_mapping must be [num_tokens], got shape {slot_mapping.shape}")
    if query_start_loc is not None:
        _check_query_start_loc(query_start_loc, seq_lens, slot_mapping)
    if slot_mapping is not None:
        _check_slots(slot_mapping, num_blocks * block_size, query_start_loc)


def _check_rows(
    block_tables: np.ndarray, seq_lens: np.ndarray, query_lens: np.ndarray, block_size: int, num_prefills: int | None
) -> int:
    """Checks the lengths and the order of a batch's rows; returns `num_prefills`, counted if it was None."""
    if not seq_lens.shape == query_lens.shape == block_tables.shape[:1]:
        raise ValueError(
            "block_tables, seq_lens and query_lens must have as many rows, got shapes "
            f"{block_tables.shape}, {seq_lens.shape} and {query_lens.shape}"
        )
    _check_lens(seq_lens, block_tables.shape[1], block_size)
    _raise_first(
        (query_lens < 0) | (query_lens > seq_lens),
        lambda row: f"row {row}: query length {query_lens[row]} must be in [0, seq_len = {seq_lens[row]}]",
    )
    if num_prefills is None:
        num_prefills = int(np.append(query_lens > 1, False).argmin())
    num_prefills = integer("num_prefills", num_prefills)
    if not 0 <= num_prefills <= len(query_lens):
        raise ValueError(f"num_prefills must be in [0, {len(query_lens)}], got {num_prefills}")
    _raise_first(
        (query_lens > 1) & (np.arange(len(query_lens)) >= num_prefills),
        lambda row: (
            f"row {row}: query length {query_lens[row]} after {num_prefills} prefill rows; a decode row "
            "has one new token, and prefill rows come first"
        ),
    )
    return num_prefills


def _check_query_start_loc(query_start_loc: np.ndarray, seq_lens: np.ndarray, slot_mapping: np.ndarray | None) -> None:
    if query_start_loc.shape != (len(seq_lens) + 1,):
        raise ValueError(f"query_start_loc must have shape ({len(seq_lens) + 1},), got {query_start_loc.shape}")
    if query_start_loc[0] != 0:
        raise ValueError(f"row 0: query_start_loc must begin at 0, got {query_start_loc[0]}")
    query_lens = np.diff(query_start_loc.astype(np.int64))
    _raise_first(
        query_lens < 0,
        lambda row: f"row {row}: query_start_loc falls from {query_start_loc[row]} to {query_start_loc[row + 1]}",
    )
    _raise_first(
        query_lens > seq_lens,
        lambda row: f"row {row}: query length {query_lens[row]} exceeds seq_len {seq_lens[row]}",
    )
    if slot_mapping is not None:
        num_tokens = np.shape(slot_mapping)[0]
        _raise_first(
            query_start_loc[1:] > num_tokens,
            lambda row: f"row {row}: query_start_loc {query_start_loc[row + 1]} is past the {num_tokens} tokens",
        )


def _check_slots(slot_mapping: np.ndarray, num_slots: int, query_start_loc: np.ndarray | None) -> None:
    def name(token: int) -> str:
        if query_start_loc is None:
            return f"token {token}"
        row = int(np.searchsorted(np.asarray(query_start_loc), token, side="right")) - 1
        return f"row {row}, token {token}" if row < np.size(query_start_loc) - 1 else f"padding, token {token}"

    _raise_first(
        slot_mapping >= num_slots,
        lambda token: f"{name(token)}: slot {slot_mapping[token]} must be below {num_slots}",
    )
    order = np.argsort(slot_mapping, kind="stable")
    in_order = slot_mapping[order]
    repeats = np.zeros(len(order), np.bool_)
    repeats[order[1:]] = (in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)
    _raise_first(repeats, lambda token: f"{name(token)}: slot {slot_mapping[token]} is written twice")


def _check_lens(seq_lens: np.ndarray, max_blocks_per_seq: int, block_size: int) -> None:
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    _raise_first(seq_lens < 0, lambda row: f"row {row}: seq_len {seq_lens[row]} is negative")
    _raise_first(
        seq_lens > max_blocks_per_seq * block_size,
        lambda row: (
            f"row {row}: seq_len {seq_lens[row]} is past the table of {max_blocks_per_seq} blocks of {block_size}"
        ),
    )


def _integers(name: str, x: Any, axis: str = "row") -> np.ndarray:
    """Checks that `x` holds integers, of any width, and is not traced; gives it as a NumPy array.

    `axis` is a word for its first axis.
    """
    elements = x if isinstance(x, list | tuple) else (x,)
    if any(isinstance(element, Tracer) for element in elements):
        raise TypeError(
            f"{name} must have values, got a traced array: metadata is built and checked on the host, outside jit; "
            "pass the AttentionMetadata to the jitted function"
        )
    try:
        x = np.asarray(x)
    except ValueError:
        shapes = [np.shape(element) for element in elements]
        i = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
        raise ValueError(f"{axis} {i}: {name} must have the shape of the first, {shapes[0]}, got {shapes[i]}") from None
    if x.size and x.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    return x if x.size else x.astype(np.int32)  # NumPy makes [] a float64 array


def _int32(name: str, x: Any, axis: str = "row") -> np.ndarray:
    """Checks that `x` holds integers that fit in int32, and gives it as int32; `axis` is a word for its first axis."""
    x = _integers(name, x, axis)
    unfit = np.atleast_1d((x < -(2**31)) | (x >= 2**31))
    _raise_first(
        unfit,
        lambda i: f"{axis} {np.unravel_index(i, unfit.shape)[0]}: {name} must fit in int32, got {x.ravel()[i]}",
    )
    return x.astype(np.int32)


def _raise_first(bad: np.ndarray, message: Any) -> None:
    if bad.any():
        raise ValueError(message(int(bad.argmax())))


def _bounds(seq_lens: np.ndarray, query_lens: np.ndarray, num_prefills: int, given: tuple) -> dict[str, int]:
    """The static fields after `num_prefills`, by name: the `given` ones (in order) or, for None, the batch's own."""
    prefill, decode = slice(num_prefills), slice(num_prefills, None)
    own = {
        "num_prefill_tokens": query_lens[prefill].sum(),
        "num_decode_tokens": query_lens[decode].sum(),
        # A decode row has at most one token, so that this is the maximum over the prefill rows.
        "max_query_len": query_lens.max(initial=1),
        "max_prefill_seq_len": seq_lens[prefill].max(initial=0),
        "max_decode_seq_len": seq_lens[decode].max(initial=0),
    }
    bounds = {name: _bound(name, wanted, own[name]) for name, wanted in zip(own, given, strict=True)}
    if own["num_decode_tokens"] and bounds["num_prefill_tokens"] > own["num_prefill_tokens"]:
        raise ValueError(
            f"num_prefill_tokens {bounds['num_prefill_tokens']} pads the prefill tokens, but decode tokens follow them"
        )
    return bounds


def _bound(name: str, given: int | None, exact: int) -> int:
    bound = integer(name, exact if given is None else given)
    if bound < exact:
        raise ValueError(f"{name} must be at least the batch's own {exact}, got {bound}")
    return bound


def _start_loc(name: str, lens: np.ndarray) -> np.ndarray:
    return np.append(np.int32(0), _int32(name, lens.cumsum(dtype=np.int64)))


def _pad_tables(block_tables: Any, width: int | None) -> np.ndarray:
    """Gives the tables as a fresh i32 [num_seqs, width], padded with -1."""
    if isinstance(block_tables, list | tuple):
        rows = [_int32("block_tables", row, f"row {i}, column") for i, row in enumerate(block_tables)]
        for row in rows:
            if row.ndim != 1:
                raise ValueError(f"block_tables must be [num_seqs, max_blocks_per_seq], got a row of shape {row.shape}")
        columns = max(map(len, rows), default=0)
    else:
        rows = _int32("block_tables", block_tables)
        if rows.ndim != 2:
            raise ValueError(f"block_tables must be [num_seqs, max_blocks_per_seq], got shape {rows.shape}")
        columns = rows.shape[1]
    tables = np.full((len(rows), _bound("max_blocks_per_seq", width, columns)), -1, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return tables


def _slots(tables: np.ndarray, context_lens: np.ndarray, query_lens: np.ndarray, block_size: int) -> np.ndarray:
    """Finds the slots of all rows' new tokens, i32 [num_tokens]."""
    starts = _start_loc("query_start_loc", query_lens)[:-1]
    rows = np.arange(len(query_lens)).repeat(query_lens)
    positions = np.arange(len(rows)) + (context_lens - starts).repeat(query_lens)
    blocks = tables[rows, positions // block_size]
    _raise_first(
        blocks < 0,
        lambda token: f"row {rows[token]}: no block for the new token at position {positions[token]}",
    )
    return _int32("slot_mapping", blocks.astype(np.int64) * block_size + positions % block_size, "token")
