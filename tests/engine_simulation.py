"""An engine whose device is simulated in NumPy: no model, no JAX program, and every read of the pool is checked.

`SimulatedRunner` replaces the programs of the engine's `Runner`; packing, the choice of a program and the calls that
move blocks stay the runner's own. A slot of the simulated pool holds a token and a chain: a number that depends on all
tokens of the sequence up to this one, and stands for the key and the value. A row that computes tokens reads the slots
of its whole context, in each group of layers as far as the group's window reaches, and fails where one of them was
never written, holds another sequence's token, or is written by another row of a program that attends before it writes.
`simulated_tokens.py` has the chains and the tokens that samples draw.
"""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np

from paged_jax.engine import Engine
from paged_jax.engine.batch import FLOATS, Draws, StepShape
from paged_jax.engine.groups import host_blocks
from paged_jax.engine.runner import Runner
from paged_jax.engine.sampling import Drawn, Kind
from tests.simulated_tokens import VOCAB, expected_tokens, link, logprob, mix, pick

_EMPTY = -1  # the token of a slot that was never written


def make_engine(num_blocks, block_size, config, kind=Engine, **options):
    """Makes an engine over simulated pools: of one layer, or of one for each of the option `sliding_windows`."""
    num_layers = len(options.get("sliding_windows") or [None])
    caches = (SimpleNamespace(num_blocks=num_blocks, block_size=block_size, nbytes=num_blocks),) * num_layers
    with mock.patch("paged_jax.engine.engine.Runner", SimulatedRunner):
        return kind(None, {"salt": 0}, caches, config, **options)


class Pool:
    """Tokens and chains of all slots, uint64 and int64 [num_blocks, block_size]."""

    def __init__(self, num_blocks, block_size):
        self.tokens = np.full((num_blocks, block_size), _EMPTY, np.int64)
        self.chains = np.zeros((num_blocks, block_size), np.uint64)

    def take(self, other, pairs):
        """Copies blocks of another pool, or of this one, all at once."""
        source, destination = pairs.T
        self.tokens[destination], self.chains[destination] = other.tokens[source], other.chains[source]

    def check_blocks(self, blocks, salt):
        """Checks that blocks are full and that each block's tokens are consecutive."""
        tokens, chains = self.tokens[blocks], self.chains[blocks]
        assert (tokens != _EMPTY).all(), "a cached block is not written"
        assert (chains[:, 1:] == link(chains[:, :-1], tokens[:, 1:], salt)).all(), "a cached block is a mixture"


class Later:
    """A result that is still on the device: reading it may fail."""

    def __init__(self, array, read):
        self._array, self._read = array, read

    def copy_to_host_async(self):
        """Does nothing: the array is read later."""

    def __array__(self, dtype=None, copy=None):
        self._read()
        return self._array


