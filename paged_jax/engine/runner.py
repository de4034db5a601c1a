"""The compiled programs of an engine and the arrays they work on: weights, caches, each seat's last token and table.

The runner compiles all programs when it is made, before the first request, and nothing is compiled later. A step runs
two programs. The first runs the model. The second draws the tokens and keeps them on the device, where the next step
finds them. As they are separate, the model is compiled once for each shape, and not again for each way to draw. Four
small programs copy blocks, swap them out and in, and change block tables.

    host     plan i+1 ──► packed ──┐          plan i+2 ──► packed ──┐        reads what step i drew
    device   step i ──► last tokens ──► step i+1 ──► last tokens ──► step i+2
"""

import collections.abc
import concurrent.futures
import contextlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from paged_jax.engine.arrays import (
    SCALES,
    change_tables,
    check_caches,
    copy_all,
    members,
    num_parts,
    on_host,
    pool,
    replicated,
    swap_all,
    usable,
    with_own_scales,
)
from paged_jax.engine.batch import Caches, Draws, Step, StepShape
from paged_jax.engine.blocks import Pairs
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.pack import pack, pack_made_up
from paged_jax.engine.sampling import Drawn, Kind, draw
from paged_jax.engine.scheduler import Entries, Plan
from paged_jax.engine.weights import check_weights

_ENTRIES = 512  # how many entries of block tables one call of the program that changes them takes
_PAIRS = 32  # how many pairs of blocks one call of a copy or a swap moves
_COMPILERS = 8  # how many threads compile at the same time

type Programs = dict[Any, Any]
type CompilerOptions = dict[str, Any] | collections.abc.Callable[[int], dict[str, Any]]


class Launched(NamedTuple):
    """A launched step: its plan, and the tokens that it draws, which are still on the device."""

    plan: Plan
    drawn: Drawn


