"""Continuous batching: requests join and leave a running batch step by step.

    add_request ──► Scheduler ──► Plan ──► Runner ──► device
                        ▲                     │
                        └──── tokens ◄────────┘ read one step late

`Engine.step` plans and launches a step, and only then reads the tokens that the step before it drew, so that the device
never waits for the host. The price is that a sequence is computed for one step more after its last token, since the
host learns of the end too late to leave it out. Where a sequence has a mask, the step's model is launched first, then
the tokens are read, and then the program that draws is launched with the masks (mask.py). Where a step verifies guesses
of what comes after those tokens, they are read before it is planned (speculation.py).
"""

import collections
import collections.abc
import time
from typing import Any, override

from paged_jax.engine.base import BaseEngine, RunningRequests
from paged_jax.engine.batch import Caches, Step, StepShape
from paged_jax.engine.compiling import CompilerOptions
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.groups import blocks_used, make_groups
from paged_jax.engine.mask import gather_masks
from paged_jax.engine.plan import Plan
from paged_jax.engine.pools import make_pools
from paged_jax.engine.request import Delta, SamplingParams, Seeds, Tokenizer, read_token_ids
from paged_jax.engine.results import equip, logprob_of, take_all
from paged_jax.engine.runner import Launched, Runner
from paged_jax.engine.scheduler import Scheduler
from paged_jax.engine.sequence import Sequence
from paged_jax.engine.speculation import PromptLookup, Proposer, Speculator
from paged_jax.engine.stats import PoolStats, Stats


