"""The peers: other implementations of the same work. Each of them is optional.

A peer is a function of a case and its inputs. It returns candidates, and the fastest counts. If it has none, it
raises `Absent` with the reason. FlashInfer and vLLM need PyTorch, so they run in a process of their own.
"""

import contextlib
import functools
import json
import operator
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import flashinfer_kernels, vllm_kernels
from benchmarks import inputs as inputs_lib
from benchmarks.cases import Case
from benchmarks.inputs import Inputs

# The most bytes of keys and values that a peer may copy. It needs several times as much memory while it copies.
_MOST_COPIED = 10**10
_TILES_AND_STEPS = (128, 2), (128, 4), (64, 2)  # of JAX's Mosaic attention; the last pair fits heads of 256
_SPLITS, _PAGES = (1, 8, 32), (4, 8, 16)  # values to try with JAX's op, if a table's width allows them


class Absent(Exception):
    """Raised with the reason if a peer cannot do this work or is not installed."""


class Candidate(NamedTuple):
    """One way of doing a case.

    Attributes:
      label: the name of this way among the contender's ways; empty if there is only one.
      fn: a jitted function that returns the output, which has the query's shape unless `rows` is given.
      argsets: sets of arguments, which calls take in turn.
      rows: a function that picks rows of the output by the numbers of their queries.
    """

    label: str
    fn: Callable
    argsets: list[tuple]
    rows: Callable[[Array, np.ndarray], Array] = operator.getitem


@dataclass(frozen=True)
class Answer:
    """The outcome of one contender at one case.

    Attributes:
      case, contender: the names of both.
      kind: "implementation" for ours, "peer" for others.
      fields: the row's own fields, with the time "us", or with a reason, "absent" or "failed".
    """

    case: str
    contender: str
    kind: str
    fields: dict[str, Any]


Build = Callable[[Case, Inputs], Sequence[Candidate]]


def _plain(case: Case) -> None:
    """Raises `Absent` for layouts and caches that only FlashInfer and our ops take."""
    if case.layout != "hnd" or case.cache_dtype != "bfloat16":
        raise Absent(f"not with layout {case.layout} and {case.cache_dtype} caches")


def xla_decode(case: Case, inputs: Inputs) -> list[Candidate]:
    """Attention as users would write it in jnp: it gathers the blocks, then computes a softmax."""
    _plain(case)
    if case.kv_bytes > _MOST_COPIED:
        raise Absent(f"would gather {case.kv_bytes / 1e9:.0f} GB")

    @jax.jit
    def attend(query, key_cache, value_cache, block_tables, seq_lens):
        key, value = key_cache[block_tables], value_cache[block_tables]  # [seqs, blocks, kv heads, block, head size]
        grouped = query.reshape(query.shape[0], case.num_kv_heads, -1, case.head_size)
        logits = jnp.einsum("skgd,snkbd->skgnb", grouped, key, preferred_element_type=jnp.float32)
        shape = logits.shape
        logits = logits.reshape(*shape[:3], -1) * jnp.float32(case.head_size**-0.5)
        seen = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :] < seq_lens[:, None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], logits, -jnp.inf), axis=-1)
        weights = weights.astype(value.dtype).reshape(shape)
        return jnp.einsum("skgnb,snkbd->skgd", weights, value).reshape(query.shape)

    pools = inputs.query, inputs.key_cache, inputs.value_cache
    return [Candidate("", attend, [(*pools, table, inputs.seq_lens) for table in inputs.block_tables])]


def pallas_decode(case: Case, inputs: Inputs) -> list[Candidate]:
    """JAX's deprecated Pallas op, in each of `pallas_configurations`."""
    _plain(case)
    if case.kv_bytes > _MOST_COPIED:
        raise Absent(f"would copy {case.kv_bytes / 1e9:.0f} GB and more into pools of its own layout")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu import paged_attention as op
    except ImportError as error:
        raise Absent(f"not in this JAX: {error}") from None
    # The op does not scale its logits.
    query = (inputs.query.astype(jnp.float32) * jnp.float32(case.head_size**-0.5)).astype(inputs.query.dtype)
    swap = jax.jit(functools.partial(jnp.swapaxes, axis1=0, axis2=1))
    pools = swap(inputs.key_cache), swap(inputs.value_cache)
    argsets = [(query, *pools, table, inputs.seq_lens) for table in inputs.block_tables]
    candidates = []
    for splits, pages in pallas_configurations(inputs.block_tables[0].shape[1]):
        fn = jax.jit(functools.partial(op.paged_attention, k_splits=splits, pages_per_compute_block=pages))
        candidates.append(Candidate(f"k_splits {splits}, {pages} pages", fn, argsets))
    return candidates