class SimulatedRunner(Runner):
    """A `Runner` whose programs are NumPy functions.

    Attributes:
      pool, host_pool: the two pools, in which the blocks of the groups of layers lie one after the other.
      bases, host_bases: where each group's blocks begin.
      interrupt: called with the name of each program before it runs ("copy", "swap_in", "swap_out", "model", "draw"),
        and with "read" before the step's results are read; it may raise.
    """

    def __init__(self, step, weights, caches, config, groups, **_):
        self.config, self.groups, self.num_shards = config, groups, 1
        self.block_size = caches[0].block_size
        self.bases = np.cumsum([0, *(group.num_blocks for group in groups)])
        self.host_bases = np.cumsum([0, *(host_blocks(group, self.block_size, config) for group in groups)])
        self.interrupt = lambda name: None
        self._weights = weights
        kinds = Kind.all_of(config.max_logprobs, config.adjustments)
        self.vocab_size = VOCAB
        self._programs = {shape: self._model(shape) for shape in self._shapes()}
        self._programs |= {(shape.num_logits, kind): self._draw(kind) for shape in self._shapes() for kind in kinds}
        self._programs |= {name: self._mover(name) for name in ("copy", "swap_in", "swap_out")}
        self._programs |= {"tables": self._change, "adjust": self._adjust}
        self.num_compiled = len(self._programs)
        self.reset()

    def reset(self):
        """Empties both pools: any read of an earlier token then fails."""
        self.pool = self._caches = Pool(self.bases[-1], self.block_size)
        self.host_pool = self._host_caches = Pool(self.host_bases[-1], self.block_size)
        self._last_tokens = np.full(self.config.max_num_seqs, _EMPTY, np.int32)
        shape = self.config.max_num_seqs, self.max_blocks_per_seq
        self._tables = tuple(np.full(shape, _EMPTY, np.int32) for _ in self.groups)
        self._adjustments = [None] * self.config.max_num_seqs
        self._no_masks = {n: np.full((n, 1), 2**32 - 1, np.uint32) for n in range(self.config.max_num_seqs + 1)}

    def _adjust(self, rows, seat, row):
        self.interrupt("adjust")
        return [*rows[:seat], row, *rows[seat + 1 :]]

    def _change(self, tables, entries):
        self.interrupt("tables")
        for table, some in zip(tables, entries, strict=True):
            seats, columns, blocks = some[some[:, 0] < self.config.max_num_seqs].T
            table[seats, columns] = blocks
        return tables

    def _mover(self, name):
        bases = {
            "copy": (self.bases, self.bases),
            "swap_out": (self.bases, self.host_bases),
            "swap_in": (self.host_bases, self.bases),
        }[name]

        def move(*caches_and_pairs):
            self.interrupt(name)
            *caches, pairs = caches_and_pairs
            for group, some in enumerate(pairs):
                named = some[(some >= 0).all(axis=1)]
                assert (named < np.diff(bases)[:, group]).all(), "a block of another group is moved"
                caches[-1].take(caches[0], named + [base[group] for base in bases])
            return caches[-1]

        return move

    def _model(self, shape: StepShape):
        def run(weights, pool, last_tokens, tables, packed):
            self.interrupt("model")
            parts = shape.split(packed)
            ids = np.where(
                parts["token_ids"] < 0, last_tokens[np.maximum(-1 - parts["token_ids"], 0)], parts["token_ids"]
            )
            starts, lens, chains = parts["query_start_loc"], parts["seq_lens"], np.zeros(shape.num_tokens, np.uint64)
            rows = [row for row in range(shape.num_rows) if lens[row]]
            if shape.is_decode:
                starts = np.arange(shape.num_rows + 1)
            assert shape.num_prompts or shape.is_decode
            assert (np.diff(starts) >= 0).all(), "padding rows begin where the last row ends"
            assert all(
                starts[row + 1] - starts[row] == 1 for row in rows[0 if shape.is_decode else shape.num_prompts :]
            )
            seats, columns = parts["row_seats"][rows], (lens[rows] - 1) // self.block_size
            for table, blocks in zip(tables, parts["row_blocks"], strict=True):
                table[seats, columns] = blocks[rows]
            if shape.num_prefixes:
                self._check_prefixes(parts, tables)
            counts = {row: starts[row + 1] - starts[row] for row in rows}
            # The slots that a row reads and writes in each group, those of its new tokens last.
            slots = {row: self._slots(tables, parts["row_seats"][row], lens[row], counts[row]) for row in rows}
            written = [slot for row in rows for some in slots[row] for slot in some[-counts[row] :].tolist()]
            assert len(set(written)) == len(written), "two tokens are written to one slot"
            if shape.is_decode:
                for row in rows:
                    other = set(written) & {slot for some in slots[row] for slot in some[:-1].tolist()}
                    assert not other, f"row {row} reads slots {other}, which other rows of a decode step write"
            tokens, all_chains, salt = pool.tokens.reshape(-1), pool.chains.reshape(-1), weights["salt"]
            for row in rows:  # all tokens are written before any is attended to, as a step must do
                for some in slots[row]:
                    tokens[some[-counts[row] :]] = ids[starts[row] : starts[row + 1]]
            for row in _writers_first(rows, slots, counts):
                contexts = [some[: -counts[row]] for some in slots[row]]
                for context in contexts:
                    self._check_context(tokens[context], all_chains[context], lens[row] - counts[row], salt)
                    same = all_chains[context] == all_chains[contexts[0]][len(contexts[0]) - len(context) :]
                    assert same.all(), "groups hold tokens of different sequences"
                chain = int(all_chains[contexts[0][-1]]) if len(contexts[0]) else 0
                for i in range(counts[row]):
                    chain = link(chain, int(ids[starts[row] + i]), salt)
                    chains[starts[row] + i] = chain
                    for some in slots[row]:
                        all_chains[some[i - counts[row]]] = chain
            assert (parts["row_seats"][len(rows) :] == self.config.max_num_seqs).all()
            return pool, tables, chains[parts["logit_rows"]], packed[shape.size - Draws.size(shape.num_logits) :]

        return run

    def _slots(self, tables, seat, length, num_new):
        """Returns for each group the slots of a row's new tokens and of the earlier tokens in the group's window."""
        found = []
        for group, table, base in zip(self.groups, tables, self.bases, strict=False):
            window = length if group.sliding_window is None else group.sliding_window
            positions = np.arange(max(length - num_new - window + 1, 0), length)
            blocks = table[seat, positions // self.block_size]
            assert ((blocks >= 0) & (blocks < group.num_blocks)).all()
            found.append((base + blocks) * self.block_size + positions % self.block_size)
        return found

    def _check_prefixes(self, parts, tables):
        """Checks that the rows of each shared prefix have its full blocks, and none of them is written to."""
        (table,), starts, lens = tables, parts["prefix_starts"], parts["prefix_lens"]
        assert starts[0] == 0
        for prefix, length in enumerate(lens):
            rows = range(starts[prefix], starts[prefix + 1])
            assert (len(rows) > 1) == (length > 0)
            assert length % self.block_size == 0
            assert (length < parts["seq_lens"][list(rows)]).all()
            shared = [table[parts["row_seats"][row], : length // self.block_size].tolist() for row in rows]
            assert all(blocks == shared[0] for blocks in shared)

    @staticmethod
    def _check_context(tokens, chains, length, salt):
        """Checks that a row reads the last ones of its sequence's first `length` tokens, in order."""
        assert (tokens != _EMPTY).all(), "a row reads a slot that was never written"
        before = np.concatenate([np.zeros(1, np.uint64), chains[:-1]])
        is_linked = chains == link(before, tokens, salt)
        assert is_linked[int(len(tokens) < length) :].all(), "a row reads tokens of another sequence"

    def _draw(self, kind):
        def run(chains, packed, last_tokens, rows=None, seats=(), masks=None):
            self.interrupt("draw")
            parts = dict(
                zip(
                    (f.name for f in dataclasses.fields(Draws)),
                    packed.reshape(len(dataclasses.fields(Draws)), -1),
                    strict=True,
                )
            )
            bits = {name: part.view(np.uint32).astype(np.uint64) for name, part in parts.items()}
            seed = bits["seed_high"] << np.uint64(32) | bits["seed_low"]
            drawn = chains
            for value in (*(bits[name] for name in FLOATS), bits["top_k"], seed, bits["index"], bits["position"]):
                drawn = mix(drawn, value)
            is_random = parts["temperature"].view(np.float32) > 0
            ids = (np.where(is_random, drawn, chains) % np.uint64(VOCAB)).astype(np.int32)
            assert kind >= Kind.RANDOM or not is_random.any()
            is_cut = is_random & ((parts["top_k"] > 0) | (parts["top_p"].view(np.float32) < 1))
            assert kind >= Kind.TOP or not is_cut.any()
            assert kind.is_adjusted == (rows is not None)
            for i, seat in enumerate(seats):
                if seat < self.config.max_num_seqs:
                    chain = int(drawn[i] if is_random[i] else chains[i])
                    ids[i] = self._draw_adjusted(chain, rows[seat], parts["position"][i], masks[i])
            is_row = parts["seats"] < self.config.max_num_seqs
            last_tokens = last_tokens.copy()
            last_tokens[parts["seats"][is_row]] = ids[is_row]
            results = [ids]
            if kind.has_logprobs:
                most = self.config.max_logprobs
                scored = np.where(parts["scored"] < 0, ids, parts["scored"])
                scores = logprob(mix(chains, scored.astype(np.uint64)))
                results += [scores, np.tile(ids[:, None], most), np.tile(scores[:, None], most)]
            results = Drawn(*(Later(array, lambda: self.interrupt("read")) for array in results))
            return (last_tokens, results) if rows is None else (last_tokens, rows, results)

        return run

    @staticmethod
    def _draw_adjusted(chain, row, position, mask):
        numbers = row.repetition, row.presence, row.frequency, row.min_p
        holding = [(t, b) for t, b, until in zip(row.bias_ids, row.biases, row.until, strict=True) if position < until]
        biases = {}
        for token, bias in holding:
            if token < VOCAB:
                biases[int(token)] = biases.get(int(token), 0) + bias
        token = pick(chain, numbers, row.counts, biases, [t for t in range(VOCAB) if mask[0] >> np.uint32(t) & 1])
        row.counts[token] += 1
        return token


class Clairvoyant:
    """A `Proposer` that knows the simulation, and guesses each token rightly with a certain probability.

    Args:
      engine: an engine over a simulated pool.
      draw: the source of all choices.
      share: the probability.
    """

    def __init__(self, draw, share):
        self.engine, self.draw, self.share = None, draw, share
        self.known: dict[tuple[int, int], list[int]] = {}  # each sample's tokens when it was last asked for

    def propose(self, rows, /):
        """Guesses some tokens of each row, at most the row's `most`."""
        return [self._guess(*row) for row in rows]

    def forget(self, key, /):
        """Forgets a sample that it knows."""
        del self.known[key]

    def _guess(self, key, tokens, most):
        known = self.known.setdefault(key, [])
        assert tokens[: len(known)] == known, "a sample began again, and the proposer was not told"
        known += tokens[len(known) :]
        (sequence,) = (s for s in self.engine._requests[key[0]] if s.arrival == key)
        assert sequence.tokens is tokens
        assert most >= 0
        assert not sequence.params.is_adjusted, "such a sequence gets no drafts"
        salt = self.engine._runner._weights["salt"]
        params = dataclasses.replace(sequence.params, max_tokens=self.draw.randint(0, most) + 1, stop_token_ids=())
        right = expected_tokens(tokens, params, key[1], len(tokens) + most, sequence.seed, ((0, salt),))
        return [token if self.draw.random() < self.share else self.draw.randrange(VOCAB) for token in right[:most]]


def _writers_first(rows, slots, counts):
    """Orders rows so that a row comes after all rows whose new tokens it reads."""
    writer = {slot: row for row in rows for some in slots[row] for slot in some[-counts[row] :].tolist()}
    done, order = set(), []

    def visit(row):
        if row not in done:
            done.add(row)
            for some in slots[row]:
                for slot in some.tolist():
                    visit(writer.get(slot, row))
            order.append(row)

    for row in rows:
        visit(row)
    return order
