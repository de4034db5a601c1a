"""A random history of one pool for `tests.fuzz`: sequences grow, fork, are swapped out and in, attend and are freed.

A model in NumPy keeps the tokens of every sequence. The pools are poison at first, so the results of attention show a
token that was written to a wrong slot, a copy that was forgotten, or a block that a swap moved to a wrong place.
"""

import dataclasses
from functools import partial

import jax
import numpy as np

import paged_jax
from paged_jax import allocator
from tests import fuzz_check, fuzz_data, inputs, oracle

STEPS = 24
SCALES = ("k_scale", "v_scale")  # in the order of the pools
_MOST_NEW = 7  # the most new tokens of a sequence in one step
_SPARE = 3  # more blocks of the pool to which blocks are swapped


class Story:
    """One history: the allocator's state, the pools on the device, and the tokens of each sequence."""

    def __init__(self, program, implementation, device, *, jitted):
        self.program, self.case = program, program.case
        self.device, self.ops = device, _operations(program, implementation, jitted)
        self.dtype = inputs.dtype_of(self.case.cache_dtype or self.case.dtype)
        self.narrower = self.dtype.itemsize < inputs.dtype_of(self.case.dtype).itemsize
        self.num_seqs = max(2, min(program.num_seqs, 8))
        # The pool has room for some sequences, but not for all of them at their longest.
        self.num_blocks = max(4, min(program.num_blocks, self.num_seqs * 12))
        self.width = max(2, min(program.width, 12))

    def begin(self, rng):
        case = self.case
        self.state = allocator.create(self.num_blocks, case.block_size, self.num_seqs, self.width)
        self.said = [[] for _ in range(self.num_seqs)]
        self.caches = jax.device_put(self.poison(rng, self.num_blocks), self.device)
        # The cache has one scale, because scales for each slot would have to move with the blocks.
        self.scales = {}
        for name in SCALES:
            granularity = getattr(case, name)
            if granularity is not None:
                scale = inputs.make_scale(rng, case, "head" if granularity == "slot" else granularity, self.num_blocks)
                self.scales[name] = scale

    def poison(self, rng, num_blocks):
        case, dtype = self.case, self.dtype
        dims = (num_blocks, case.num_kv_heads, case.block_size, case.head_size)
        return [inputs.poison(rng, shape, dtype) for shape in inputs.cache_shapes(case.layout, *dims, dtype)]

    def append(self, rng):
        """Appends new tokens to some sequences. If blocks run out, frees one sequence instead."""
        counts = rng.integers(0, _MOST_NEW + 1, self.num_seqs) * (rng.random(self.num_seqs) < 0.6)
        capacity = self.width * self.case.block_size
        counts = np.minimum(counts, capacity - self.state.seq_lens).astype(np.int32)
        try:
            state, block_mapping, _ = allocator.append_tokens(self.state, counts)
        except allocator.OutOfBlocks:
            self.free(rng)
            return
        self.caches = self.ops["copy"](self.caches, jax.device_put(block_mapping, self.device))
        rows = np.repeat(np.arange(self.num_seqs, dtype=np.int32), counts)
        positions = np.concatenate([np.arange(n, n + c) for n, c in zip(self.state.seq_lens, counts, strict=True)])
        slots = np.full(self.num_seqs * _MOST_NEW, -1, np.int32)
        slots[: len(rows)] = allocator.slots(state, rows, positions.astype(np.int32))
        shape = (len(slots), self.case.num_kv_heads, self.case.head_size)
        new = [rng.standard_normal(shape).astype(inputs.dtype_of(self.case.dtype)) for _ in "kv"]
        if self.narrower:
            scales = [oracle.scale_at(self.scales.get(name), 0, 0) for name in SCALES]
            new = [fuzz_data.without_ties(x, scale, self.dtype) for x, scale in zip(new, scales, strict=True)]
        for token, row in enumerate(rows):
            self.said[row] = [*self.said[row], (new[0][token], new[1][token])]
        self.caches = self.ops["write"](self.caches, *jax.device_put((*new, slots, self.scales), self.device))
        self.state = state

    def fork(self, rng):
        """Frees a sequence if it is not empty, and lets it share all tokens of another one."""
        parent, child = (int(x) for x in rng.permutation(self.num_seqs)[:2])
        self._free_row(child)
        self.state = allocator.fork(self.state, parent, child)
        self.said[child] = list(self.said[parent])

    def free(self, rng):
        self._free_row(int(rng.integers(self.num_seqs)))

    def _free_row(self, row):
        self.state = allocator.free(self.state, np.arange(self.num_seqs) == row)
        self.said[row] = []

    def swap(self, rng):
        """Moves all blocks to another pool, in another order, poisons this pool, and moves the blocks back."""
        away = rng.permutation(self.num_blocks + _SPARE)[: self.num_blocks]
        there = np.stack([np.arange(self.num_blocks), away], 1).astype(np.int32)
        other = jax.device_put(self.poison(rng, self.num_blocks + _SPARE), self.device)
        other = self.ops["swap"](self.caches, other, jax.device_put(there, self.device))
        poison = jax.device_put(self.poison(rng, self.num_blocks), self.device)
        back = jax.device_put(np.ascontiguousarray(there[:, ::-1]), self.device)
        self.caches = self.ops["swap"](other, poison, back)

    def attend(self, rng):
        """Compares the attention of every sequence's last token to the whole sequence with the reference."""
        case, lens = self.case, np.array([len(said) for said in self.said], np.int32)
        query = rng.standard_normal((self.num_seqs, case.num_heads, case.head_size)).astype(inputs.dtype_of(case.dtype))
        tables = self.state.block_tables
        got = self.ops["attend"](self.caches, *jax.device_put((query, tables, lens, self.scales), self.device))
        fuzz_check.hold_bits(lens, self.state.seq_lens, "lengths")
        for row, said in enumerate(self.said):
            exact, rough = (self._reference(query[row : row + 1], said, exact) for exact in (True, False))
            results = [np.array(x[row : row + 1]) for x in got]
            fuzz_check.hold_results(results, exact, rough, whose=f" of sequence {row}")

    def _reference(self, query, said, exact):
        case, options = self.case, {"scale": None}
        if not said:
            return np.zeros(query.shape), np.full(query.shape[:2], -np.inf)
        both = []
        for side, name in enumerate(SCALES):
            factor = oracle.scale_at(self.scales.get(name), 0, 0)
            vectors = np.stack([token[side] for token in said]).astype(np.float64)
            both.append(
                factor * oracle.quantise(vectors, factor if self.narrower else 1.0, self.dtype).astype(np.float64)
            )
        positions = np.array([len(said) - 1])
        bare = dataclasses.replace(case, logits_soft_cap=None, sliding_window=None, block_sparse=None)
        return fuzz_check.attend(query, *both, positions, bare, options, True, exact)