class Runner:
    """Compiles a model's programs and launches planned steps.

    Args:
      step: the model's function.
      weights: the model's arrays.
      caches: one for each layer. The runner donates them to its programs: the caller must not use them any more.
      config: the engine's config.
      show_progress: whether a bar on stderr shows how many programs are compiled; it needs the package rich.
      compiler_options: XLA's options for the programs, or a function as `Engine` takes it.

    Attributes:
      block_size: tokens in a block.
      num_blocks: blocks of the caches.
      block_bytes: bytes of one block in all layers together.
      max_blocks_per_seq: blocks of the longest sequence.
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
        *,
        show_progress: bool = False,
        compiler_options: CompilerOptions | None = None,
    ):
        check_caches(caches)
        self.config = config
        self.block_size, self.num_blocks = caches[0].block_size, caches[0].num_blocks
        self.block_bytes = sum(cache.nbytes for cache in caches) // self.num_blocks
        self._step, self._weights = step, weights
        self._scales = [members(cache, SCALES) for cache in caches]
        self._caches = with_own_scales(caches, self._scales)
        self.max_blocks_per_seq = -(-config.max_model_len // self.block_size)
        self.num_shards = num_parts(pool(caches[0]).sharding, 0)
        if self.num_shards > 1 and config.num_host_blocks:
            raise ValueError("num_host_blocks needs pools whose blocks are not split over devices")
        self._replicated = replicated(pool(caches[0]).sharding)
        self._last_tokens = jax.device_put(np.zeros(config.max_num_seqs, np.int32), self._replicated)
        tables = np.zeros((config.max_num_seqs, self.max_blocks_per_seq), np.int32)
        self._tables = jax.device_put(tables, self._replicated)
        host_caches = tuple(on_host(cache, config.num_host_blocks or self.num_shards) for cache in caches)
        self._host_caches = with_own_scales(host_caches, self._scales)
        self._programs = self._compile(show_progress, compiler_options)
        self.num_compiled = len(self._programs)
        self._warm_up()

    def reset(self) -> None:
        """Replaces what a failed step has taken, or left unusable, by zeros: pools, last tokens and tables."""
        arrays = self._caches, self._host_caches, self._last_tokens, self._tables
        caches, host_caches, self._last_tokens, self._tables = jax.tree.map(usable, arrays)
        self._caches, self._host_caches = (with_own_scales(each, self._scales) for each in (caches, host_caches))

    def update_weights(self, weights: Any) -> None:
        """Makes all further steps use these weights, which the caller has checked."""
        self._weights = weights

    def check_weights(self, weights: Any) -> None:
        """Raises a ValueError if the compiled programs cannot take these weights."""
        check_weights(weights, self._weights)

    def launch(self, plan: Plan) -> Launched:
        """Starts a step and returns at once.

        Args:
          plan: the step's plan.

        Returns:
          The launched step, for `read`.
        """
        self._move("swap_out", plan.swap_out)
        self._move("swap_in", plan.swap_in)
        self._move("copy", plan.copies)
        self._change_tables(plan.entries)
        shape, kind = self._choose(plan)
        drawn = self._run(shape, kind, pack(plan, shape, self.config.max_num_seqs, kind))
        for array in jax.tree.leaves(drawn):
            array.copy_to_host_async()
        return Launched(plan, drawn)

    def measure(self, context_len: int, repeats: int) -> dict[StepShape, float]:
        """Times the steps of each shape on made-up sequences, whose new tokens overwrite blocks of the caches.

        Args:
          context_len: tokens of each sequence, the new ones included; see `Engine.measure_steps`.
          repeats: how many steps to average over.

        Returns:
          The seconds of a step of each shape; the time in which the host plans a step is not included.
        """
        times, made_up = {}, np.random.default_rng(0).integers(0, self.num_blocks, self._tables.shape, np.int32)
        self._tables = jax.device_put(made_up, self._replicated)
        for shape in self._shapes():
            packed = pack_made_up(shape, context_len, self.num_blocks, self.config.max_num_seqs)
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
        return jax.tree.map(np.asarray, launched.drawn)

    def _run(self, shape: StepShape, kind: Kind, packed: np.ndarray) -> Drawn:
        inputs = self._weights, self._caches, self._last_tokens, self._tables, packed
        self._caches, self._tables, logits, draws = self._start(shape, *inputs)
        self._last_tokens, drawn = self._start((shape.num_rows, kind), logits, draws, self._last_tokens)
        return drawn

    def _start(self, name: Any, *arguments: Any) -> Any:
        results = self._programs[name](*arguments)
        self.num_started += 1
        return results

    def _choose(self, plan: Plan) -> tuple[StepShape, Kind]:
        """The smallest compiled shape in which the plan fits, and the kind of draws that it needs."""
        params = [sample.sequence.params for sample in plan.samples]
        kind = Kind.RANDOM if any(p.temperature > 0 for p in params) else Kind.GREEDY
        kind = Kind.LOGPROBS if plan.scores or any(p.logprobs is not None for p in params) else kind
        if plan.is_decode:
            rows = max(len(plan.chunks), len(plan.samples) + len(plan.scores))
            rows = next(size for size in self.config.decode_rows if size >= rows)
            return self._shape(rows, rows, True), kind
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        num_tokens = next(size for size in self.config.mixed_tokens if size >= num_tokens)
        return self._shape(num_tokens, self.config.max_num_seqs, False), kind

    def _shape(self, num_tokens: int, num_rows: int, is_decode: bool) -> StepShape:
        num_prompts = 0 if is_decode else self.config.max_prompts_per_step
        return StepShape(num_tokens, num_rows, self.max_blocks_per_seq, is_decode, num_prompts)

    def _shapes(self) -> list[StepShape]:
        mixed = [self._shape(size, self.config.max_num_seqs, False) for size in self.config.mixed_tokens]
        return mixed + [self._shape(size, size, True) for size in self.config.decode_rows]

    def _compile(self, show_progress: bool, options: CompilerOptions | None) -> Programs:
        kinds = list(Kind) if self.config.max_logprobs is not None else [Kind.GREEDY, Kind.RANDOM]
        pairs = jax.ShapeDtypeStruct((_PAIRS, 2), np.dtype(np.int32))
        lowered: Programs = {"copy": jax.jit(copy_all, donate_argnums=0).lower(self._caches, pairs)}
        entries = jax.ShapeDtypeStruct((_ENTRIES, 3), np.dtype(np.int32), sharding=self._replicated)
        change = jax.jit(change_tables, donate_argnums=0, out_shardings=self._replicated)
        lowered["tables"] = change.lower(self._tables, entries)
        if self.config.num_host_blocks:
            lowered["swap_out"] = jax.jit(swap_all, donate_argnums=1).lower(self._caches, self._host_caches, pairs)
            lowered["swap_in"] = jax.jit(swap_all, donate_argnums=1).lower(self._host_caches, self._caches, pairs)
        for shape in self._shapes():
            lowered[shape] = self._lower_model(shape)
            *_, logits, draws = lowered[shape].out_info
            for kind in kinds:
                if (shape.num_rows, kind) not in lowered:
                    lowered[shape.num_rows, kind] = self._lower_draw(kind, logits, draws)
        with (
            concurrent.futures.ThreadPoolExecutor(_COMPILERS) as compilers,
            _progress(show_progress, len(lowered)) as advance,
        ):
            futures = {
                name: compilers.submit(program.compile, options_of(name, options)) for name, program in lowered.items()
            }
            for future in concurrent.futures.as_completed(futures.values()):
                future.result()
                advance()
        return {name: future.result() for name, future in futures.items()}

    def _lower_model(self, shape: StepShape) -> Any:
        def run_model(weights, caches, last_tokens, tables, packed):
            batch, draws, tables = shape.unpack(packed, last_tokens, tables, self.block_size)
            logits, caches = self._step(weights, caches, batch)
            return caches, tables, logits, draws

        caches_at = jax.tree.map(lambda array: array.sharding, self._caches)
        packed = jax.ShapeDtypeStruct((shape.size,), np.dtype(np.int32), sharding=self._replicated)
        inputs = self._weights, self._caches, self._last_tokens, self._tables, packed
        _, _, logits, _ = jax.eval_shape(run_model, *inputs)
        at = caches_at, self._replicated, self._logits_at(logits), self._replicated
        return jax.jit(run_model, donate_argnums=(1, 3), out_shardings=at).lower(*inputs)

    def _logits_at(self, logits: Any) -> Any:
        """The sharding of the logits: their vocabulary is split over the same mesh axis as the heads, if it can be."""
        at = pool(self._caches[0]).sharding
        if not isinstance(at, NamedSharding):
            return at
        axis = next((axis for axis in range(1, len(at.spec)) if at.spec[axis] is not None), None)
        if axis is None or logits.shape[1] % num_parts(at, axis):
            return self._replicated
        return NamedSharding(at.mesh, PartitionSpec(None, at.spec[axis]))

    def _lower_draw(self, kind: Kind, logits: Any, draws: Any) -> Any:
        def draw_tokens(logits, draws, last_tokens):
            unpacked = Draws.unpack(draws)
            drawn = draw(logits, unpacked, kind, self.config.max_logprobs or 0)
            return last_tokens.at[unpacked.seats].set(drawn.token_ids, mode="drop"), drawn

        logits = jax.ShapeDtypeStruct(logits.shape, logits.dtype, sharding=self._logits_at(logits))
        draws = jax.ShapeDtypeStruct(draws.shape, draws.dtype, sharding=self._replicated)
        return jax.jit(draw_tokens, donate_argnums=2, out_shardings=self._replicated).lower(
            logits, draws, self._last_tokens
        )

    def _warm_up(self) -> None:
        """Runs every program once on nothing but padding, because the first run of a program loads its code."""
        for name in ("swap_out", "swap_in", "copy"):
            if name in self._programs:
                self._move(name, [(-1, -1)])
        self._change_tables([(self.config.max_num_seqs, 0, [0])])
        for shape in self._shapes():
            for kind in Kind:
                if (shape.num_rows, kind) in self._programs:
                    self._run(shape, kind, pack(Plan(), shape, self.config.max_num_seqs, kind))
        jax.block_until_ready(self._last_tokens)

    def _change_tables(self, entries: Entries) -> None:
        """Changes entries of the tables on the device, in calls of `_ENTRIES` entries."""
        if not entries:
            return
        changes = np.array(
            [(seat, column + i, block) for seat, column, blocks in entries for i, block in enumerate(blocks)], np.int32
        )
        for start in range(0, len(changes), _ENTRIES):
            some = np.full((_ENTRIES, 3), self.config.max_num_seqs, np.int32)  # no table has an entry of padding
            some[: len(changes) - start] = changes[start : start + _ENTRIES]
            self._tables = self._start("tables", self._tables, some)

    def _move(self, name: str, pairs: Pairs) -> None:
        """Copies blocks by (source, destination) pairs, in calls of `_PAIRS` pairs.

        The pairs must not name a destination that is the source of a later pair: if the two were in different calls,
        the later call would copy what the earlier one wrote.
        """
        for start in range(0, len(pairs), _PAIRS):
            mapping = np.full((_PAIRS, 2), -1, np.int32)
            some = pairs[start : start + _PAIRS]
            mapping[: len(some)] = some
            if name == "copy":
                self._caches = self._start(name, self._caches, mapping)
            elif name == "swap_out":
                self._host_caches = self._start(name, self._caches, self._host_caches, mapping)
            else:
                self._caches = self._start(name, self._host_caches, self._caches, mapping)


def options_of(name: Any, options: CompilerOptions | None) -> dict[str, Any] | None:
    """XLA's options for the program of this name."""
    if callable(options):
        return options(name.num_tokens) if isinstance(name, StepShape) else None
    return options


@contextlib.contextmanager
def _progress(is_shown: bool, total: int) -> collections.abc.Iterator[collections.abc.Callable[[], None]]:
    """Shows a progress bar; the caller calls what this yields after each of the `total` programs."""
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Compiling", total=total)
        yield lambda: progress.advance(task)