def pallas_configurations(width: int) -> list[tuple[int, int]]:
    """Pairs of `k_splits` and `pages_per_compute_block` that JAX's op takes for tables of this width.

    The op wants k_splits to divide the width, and the pages of a compute block, a power of two, to divide a split. For
    each pair of `_SPLITS` and `_PAGES`, this takes the nearest pair that is allowed. At a width of 512 these are nine
    pairs. At 615 = 3 * 5 * 41 they are three, with 1, 5 and 41 splits and one page.
    """
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    found = []
    for splits in _SPLITS:
        nearest = min(divisors, key=lambda n: max(n / splits, splits / n))
        for pages in _PAGES:
            while (width // nearest) % pages:
                pages //= 2
            found.append((nearest, pages))
    return list(dict.fromkeys(found))


def cudnn_paged(case: Case, inputs: Inputs) -> list[Candidate]:
    """cuDNN's paged attention, which is private in JAX and wants a pool of num_seqs * max_blocks_per_seq blocks.

    Its queries are padded to the most that any sequence has. Under JAX's causal mask a sequence's first query sees one
    token, its second query two, and so on, which is right for whole prompts only. Single queries need no mask.
    """
    _plain(case)
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        paged_attention, padding = cudnn.paged_attention, cudnn.MaskType.PADDING
        causal = cudnn.MaskType.PADDING_CAUSAL
    except (ImportError, AttributeError) as error:
        raise Absent(f"not in this JAX: {error}") from None
    starts = np.asarray(inputs.query_start_loc)
    query_lens = np.diff(starts)
    most = int(query_lens.max())
    if most > 1 and tuple(query_lens) != case.seq_lens:
        raise Absent("JAX's causal mask fits whole prompts only")
    if most == 1 and case.sliding_window is not None:
        raise Absent("no window without a causal mask")

    @jax.jit
    def attend(query, key, value, table, seq_lens, query_lens):
        out = paged_attention(
            query,
            key,
            value,
            query_lens,
            seq_lens,
            table[:, None, :, None],
            table[:, None, :, None],
            scale=case.head_size**-0.5,
            mask_type=causal if most > 1 else padding,
            qkv_layout="BNTH",
            sliding_window_length=case.sliding_window,
        )
        return jnp.asarray(out)

    seqs = np.repeat(np.arange(case.num_seqs), query_lens)
    tokens = np.arange(starts[-1]) - starts[seqs]
    padded = jnp.zeros((case.num_seqs, most, *inputs.query.shape[1:]), inputs.query.dtype)
    padded = jnp.swapaxes(padded.at[seqs, tokens].set(inputs.query), 1, 2)
    take = jax.jit(lambda pool, blocks: pool[blocks])
    argsets = []
    for table in inputs.block_tables:
        # This copies the table's blocks into a pool of their own and shuffles them again.
        order = np.random.default_rng(len(argsets)).permutation(table.size)
        own = np.empty(table.size, np.int32)
        own[order] = np.arange(table.size)
        blocks = table.reshape(-1)[jnp.asarray(order)]
        pools = take(inputs.key_cache, blocks), take(inputs.value_cache, blocks)
        lens = inputs.seq_lens, jnp.asarray(query_lens, jnp.int32)
        argsets.append((padded, *pools, jnp.asarray(own.reshape(table.shape)), *lens))
        if 2 * len(argsets) * case.kv_bytes > inputs_lib.POOL_BYTES:
            break
    return [Candidate("", attend, argsets, lambda out, index: out[seqs[index], :, tokens[index]])]


def _contiguous(case: Case, inputs: Inputs) -> tuple:
    """Query, key and value of prefill as dense [num_seqs, num_tokens, heads, head_size]."""

    @functools.partial(jax.jit, static_argnames="is_key")
    def gather(cache, table, is_key):
        return inputs_lib.tokens(cache[table], case.layout, is_key=is_key)

    _plain(case)
    table = inputs.block_tables[0]
    key = gather(inputs.key_cache, table, is_key=True)
    value = gather(inputs.value_cache, table, is_key=False)
    return inputs.query.reshape(case.num_seqs, -1, case.num_heads, case.head_size), key, value


def cudnn_prefill(case: Case, inputs: Inputs) -> list[Candidate]:
    """cuDNN's causal attention over contiguous keys and values, which paged prefill does not have."""

    @jax.jit
    def attend(query, key, value):
        out = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        return out.reshape(-1, *query.shape[2:])

    return [Candidate("", attend, [_contiguous(case, inputs)])]


def mosaic_prefill(case: Case, inputs: Inputs) -> list[Candidate]:
    """JAX's Mosaic GPU attention in float16 over contiguous keys and values, in three configurations."""
    try:
        from jax.experimental.pallas.ops.gpu import attention_mgpu as op
    except ImportError as error:
        raise Absent(f"not in this JAX: {error}") from None
    query, key, value = _contiguous(case, inputs)
    query = query.astype(jnp.float32) * jnp.float32(case.head_size**-0.5)  # the op does not scale its logits
    query, key, value = (x.astype(jnp.float16) for x in (query, key, value))

    def attend(query, key, value, config):
        out = op.attention(query, key, value, config)
        return out.reshape(-1, *query.shape[2:])

    candidates = []
    for tile, steps in _TILES_AND_STEPS:
        config = op.TuningConfig(block_q=64, block_kv=tile, max_concurrent_steps=steps, causal=True)
        fn = jax.jit(functools.partial(attend, config=config))
        candidates.append(Candidate(f"tiles of {tile}, {steps} steps", fn, [(query, key, value)]))
    return candidates


def _of_whole_prompts(build: Build, case: Case, inputs: Inputs) -> Sequence[Candidate]:
    """Restricts a peer of contiguous prompts to cases of whole prompts of one length."""
    if case.query_lens != case.seq_lens or len(set(case.seq_lens)) > 1 or case.sliding_window is not None:
        raise Absent("takes whole prompts of one length")
    return build(case, inputs)


DECODE: dict[str, Build] = {"cudnn": cudnn_paged, "pallas": pallas_decode, "xla-gather": xla_decode}
RAGGED: dict[str, Build] = {
    "cudnn": cudnn_paged,
    "cudnn-contiguous": functools.partial(_of_whole_prompts, cudnn_prefill),
    "attention_mgpu": functools.partial(_of_whole_prompts, mosaic_prefill),
}
TORCH = (*flashinfer_kernels.CONTENDERS, *vllm_kernels.CONTENDERS)  # their modules describe them


def environment() -> dict[str, str]:
    """The environment for a peer's process.

    It is this process's environment without an empty `TRITON_CACHE_DIR`. jax-triton 0.3 sets that variable when it is
    imported. PyTorch compiles with a Triton of its own, which would then find no folder for its results.
    """
    return {name: value for name, value in os.environ.items() if (name, value) != ("TRITON_CACHE_DIR", "")}


class TorchPeers:
    """FlashInfer's and vLLM's kernels in their own process, because PyTorch shares neither CUPTI nor memory with JAX.

    The process compiles its kernels from the start, but times nothing before `answers` is called.

    Args:
      cases: the cases to time.
      contenders: the names from `TORCH` to time.
      **how: "seconds" and "rested" of `timing.time_calls`; by default they are 0.1 and True.
    """

    def __init__(self, cases: Iterable[Case], contenders: Sequence[str], **how: Any):
        cases = tuple(cases)
        self._left = [(case.name, name) for case in cases for name in contenders]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.torch_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        messages = [self.message(case) | how for case in cases]
        self._send({"contenders": list(contenders), "cases": messages})

    @staticmethod
    def message(case: Case) -> dict[str, Any]:
        """The message that tells the process of a case."""
        return {
            "name": case.name,
            "seq_lens": case.seq_lens,
            "query_lens": case.num_queries,
            "num_heads": case.num_heads,
            "num_kv_heads": case.num_kv_heads,
            "head_size": case.head_size,
            "block_size": case.block_size,
            "cache_dtype": case.cache_dtype,
            "layout": case.layout,
            "sliding_window": case.sliding_window,
            "copies": inputs_lib.rotations(case) if case.kv_bytes < inputs_lib.POOL_BYTES else 1,
        }

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answers(self) -> Iterator[Answer]:
        """Yields answers as they come. If the process ends early, each missing answer gives this reason."""
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._send("go")
            for line in self._process.stdout:
                message = json.loads(line)
                contender, name = message.pop("contender"), message.pop("name")
                self._left.remove((name, contender))
                yield Answer(name, contender, "peer", message)
        for name, contender in self._left:
            yield Answer(name, contender, "peer", {"absent": "its process ended early"})

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