def _operations(program, implementation, jitted):
    """Makes the operations. A jitted one updates its pools in place."""
    common = {"implementation": implementation}
    layout = {"layout": program.case.layout}

    def copy(caches, block_mapping):
        return paged_jax.copy_blocks(*caches, block_mapping, **common)

    def write(caches, key, value, slots, scales):
        return paged_jax.write_to_paged_cache(key, value, *caches, slots, **scales, **layout, **common)

    def swap(sources, caches, block_mapping):
        return paged_jax.swap_blocks(*sources, *caches, block_mapping, **common)

    def attend(caches, query, tables, lens, scales):
        flags = scales | layout | common
        return paged_jax.paged_attention(query, *caches, tables, lens, return_lse=True, **flags)

    if not jitted:
        return {"copy": copy, "write": write, "swap": swap, "attend": attend}
    jit = partial(jax.jit, donate_argnums=0)
    return {"copy": jit(copy), "write": jit(write), "swap": jax.jit(swap, donate_argnums=1), "attend": jax.jit(attend)}


def begin(program, implementation, device, *, jitted=True):
    """Makes a function that runs one random history. For an interpreter that takes arrays only, nothing is jitted."""
    story = Story(program, implementation, device, jitted=jitted)

    def run(rng):
        story.begin(rng)
        for step in range(STEPS):
            action = str(rng.choice(["append", "append", "append", "fork", "free", "swap"]))
            getattr(story, action)(rng)
            if step % 4 == 3:
                story.attend(rng)

    return run