class Engine(BaseEngine):
    """Runs many requests at once over any model that offers a `Step`.

    One thread at a time may call an engine. The same requests in the same order lead to the same steps in every
    process; where requests have no seed, the engines' own seeds must be the same.

    Args:
      step: the model's function, see `Step`.
      weights: the model's arrays.
      caches: a `PagedKVCache` or a `PagedLatentCache` for each layer. The engine donates them to its programs: the
        caller must not use them any more. All have blocks of one size. The caches of layers with the same sliding
        window have the same number of blocks; `pool_sizes` says how many they need.
      config: sizes and policies.
      sliding_windows: each layer's window, in tokens, None for a layer that sees everything. Layers with a window hold
        blocks for their window only, and have block tables of their own (`Batch.for_window`). Without `sliding_windows`
        all layers hold all tokens, whatever their windows.
      tokenizer: turns tokens into text; without one there are token ids only, and no stop texts.
      seed: the number from which requests without a seed get theirs; None for fresh random numbers in every process and
        after every `reset`.
      proposer: guesses tokens while `config.max_draft_tokens` is not 0; None for `PromptLookup()`.
      show_progress: whether a bar on stderr shows the progress of compiling; it needs the package rich.
      compiler_options: XLA's options for all programs; or a function from a step's number of tokens to the options of
        the program that runs the model; all other programs then have no options.

    Example:
      The model here continues a token by the next number. It needs no cache.

      >>> import jax
      >>> from paged_jax import PagedKVCache
      >>> from paged_jax.engine import Engine, EngineConfig, SamplingParams
      >>> def step(weights, caches, batch):
      ...     return jax.nn.one_hot(batch.token_ids[batch.logit_rows] + 1, 16), caches
      >>> caches = (PagedKVCache.create(num_blocks=8, block_size=4, num_kv_heads=1, head_size=8),)
      >>> engine = Engine(step, {}, caches, EngineConfig(max_model_len=16, max_num_seqs=2, max_tokens_per_step=8))
      >>> ((completion,),) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
      >>> completion.token_ids, completion.finish_reason
      ((4, 5, 6, 7), 'length')
    """

    def __init__(
        self,
        step: Step,
        weights: Any,
        caches: Caches,
        config: EngineConfig,
        *,
        sliding_windows: collections.abc.Iterable[int | None] | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        proposer: Proposer | None = None,
        show_progress: bool = False,
        compiler_options: CompilerOptions | None = None,
    ):
        if proposer is not None and not config.verify_tokens:
            raise ValueError("a proposer needs max_draft_tokens, got 0")
        self._groups = make_groups(caches, sliding_windows, config.max_model_len)
        blocks_used(config, self._groups)
        self.config, self.tokenizer, self._seeds = config, tokenizer, Seeds(seed)
        self._runner = Runner(
            step, weights, caches, config, self._groups, show_progress=show_progress, compiler_options=compiler_options
        )
        self._proposer, self._speculator = proposer or PromptLookup(), None
        self.reset()

    @override
    def reset(self, config: EngineConfig | None = None) -> None:
        config = self.check_config(config)
        with self._changing("reset"):
            self._reset(config)

    def _reset(self, config: EngineConfig) -> None:
        self._runner.reset()
        self.config = config
        runner = self._runner
        sizes = runner.block_size, runner.max_blocks_per_seq, runner.num_shards
        self._blocks = make_pools(self._groups, config, *sizes)
        if self._speculator is not None:
            self._speculator.forget_all()
        self._speculator = Speculator(config, self._proposer) if config.max_draft_tokens else None
        self._scheduler = Scheduler(config, self._blocks, self._speculator)
        self._requests: dict[int, list[Sequence]] = {}
        self._launched: Launched | None = None
        self._restarted: list[Sequence] | None = None  # after an update of the weights, until the next step
        self._next_id = self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0
        self._num_draft_tokens = self._num_accepted_tokens = 0
        self._seconds = 0.0
        self._seeds.restart()

    def check_config(self, config: EngineConfig | None) -> EngineConfig:
        """Gives the config that `reset` would lead to.

        Args:
          config: new policies, or None for the present ones.

        Returns:
          The config.

        Raises:
          ValueError: the config differs in a field that decides what is compiled.
        """
        config = config or self.config
        if config.compiled != self.config.compiled:
            raise ValueError("reset cannot change what is compiled: make a new Engine")
        blocks_used(config, self._groups)
        return config

    @override
    def add_request(
        self,
        prompt: collections.abc.Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 (immutable)
    ) -> int:
        max_total = self.check(prompt, params)
        with self._changing("add_request"):
            return self._add(read_token_ids(prompt), self._seeds.give(params, self._next_id), max_total)

    def _add(self, tokens: list[int], params: SamplingParams, max_total: int) -> int:
        request_id, self._next_id = self._next_id, self._next_id + 1
        assert params.seed is not None
        samples = [
            Sequence(request_id, index, params, list(tokens), len(tokens), max_total, params.seed)
            for index in range(params.n)
        ]
        for sequence in samples:
            equip(sequence, self.tokenizer, self._runner.vocab_size)
        samples[0].children = samples[1:]
        self._requests[request_id] = samples
        self._scheduler.add(samples[0])
        return request_id

    @override
    def update_weights(self, weights: Any, *, running: RunningRequests = "continue") -> None:
        self.check_update(weights, running)
        with self._changing("update_weights"):
            self._update_weights(weights, running)

    def replace_weights(self, weights: Any, running: RunningRequests) -> None:
        """Does what `update_weights` does, without its checks; an engine that has failed uses them after its reset."""
        if self.has_failed:
            self._runner.update_weights(weights)
        else:
            self.update_weights(weights, running=running)

    def check_update(self, weights: Any, running: RunningRequests) -> None:
        """Raises the ValueError of `update_weights`, if there is one."""
        if running not in ("continue", "restart"):
            raise ValueError(f'running must be "continue" or "restart", got {running!r}')
        self._runner.check_weights(weights)

    def _update_weights(self, weights: Any, running: RunningRequests) -> None:
        self._runner.update_weights(weights)
        self._scheduler.forget_computed()
        self._restarted = self._restarted or []
        if running == "restart":
            sequences = [sequence for samples in self._requests.values() for sequence in samples]
            self._restarted += [s for s in sequences if s.has_drawn and s.finish_reason is None]

    @override
    def step(self) -> list[Delta]:
        """Launches a step, then waits for the tokens that the step before it drew.

        Returns:
          A `Delta` for each new token; a sample has several of them where a draft was right.
        """
        with self._changing("step"):
            return self._step()

    def _step(self) -> list[Delta]:
        began = time.perf_counter()
        before, self._launched = self._launched, None
        deltas = []
        if self._restarted is not None:
            deltas, before = self._begin_again(before), None
        elif before is not None and self._must_read(before.plan):
            deltas, before = self._read(before), None
        plan = self._scheduler.schedule()
        if plan is not None:
            self._launched = self._runner.launch(plan)
            self._num_steps += 1
            self._num_prompt_tokens += plan.num_prompt_tokens
        launched = self._launched
        if launched is not None and not launched.plan.is_masked:
            self._runner.draw(launched)
        deltas += self._read(before) if before is not None else []
        if launched is not None and launched.plan.is_masked:
            masks = gather_masks(launched.plan.samples.sequences, launched.num_logits, self._runner.vocab_size)
            self._runner.draw(launched, masks)
        if self._speculator is not None:
            self._speculator.forget_finished()
            self._speculator.guess(self._scheduler.running)
        self._seconds += time.perf_counter() - began
        return deltas

    @property
    @override
    def max_num_seqs(self) -> int:
        return self.config.max_num_seqs

    @property
    @override
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Unfinished sequences that hold blocks."""
        return len(self._scheduler.running)

    @property
    def num_started(self) -> int:
        """How many runs of programs the engine has started."""
        return self._runner.num_started

    @override
    def is_unfinished(self, request_id: int) -> bool:
        return request_id in self._requests

    @override
    def cancel(self, request_id: int) -> bool:
        with self._changing("cancel"):
            return self._cancel(request_id)

    def _cancel(self, request_id: int) -> bool:
        samples = self._requests.pop(request_id, [])
        for sequence in samples:
            if sequence.finish_reason is None:
                sequence.finish_reason = "cancelled"
                self._scheduler.finish(sequence)
        return bool(samples)

    @override
    def stats(self) -> Stats:
        self._check_alive()
        counters, counts = self._scheduler.counters, self._blocks.counts()
        return Stats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self.num_running,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            held_blocks=counts.held,
            waste=self._blocks.waste(),
            num_looked_up_tokens=counters.looked_up_tokens,
            hit_rate=counters.hit_tokens / max(counters.looked_up_tokens, 1),
            num_shared_tokens=counters.shared_tokens,
            num_recomputed=counters.recomputed,
            num_swapped=counters.swapped,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            tokens_per_second=self._num_output_tokens / self._seconds if self._seconds else 0.0,
            num_compiled=self._runner.num_compiled,
            pools=tuple(
                PoolStats(group.sliding_window, len(group.layers), group.block_bytes, *manager.counts())
                for group, manager in zip(self._groups, self._blocks.managers, strict=True)
            ),
        )

    def measure_steps(self, context_len: int, repeats: int = 8) -> dict[StepShape, float]:
        """Times full steps without scheduling, which bounds the engine's throughput from above, and resets the engine.

        Args:
          context_len: tokens of each sequence, from 1 to `max_model_len`, the new ones included. In a decode step every
            row has one new token. In a mixed step the rows are prompts of this length, at most `max_prompts_per_step`;
            the last one ends where the step is full.
          repeats: how many steps of each shape to average over.

        Returns:
          The seconds of a full step, for each compiled shape.

        Raises:
          ValueError: the context is too long, or requests are unfinished.
        """
        if not 1 <= context_len <= self.config.max_model_len:
            raise ValueError(f"context_len must be in [1, {self.config.max_model_len}], got {context_len}")
        if self.has_work:
            raise ValueError(
                f"steps can be measured on an idle engine only; {len(self._requests)} requests are unfinished"
            )
        self.reset()
        with self._changing("measure_steps"):
            return self._runner.measure(context_len, repeats)

    @override
    def check(self, prompt: collections.abc.Sequence[int], params: SamplingParams) -> int:
        if not len(prompt):
            raise ValueError("the prompt must have at least one token")
        # A sequence's last token is never fed back to the model, so that it needs no place in the cache.
        longest, room = self.config.max_model_len, self._blocks.room
        room = (longest if room is None else min(longest, room)) + 1
        if len(prompt) >= room:
            raise ValueError(f"the prompt has {len(prompt)} tokens; at most {room - 1} fit")
        read_token_ids(prompt)
        if params.max_tokens is not None and len(prompt) + params.max_tokens > room:
            raise ValueError(
                f"the prompt's {len(prompt)} tokens and max_tokens = {params.max_tokens} more do not fit; at most "
                f"{room - len(prompt)} new tokens do"
            )
        if params.n > self.config.max_num_seqs:
            raise ValueError(f"n must be at most max_num_seqs = {self.config.max_num_seqs}, got {params.n}")
        for name in ("logprobs", "prompt_logprobs"):
            wanted, limit = getattr(params, name), self.config.max_logprobs
            if wanted is not None and wanted > (limit or 0):
                raise ValueError(f"{name} must be at most max_logprobs = {limit or 0}, got {wanted}")
            if wanted is not None and limit is None:
                raise ValueError(f"{name} need an engine whose max_logprobs is not None")
        if params.is_adjusted and not self.config.adjustments:
            raise ValueError("penalties, logit_bias, min_tokens, min_p and masks need an engine with adjustments=True")
        for token_id in dict(params.logit_bias):
            if token_id >= self._runner.vocab_size:
                raise ValueError(f"logit_bias names token {token_id}; the model has {self._runner.vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop texts need an engine with a tokenizer")
        return room if params.max_tokens is None else len(prompt) + params.max_tokens

    def _must_read(self, plan: Plan) -> bool:
        """Whether the next plan needs the tokens of this one: after drafts, or if drafts promise to be right."""
        if self._speculator is None or plan.has_drafts:
            return plan.has_drafts
        return self._scheduler.may_draft and self._speculator.is_promising(self._scheduler.running)

    def _begin_again(self, launched: Launched | None) -> list[Delta]:
        """Reads the step before an update of the weights, since its seats are others' now; then restarts sequences."""
        deltas = self._read(launched) if launched is not None else []
        restarted = {(s.request_id, s.index): s for s in self._restarted or [] if s.finish_reason is None}
        self._restarted = None
        for sequence in restarted.values():
            sequence.restart()
            equip(sequence, self.tokenizer, self._runner.vocab_size)
            if self._speculator is not None:
                self._speculator.forget([sequence])
        given = [delta for delta in deltas if (delta.request_id, delta.index) not in restarted]
        self._num_output_tokens -= len(deltas) - len(given)
        return given

    def _read(self, launched: Launched) -> list[Delta]:
        """Waits for the tokens that a step draws; tokens of sequences that are finished or cancelled are dropped."""
        drawn, plan = self._runner.read(launched), launched.plan
        self._scheduler.pace.read(plan)
        token_ids, sequences = drawn.token_ids.tolist(), plan.samples.sequences
        accepted = plan.accepted(token_ids)
        if plan.has_drafts:
            self._scheduler.correct(plan, collections.Counter(sequences[i] for i in accepted))
            self._num_draft_tokens += sum(map(len, plan.rows.drafts.values()))
        for i, score in enumerate(plan.scores, len(sequences)):
            token_id, num_top = score.sequence.tokens[score.position], score.sequence.params.prompt_logprobs
            score.sequence.scored[score.position] = logprob_of(token_id, drawn, i, num_top or 0)
        if self._speculator is not None:
            for i in accepted:
                self._speculator.see(sequences[i], token_ids[i])
        deltas, ended = take_all(plan.samples, accepted, token_ids, drawn)
        for sequence in ended:
            self._end(sequence)
        self._num_output_tokens += sum([len(delta.token_ids) for delta in deltas])
        if plan.has_drafts:
            self._num_accepted_tokens += len(deltas) - len({(delta.request_id, delta.index) for delta in deltas})
        return deltas

    def _end(self, sequence: Sequence) -> None:
        """Takes a finished sequence out of the scheduler, and its request away once all of its samples are finished."""
        self._scheduler.finish(sequence)
        if all(other.finish_reason for other in self._requests.get(sequence.request_id, ())):
            self._requests.pop(sequence.request_id, None)  # another of its samples may have ended in the same step
