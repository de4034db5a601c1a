"""The peers: other implementations of the same work, each optional.

A peer is a function of a case and its inputs. It returns candidates, of which the harness takes the fastest, and raises
`Absent` with the reason where it has none. FlashInfer needs PyTorch, so it runs in a process of its own.
"""

import contextlib
import functools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import inputs as inputs_lib
from benchmarks.cases import Case
from benchmarks.inputs import Inputs

# Bytes of keys and values that a peer may copy. It needs several times as much memory while it copies.
_MOST_COPIED = 10**10
_SPLITS, _PAGES = (1, 8, 32), (4, 8, 16)  # what is tried of JAX's op where a table's width allows it


class Absent(Exception):
    """Raised, with the reason, where a peer cannot do this work or is not installed."""


class Candidate(NamedTuple):
    """One way of doing a case.

    Attributes:
      label: tells this way from the contender's other ways; empty where there is only one.
      fn: a jitted function that returns the output in the shape of the query.
      argsets: the arguments of one call after the other; calls rotate through them.
    """

    label: str
    fn: Callable
    argsets: list[tuple]


Build = Callable[[Case, Inputs], Sequence[Candidate]]


def _plain(case: Case) -> None:
    """Raises `Absent` for the layouts and caches that only FlashInfer and we take."""
    if case.layout != "hnd" or case.cache_dtype != "bfloat16":
        raise Absent(f"not with layout {case.layout} and {case.cache_dtype} caches")


def xla_decode(case: Case, inputs: Inputs) -> list[Candidate]:
    """Attends as one would write it in jnp: it gathers the blocks, then computes a softmax."""
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
    """Pairs of `k_splits` and `pages_per_compute_block` for JAX's op, which takes no others with tables this wide.

    The op wants k_splits to divide the width, and the pages of a compute block, a power of two, to divide a split. For
    each pair of `_SPLITS` and `_PAGES` this takes the nearest one that is allowed: at a width of 512 all nine pairs, at
    615 = 3 * 5 * 41 three, of 1, 5 and 41 splits with one page.
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


def cudnn_decode(case: Case, inputs: Inputs) -> list[Candidate]:
    """cuDNN's paged attention, which is private in JAX and wants a pool of num_seqs * max_blocks_per_seq blocks."""
    _plain(case)
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        paged_attention, padding = cudnn.paged_attention, cudnn.MaskType.PADDING
    except (ImportError, AttributeError) as error:
        raise Absent(f"not in this JAX: {error}") from None

    @jax.jit
    def attend(query, key, value, table, seq_lens):
        out = paged_attention(
            query[:, :, None],
            key,
            value,
            jnp.ones_like(seq_lens),
            seq_lens,
            table[:, None, :, None],
            table[:, None, :, None],
            scale=case.head_size**-0.5,
            mask_type=padding,
            qkv_layout="BNTH",
        )
        return jnp.asarray(out).reshape(query.shape)

    take = jax.jit(lambda pool, blocks: pool[blocks])
    argsets = []
    for table in inputs.block_tables:
        # The same blocks in a pool of their own, shuffled again.
        order = np.random.default_rng(len(argsets)).permutation(table.size)
        own = np.empty(table.size, np.int32)
        own[order] = np.arange(table.size)
        blocks = table.reshape(-1)[jnp.asarray(order)]
        pools = take(inputs.key_cache, blocks), take(inputs.value_cache, blocks)
        argsets.append((inputs.query, *pools, jnp.asarray(own.reshape(table.shape)), inputs.seq_lens))
        if 2 * len(argsets) * case.kv_bytes > inputs_lib.POOL_BYTES:
            break
    return [Candidate("", attend, argsets)]


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
    """cuDNN's causal attention over contiguous keys and values, which paged prefill cannot have."""

    @jax.jit
    def attend(query, key, value):
        out = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        return out.reshape(-1, *query.shape[2:])

    return [Candidate("", attend, [_contiguous(case, inputs)])]


def mosaic_prefill(case: Case, inputs: Inputs) -> list[Candidate]:
    """JAX's Mosaic GPU attention in float16 over contiguous keys and values."""
    try:
        from jax.experimental.pallas.ops.gpu import attention_mgpu as op
    except ImportError as error:
        raise Absent(f"not in this JAX: {error}") from None
    config = op.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    query, key, value = _contiguous(case, inputs)
    query = query.astype(jnp.float32) * jnp.float32(case.head_size**-0.5)  # the op does not scale its logits
    query, key, value = (x.astype(jnp.float16) for x in (query, key, value))

    @jax.jit
    def attend(query, key, value):
        out = op.attention(query, key, value, config)
        return out.reshape(-1, *query.shape[2:])

    return [Candidate("", attend, [(query, key, value)])]


DECODE: dict[str, Build] = {"cudnn": cudnn_decode, "pallas": pallas_decode, "xla-gather": xla_decode}
PREFILL: dict[str, Build] = {"cudnn": cudnn_prefill, "attention_mgpu": mosaic_prefill}
FLASHINFER = ("flashinfer", "flashinfer-xqa")  # what these are: benchmarks/flashinfer_decode.py


class FlashInfer:
    """FlashInfer's decode kernels, in a process of their own: PyTorch shares neither CUPTI nor memory with JAX.

    The process compiles its kernels while the harness times other rows. It times nothing before `results` is called.

    Args:
      cases: what to time.
      contenders: of `FLASHINFER`, which of its kernels to time.
    """

    def __init__(self, cases: Iterable[Case], contenders: Sequence[str] = FLASHINFER):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.flashinfer_decode"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send({"contenders": list(contenders), "cases": [self._message(case) for case in cases]})

    @staticmethod
    def _message(case: Case) -> dict[str, Any]:
        return {
            "name": case.name,
            "seq_lens": case.seq_lens,
            "num_heads": case.num_heads,
            "num_kv_heads": case.num_kv_heads,
            "head_size": case.head_size,
            "block_size": case.block_size,
            "cache_dtype": case.cache_dtype,
            "layout": case.layout,
            "copies": inputs_lib.rotations(case) if case.kv_bytes < inputs_lib.POOL_BYTES else 1,
        }

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def results(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Contender, case name and ``{"us", "how", ...}`` or ``{"absent"}``, as they come.

        A process that ends early, or was never able to start, yields no more.
        """
        assert self._process.stdout is not None
        try:
            self._send("go")
        except BrokenPipeError:
            return
        for line in self._process.stdout:
            message = json.loads(line)
            yield message.pop("contender"), message.pop("name"), message

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
