"""The compiled programs of an engine and the arrays they work on: weights, caches, each seat's last token and table.

The runner compiles all programs when it is made, before the first request, and nothing is compiled later. A step runs
two programs. The first runs the model. The second draws the tokens and keeps them on the device, where the next step
finds them. Because they are separate, the model is compiled once for each shape, instead of once for each way to draw;
and the host can work on masks while the first program runs (mask.py). Small programs copy blocks, swap them out and
in, change block tables, and set how a seat's logits are changed (adjust.py).

    host     plan i+1 ──► packed ──┐          plan i+2 ──► packed ──┐        reads what step i drew
    device   step i ──► last tokens ──► step i+1 ──► last tokens ──► step i+2
"""

import collections.abc
import dataclasses
import time
from functools import partial
from typing import Any

import jax
import numpy as np

from paged_jax.engine.adjust import Adjustments, num_words
from paged_jax.engine.arrays import (
    SCALES,
    change_tables,
    check_caches,
    copy_all,
    in_calls,
    logits_at,
    members,
    num_parts,
    on_host,
    pool,
    replicated,
    swap_all,
    usable,
    with_own_scales,
)
from paged_jax.engine.batch import Caches, Step, StepShape
from paged_jax.engine.blocks import Pairs
from paged_jax.engine.compiling import Compiler, CompilerOptions
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.groups import Group, host_blocks
from paged_jax.engine.pack import pack, pack_made_up
from paged_jax.engine.plan import Plan
from paged_jax.engine.pools import Entry
from paged_jax.engine.sampling import Drawn, Kind, draw_program
from paged_jax.engine.seats import Need
from paged_jax.engine.sequence import Sequence
from paged_jax.engine.weights import check_weights

_ENTRIES = 512  # how many entries of block tables one call of the program that changes them takes
_PAIRS = 32  # how many pairs of blocks one call of a copy or a swap moves


@dataclasses.dataclass
class Launched:
    """A launched step.

    Attributes:
      plan: its plan.
      num_logits, kind: name the program that draws its tokens.
      inputs: the logits and the packed `Draws` that this program works on; None once it is started, so that the device
        can free the logits.
      drawn: the tokens that it draws, which are still on the device; None until `Runner.draw`.
    """

    plan: Plan
    num_logits: int
    kind: Kind
    inputs: tuple[jax.Array, jax.Array] | None
    drawn: Drawn | None = None


class Runner:
    """Compiles a model's programs and launches planned steps.

    Args:
      step: the model's function.
      weights: the model's arrays.
      caches: one for each layer. The runner donates them to its programs: the caller must not use them any more.
      config: the engine's config.
      groups: the groups of layers.
      show_progress: whether a bar on stderr shows how many programs are compiled; it needs the package rich.
      compiler_options: XLA's options for the programs, or a function as `Engine` takes it.

    Attributes:
      block_size: tokens in a block.
      vocab_size: how many logits the model gives for a token.
      num_compiled: how many programs were compiled; it never changes.
      num_started: how many runs of programs were started.
    """

    num_started = 0

    def __init__(
        self,
        step: Step,
        weights: Any,
        caches: Caches,
        config: EngineConfig,
        groups: tuple[Group, ...],
        *,
        show_progress: bool = False,
        compiler_options: CompilerOptions | None = None,
    ):
        check_caches(caches)
        self.config, self.groups, self.block_size = config, groups, caches[0].block_size
        self._step, self._weights = step, weights
        self._scales = [members(cache, SCALES) for cache in caches]
        self._caches = with_own_scales(caches, self._scales)
        self.num_shards = num_parts(pool(caches[0]).sharding, 0)
        if self.num_shards > 1 and config.num_host_blocks:
            raise ValueError("num_host_blocks needs pools whose blocks are not split over devices")
        self._replicated = replicated(pool(caches[0]).sharding)
        self._last_tokens = jax.device_put(np.zeros(config.max_num_seqs, np.int32), self._replicated)
        tables = np.zeros((config.max_num_seqs, self.max_blocks_per_seq), np.int32)
        self._tables = tuple(jax.device_put(tables, self._replicated) for _ in groups)
        host_sizes = {i: host_blocks(group, self.block_size, config) for group in groups for i in group.layers}
        host_caches = tuple(on_host(cache, host_sizes[i] or self.num_shards) for i, cache in enumerate(caches))
        self._host_caches = with_own_scales(host_caches, self._scales)
        self.vocab_size = 0  # compiling finds it
        self._programs = self._compile(show_progress, compiler_options)
        self.num_compiled = len(self._programs)
        self._warm_up()

    @property
    def max_blocks_per_seq(self) -> int:
        """The blocks of the longest sequence; its last block may be partly used."""
        return -(-self.config.max_model_len // self.block_size)

    def reset(self) -> None:
        """Zeroes pools, last tokens and tables that a failed step has donated or left unusable."""
        arrays = self._caches, self._host_caches, self._last_tokens, self._tables
        caches, host_caches, self._last_tokens, self._tables = jax.tree.map(usable, arrays)
        self._caches, self._host_caches = (with_own_scales(each, self._scales) for each in (caches, host_caches))
        self._adjustments = jax.tree.map(usable, self._adjustments)

    def update_weights(self, weights: Any) -> None:
        """Makes all further steps use these weights, which the caller has checked."""
        self._weights = weights

    def check_weights(self, weights: Any) -> None:
        """Raises a ValueError if the compiled programs cannot take these weights."""
        check_weights(weights, self._weights)

    def launch(self, plan: Plan) -> Launched:
        """Starts a step's model and returns at once.

        Args:
          plan: the step's plan.

        Returns:
          The launched step, for `draw`.
        """
        self._move("swap_out", plan.swap_out)
        self._move("swap_in", plan.swap_in)
        self._move("copy", plan.copies)
        self._change_tables(plan.entries)
        for sequence in plan.seated:
            if sequence.seat is not None and sequence.params.is_adjusted:
                self._set_adjustments(sequence.seat, sequence)
        shape, kind = self._choose(plan)
        logits, draws = self._run_model(shape, pack(plan, shape, self.config.max_num_seqs, kind))
        return Launched(plan, shape.num_logits, kind, (logits, draws))

    def draw(self, launched: Launched, masks: np.ndarray | None = None) -> None:
        """Starts drawing a step's tokens and returns at once.

        Args:
          launched: the step.
          masks: u32 [num_logits, ceil(vocab_size / 32)], which tokens each row may draw (adjust.py); None for all.
        """
        assert launched.inputs is not None, "the step has drawn its tokens"
        inputs, launched.inputs = launched.inputs, None
        samples, adjusted = launched.plan.samples, []
        if launched.kind.is_adjusted:
            numbered = enumerate(zip(samples.sequences, samples.seats.tolist(), strict=True))
            adjusted = [(row, seat) for row, (sequence, seat) in numbered if sequence.params.is_adjusted]
        launched.drawn = self._run_draw(launched.num_logits, launched.kind, *inputs, adjusted, masks)
        for array in jax.tree.leaves(launched.drawn):
            array.copy_to_host_async()

    def measure(self, context_len: int, repeats: int) -> dict[StepShape, float]:
        """Times the steps of each shape on made-up sequences, whose new tokens overwrite blocks of the caches.

        Args:
          context_len: tokens of each sequence, the new ones included; see `Engine.measure_steps`.
          repeats: how many steps to average over.

        Returns:
          The seconds of a step of each shape; the time in which the host plans a step is not included.
        """
        times, rng, num_blocks = {}, np.random.default_rng(0), [group.num_blocks for group in self.groups]
        made_up = tuple(
            rng.integers(0, count, table.shape, np.int32) for count, table in zip(num_blocks, self._tables, strict=True)
        )
        self._tables = jax.device_put(made_up, self._replicated)
        for shape in self._shapes():
            packed = pack_made_up(shape, context_len, num_blocks, self.config.max_num_seqs, self.block_size)
            jax.block_until_ready(self._run(shape, Kind.GREEDY, packed))
            began = time.perf_counter()
            for _ in range(repeats):
                drawn = self._run(shape, Kind.GREEDY, packed)
            jax.block_until_ready(drawn)
            times[shape] = (time.perf_counter() - began) / repeats
        return times

    @staticmethod
    def read(launched: Launched) -> Drawn:
        """Waits for the tokens that a step draws, and returns them in NumPy arrays."""
        assert launched.drawn is not None, "the step draws no tokens yet"
        return jax.tree.map(np.asarray, launched.drawn)

    def _run(self, shape: StepShape, kind: Kind, packed: np.ndarray) -> Drawn:
        return self._run_draw(shape.num_logits, kind, *self._run_model(shape, packed))

    def _run_model(self, shape: StepShape, packed: np.ndarray) -> tuple[Any, Any]:
        inputs = self._weights, self._caches, self._last_tokens, self._tables, packed
        self._caches, self._tables, logits, draws = self._start(shape, *inputs)
        return logits, draws

    def _run_draw(
        self,
        num_rows: int,
        kind: Kind,
        logits: Any,
        draws: Any,
        adjusted: collections.abc.Iterable[tuple[int, int]] = (),
        masks: np.ndarray | None = None,
    ) -> Drawn:
        """Runs the program that draws; `adjusted` are the rows whose logits change, each with its seat."""
        inputs = logits, draws, self._last_tokens
        if not kind.is_adjusted:
            self._last_tokens, drawn = self._start((num_rows, kind), *inputs)
            return drawn
        seats = np.full(num_rows, self.config.max_num_seqs, np.int32)
        for row, seat in adjusted:
            seats[row] = seat
        inputs = *inputs, self._adjustments, seats, self._no_masks[num_rows] if masks is None else masks
        self._last_tokens, self._adjustments, drawn = self._start((num_rows, kind), *inputs)
        return drawn

    def _start(self, name: Any, *arguments: Any) -> Any:
        results = self._programs[name](*arguments)
        self.num_started += 1
        return results

    def _choose(self, plan: Plan) -> tuple[StepShape, Kind]:
        """The smallest compiled shape in which the plan fits, and the kind of draws that it needs."""
        kind = Kind.of(plan.samples.needs | (Need.LOGPROBS if plan.scores else 0))
        if plan.is_decode:
            rows = max(len(plan.rows), len(plan.samples) + len(plan.scores))
            rows = next(size for size in self.config.decode_rows if size >= rows)
            shape = self._shape(rows, rows, True)
            return self._sharing(shape) if plan.prefixes else shape, kind
        num_tokens = int(plan.rows.counts.sum())
        if plan.has_drafts:
            return self._verify_shape(next(size for size in self.config.verify_tokens if size >= num_tokens)), kind
        num_tokens = next(size for size in self.config.mixed_tokens if size >= num_tokens)
        return self._shape(num_tokens, self.config.max_num_seqs, False), kind

    def _shape(self, num_tokens: int, num_rows: int, is_decode: bool) -> StepShape:
        num_prompts = 0 if is_decode else self.config.max_prompts_per_step
        return StepShape(num_tokens, num_rows, self.max_blocks_per_seq, is_decode, num_prompts, len(self.groups))

    def _verify_shape(self, num_tokens: int) -> StepShape:
        num_rows = self.config.max_num_seqs
        num_prompts, num_groups = min(num_rows, num_tokens // 2), len(self.groups)
        return StepShape(num_tokens, num_rows, self.max_blocks_per_seq, False, num_prompts, num_groups, True)

    def _shapes(self) -> list[StepShape]:
        mixed = [self._shape(size, self.config.max_num_seqs, False) for size in self.config.mixed_tokens]
        verify = [self._verify_shape(size) for size in self.config.verify_tokens]
        decode = [self._shape(size, size, True) for size in self.config.decode_rows]
        may_share = self.config.max_shared_prefixes and not any(group.sliding_window for group in self.groups)
        sharing = [self._sharing(shape) for shape in decode if may_share and shape.num_rows > 1]
        return mixed + verify + decode + sharing

    def _sharing(self, shape: StepShape) -> StepShape:
        """The shape of decode steps of so many rows that share prefixes."""
        return shape._replace(num_prefixes=self.config.max_shared_prefixes)

    def _compile(self, show_progress: bool, options: CompilerOptions | None) -> dict[Any, Any]:
        pairs = (jax.ShapeDtypeStruct((_PAIRS, 2), np.int32),) * len(self.groups)
        entries = (jax.ShapeDtypeStruct((_ENTRIES, 3), np.int32, sharding=self._replicated),) * len(self.groups)
        copy = jax.jit(partial(copy_all, groups=self.groups), donate_argnums=0)
        swap = jax.jit(partial(swap_all, groups=self.groups), donate_argnums=1)
        change = jax.jit(change_tables, donate_argnums=0, out_shardings=self._replicated)
        with Compiler(options, show_progress) as compiler:
            for shape in self._shapes():
                model = self._lower_model(shape)
                compiler.add(shape, model)
                *_, logits, draws = model.out_info
                if not self.vocab_size:
                    self.vocab_size = logits.shape[1]
                    self._make_adjustments(logits)
                for kind in Kind.all_of(self.config.max_logprobs, self.config.adjustments):
                    if (shape.num_logits, kind) not in compiler and not (shape.is_verify and kind.is_adjusted):
                        compiler.add((shape.num_logits, kind), self._lower_draw(kind, logits, draws))
            compiler.add("copy", copy.lower(self._caches, pairs))
            compiler.add("tables", change.lower(self._tables, entries))
            if self.config.num_host_blocks:
                compiler.add("swap_out", swap.lower(self._caches, self._host_caches, pairs))
                compiler.add("swap_in", swap.lower(self._host_caches, self._caches, pairs))
            if self.config.adjustments:
                compiler.add("adjust", self._lower_adjust())
            return compiler.finish()

    def _lower_model(self, shape: StepShape) -> Any:
        windows = tuple(group.sliding_window for group in self.groups)

        def run_model(weights, caches, last_tokens, tables, packed):
            batch, draws, tables = shape.unpack(packed, last_tokens, tables, self.block_size, windows)
            logits, caches = self._step(weights, caches, batch)
            return caches, tables, logits, draws

        caches_at = jax.tree.map(lambda array: array.sharding, self._caches)
        packed = jax.ShapeDtypeStruct((shape.size,), np.dtype(np.int32), sharding=self._replicated)
        inputs = self._weights, self._caches, self._last_tokens, self._tables, packed
        _, _, logits, _ = jax.eval_shape(run_model, *inputs)
        at = caches_at, self._replicated, logits_at(self._caches[0], logits.shape[1]), self._replicated
        return jax.jit(run_model, donate_argnums=(1, 3), out_shardings=at).lower(*inputs)

    def _lower_draw(self, kind: Kind, logits: Any, draws: Any) -> Any:
        program = draw_program(kind, self.config.max_logprobs or 0, self.config.max_num_seqs)
        num_rows = logits.shape[0]
        logits = jax.ShapeDtypeStruct(logits.shape, logits.dtype, sharding=logits_at(self._caches[0], logits.shape[1]))
        draws = jax.ShapeDtypeStruct(draws.shape, draws.dtype, sharding=self._replicated)
        inputs = logits, draws, self._last_tokens
        if not kind.is_adjusted:
            return jax.jit(program, donate_argnums=2, out_shardings=self._replicated).lower(*inputs)
        at = self._replicated, jax.tree.map(lambda array: array.sharding, self._adjustments), self._replicated
        seats = jax.ShapeDtypeStruct((num_rows,), np.dtype(np.int32), sharding=self._replicated)
        if num_rows not in self._no_masks:
            all_tokens = np.full((num_rows, num_words(self.vocab_size)), 2**32 - 1, np.uint32)
            self._no_masks[num_rows] = jax.device_put(all_tokens, self._replicated)
        inputs = *inputs, self._adjustments, seats, self._no_masks[num_rows]
        return jax.jit(program, donate_argnums=(2, 3), out_shardings=at).lower(*inputs)

    def _make_adjustments(self, logits: Any) -> None:
        """Makes the adjustments of all seats; counts of tokens are split over the devices as logits are."""
        self._no_masks: dict[int, jax.Array] = {}  # by numbers of rows
        rows = Adjustments.zeros(self.config.max_num_seqs if self.config.adjustments else 0, self.vocab_size)
        places = jax.tree.map(lambda _: self._replicated, rows)
        places = dataclasses.replace(places, counts=logits_at(self._caches[0], logits.shape[1]))
        self._adjustments = jax.tree.map(jax.device_put, rows, places)

    def _lower_adjust(self) -> Any:
        at = jax.tree.map(lambda array: array.sharding, self._adjustments)
        row = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), np.dtype(x.dtype), sharding=self._replicated),
            Adjustments.of(None, self.vocab_size),
        )
        seat = jax.ShapeDtypeStruct((), np.dtype(np.int32), sharding=self._replicated)
        set_row = jax.jit(Adjustments.set_row, donate_argnums=0, out_shardings=at)
        return set_row.lower(self._adjustments, seat, row)

    def _set_adjustments(self, seat: int, sequence: Sequence | None) -> None:
        """Sets the adjustments of a seat, from all tokens that its sequence has."""
        row = Adjustments.of(sequence, self.vocab_size)
        self._adjustments = self._start("adjust", self._adjustments, np.int32(seat), row)

    def _warm_up(self) -> None:
        """Runs every program once on nothing but padding, because the first run of a program loads its code."""
        for name in ("swap_out", "swap_in", "copy"):
            if name in self._programs:
                self._move(name, [[(-1, -1)] for _ in self.groups])
        self._change_tables([Entry(0, self.config.max_num_seqs, 0, [0])])
        if self.config.adjustments:
            self._set_adjustments(self.config.max_num_seqs, None)
        for shape in self._shapes():
            for kind in Kind:
                if (shape.num_logits, kind) in self._programs:
                    self._run(shape, kind, pack(Plan.empty(len(self.groups)), shape, self.config.max_num_seqs, kind))
        jax.block_until_ready(self._last_tokens)

    def _change_tables(self, entries: list[Entry]) -> None:
        """Changes entries of the tables on the device, in calls of `_ENTRIES` entries of each group's."""
        changes: list[list[tuple[int, ...]]] = [[] for _ in self.groups]
        for group, seat, column, blocks in entries:
            changes[group] += [(seat, column + i, block) for i, block in enumerate(blocks)]
        # No table has an entry of padding.
        for some in in_calls(changes, (_ENTRIES, 3), self.config.max_num_seqs):
            self._tables = self._start("tables", self._tables, some)

    def _move(self, name: str, pairs: list[Pairs]) -> None:
        """Copies blocks by each group's (source, destination) pairs, in calls of `_PAIRS` pairs of each group.

        The pairs must not name a destination that is the source of a later pair of their group: if the two were in
        different calls, the later call would copy what the earlier one wrote.
        """
        for some in in_calls(pairs, (_PAIRS, 2), -1):
            if name == "copy":
                self._caches = self._start(name, self._caches, some)
            elif name == "swap_out":
                self._host_caches = self._start(name, self._caches, self._host_caches, some)
            else:
                self._caches = self._start(name, self._host_caches, self._caches, some)
