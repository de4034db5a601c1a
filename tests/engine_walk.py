"""Random histories of an engine over a simulated pool: `python -m tests.engine_walk --histories 10000`.

In each history an engine of random sizes, whose pool holds few requests at once, gets requests that begin alike, runs
steps, cancels some requests, refuses others, and fails now and then. After every call its blocks and seats must add
up, every cached block must be written, and each request must get the tokens that it gets alone. A history depends on
its seed only, which a failure names.
"""

import argparse
import collections
import dataclasses
import random
import sys
from typing import Any

import numpy as np

from paged_jax.engine import EngineConfig, SamplingParams
from paged_jax.engine.prefix import extend_hashes
from tests.engine_checks import check_blocks, tokens_of, without_void
from tests.engine_ledger import Ledger
from tests.engine_simulation import Clairvoyant, make_engine
from tests.simulated_tokens import VOCAB, Rules, expected_scores, expected_tokens


class _Broken(Exception):
    """The error of the simulated device."""


def check_cached(engine: Any) -> None:
    """Checks an engine's blocks, that those in the prefix cache are written, and the names of the sequences' blocks."""
    check_blocks(engine)
    runner = engine._runner
    for sequence in [*engine._scheduler.running, *engine._scheduler.waiting]:
        names: list[bytes] = []
        extend_hashes(names, sequence.tokens, runner.block_size)
        assert sequence.hashes == names[: len(sequence.hashes)], "a block has another text's name"
    for manager, base in zip(engine._blocks.managers, runner.bases, strict=False):
        if manager.prefix is not None:
            blocks = base + np.array(list(manager.prefix.block_of.values()), np.int64)
            runner.pool.check_blocks(blocks, runner._weights["salt"])


@dataclasses.dataclass
class Story:
    """One history.

    Attributes:
      engine: the engine.
      draw: the source of all choices.
      requests: prompt and parameters of each request since the last reset that was not cancelled.
      deltas: what the engine gave since the last reset.
      salts: which weights draw the tokens of each sample, as `expected_tokens` takes them.
      salt: the salt of the present weights.
      continuing, restarting: samples that get other weights in the next step, unless the last one's tokens end them.
      seen: counts of what happened.
      ledger: follows the engine's statistics.
      share_adjusted: the share of requests whose logits are changed. Steps with such requests have no drafts.
    """

    engine: Any
    draw: random.Random
    requests: dict[int, tuple[list[int], SamplingParams]]
    deltas: list
    seen: dict[str, int]
    ledger: Ledger
    share_adjusted: float = 0.0
    salts: dict[tuple[int, int], dict[int, int]] = dataclasses.field(default_factory=dict)
    salt: int = 0
    continuing: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    restarting: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    void: set[tuple[int, int]] = dataclasses.field(default_factory=set)  # restarted, without a new token yet

    def add(self):
        """Adds a request, whose prompt may begin like others."""
        draw, config = self.draw, self.engine.config
        room = self.engine.check([0], SamplingParams())
        length = min(draw.choice([*range(1, 9), draw.randint(1, room)]), room - 1)
        stem = draw.choice([0, 1, 3])
        prompt = [(stem * i) % VOCAB for i in range(length)]
        if draw.random() < 0.3:
            prompt[-1] = draw.randrange(VOCAB)
        is_random = draw.random() < 0.5
        params = SamplingParams(
            max_tokens=draw.choice([None, *range(1, 13)]),
            priority=draw.choice([0, 0, 0, -1, 3]),
            n=draw.choice([1, 1, 1, 2, 3]),
            temperature=draw.choice([0.5, 1.0]) if is_random else 0.0,
            top_k=draw.choice([0, 3]),
            top_p=draw.choice([1.0, 0.5]),
            seed=draw.choice([0, 7, 2**63 + 1, None]),
            stop_token_ids=draw.choice([(), (), (2,)]),
            logprobs=draw.choice([None, None, 2]),
            prompt_logprobs=draw.choice([None, None, None, 0, 1]),
        )
        if draw.random() < self.share_adjusted:
            params = self.adjusted(params)
        if params.max_tokens is not None and length + params.max_tokens > room:
            params = dataclasses.replace(params, max_tokens=None)
        try:
            request_id = self.engine.add_request(prompt, params)
        except ValueError:
            assert params.n > config.max_num_seqs
            self.seen["refused"] += 1
        else:
            self.requests[request_id] = prompt, params
            self.salts |= {(request_id, index): {0: self.salt} for index in range(params.n)}

    def adjusted(self, params):
        """Parameters that also change the logits in some ways."""
        draw = self.draw
        return dataclasses.replace(
            params,
            min_p=draw.choice([0.0, 0.25]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.5]),
            presence_penalty=draw.choice([0.0, -1.0]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
            logit_bias=draw.choice([(), {1: 2.0}, {4: -100.0, 2: 1.0}]),
            min_tokens=draw.choice([0, 0, min(4, params.max_tokens or 4)]),
            mask=draw.choice([None, None, Rules(), Rules(end=4), Rules(end=0), Rules(fails_at=2)]),
        )

    def step(self):
        """Runs a step, which may fail; then the engine is reset."""
        if self.draw.random() < 0.02:
            what, how = self.draw.choice(["model", "draw", "read", "copy", "swap_out", "swap_in", "adjust"]), None
            how = self.draw.choice([_Broken("broken"), KeyboardInterrupt()])

            def interrupt(name):
                if name == what:
                    raise how

            self.engine._runner.interrupt = interrupt
        self.ledger.before_step()
        try:
            deltas = self.engine.step()
            self.ledger.take(deltas)
            self.deltas += deltas
            ended = {(delta.request_id, delta.index) for delta in deltas if delta.finish_reason is not None}
            self.seen["restarted"] += sum(delta.is_restarted for delta in deltas)
            self.salts |= {key: {0: self.salt} for key in self.restarting - ended}
            given = {(delta.request_id, delta.index) for delta in deltas}
            self.void = (self.void | (self.restarting - ended)) - given
            if self.continuing:  # what the last step drew is given out now
                found = tokens_of(without_void(self.deltas))
                for key in self.continuing - self.restarting - ended:
                    self.salts[key][0 if key in self.void else len(found.get(key, ()))] = self.salt
            self.restarting.clear(), self.continuing.clear()
        except (_Broken, KeyboardInterrupt):
            assert self.engine.has_failed
            self.reset()
            self.seen["failed"] += 1
        finally:
            self.engine._runner.interrupt = lambda name: None
        self.check()

    def update(self):
        """Gives the engine other weights."""
        self.salt, running = self.salt + 1, self.draw.choice(["continue", "restart"])
        for request_id, samples in self.engine._requests.items():
            for sequence in samples:
                if sequence.finish_reason is None:
                    updated = self.continuing if running == "continue" else self.restarting
                    updated.add((request_id, sequence.index))
        self.engine.update_weights({"salt": self.salt}, running=running)
        self.ledger.note_update(running == "restart")
        assert self.engine._blocks.counts() == (self.engine._blocks.num_blocks, 0, 0)
        self.seen["updated"] += 1
        self.check()

    def cancel(self):
        """Cancels a request, finished or not."""
        if self.requests:
            request_id = self.draw.choice(list(self.requests))
            is_unfinished = self.engine.is_unfinished(request_id)
            assert self.engine.cancel(request_id) == is_unfinished
            if is_unfinished:
                del self.requests[request_id]
                self.deltas = [delta for delta in self.deltas if delta.request_id != request_id]
                self.seen["cancelled"] += 1
            self.check()

    def reset(self):
        """Resets the engine, whose requests are lost."""
        self.count()
        self.engine.reset()
        self.ledger.restart()
        self.ledger.check()
        self.requests, self.deltas, self.void = {}, [], set()
        self.restarting.clear(), self.continuing.clear()

    def count(self):
        """Counts what the scheduler did since the last reset."""
        counters, stats = self.engine._scheduler.counters, self.engine
        self.seen["drafted"] += stats._num_draft_tokens
        self.seen["accepted"] += stats._num_accepted_tokens
        self.seen["shared"] += counters.shared_tokens
        self.seen["recomputed"] += counters.recomputed
        self.seen["swapped"] += counters.swapped
        self.seen["found"] += counters.hit_tokens
        self.seen["requests"] += len(self.requests)

    def check(self):
        """Checks what must hold after every call."""
        check_cached(self.engine)
        if self.ledger.num_steps % 4 == 0:
            self.ledger.check()
        states = [manager.state for manager in self.engine._blocks.managers]
        self.seen["behind"] += sum(int(((s.seq_lens > 0) & (s.block_tables[:, 0] < 0)).sum()) for s in states)

    def end(self):
        """Runs until all requests are finished; each must get the tokens that it gets alone."""
        while self.engine.has_work or self.engine._launched is not None:
            self.step()
        self.ledger.check()
        counts = self.engine._blocks.counts()
        assert counts.held == 0
        assert sorted(self.engine._scheduler.seats.free) == list(range(self.engine.config.max_num_seqs))
        deltas = without_void(self.deltas)
        found = tokens_of(deltas)
        ends = {(delta.request_id, delta.index): delta for delta in deltas}
        scored, cached = collections.defaultdict(list), collections.defaultdict(set)
        for delta in deltas:
            scored[delta.request_id, delta.index] += delta.prompt_logprobs
            cached[delta.request_id, delta.index].add(delta.num_cached_tokens)
        room = self.engine.check([0], SamplingParams())
        for request_id, (prompt, params) in self.requests.items():
            for index in range(params.n):
                seed = self.engine._seeds.give(params, request_id).seed
                salts = self.salts[request_id, index]
                wanted = expected_tokens(prompt, params, index, room, seed, salts.items())
                assert found.pop((request_id, index)) == wanted, f"sample {index} of request {request_id}"
                self.check_end(ends[request_id, index], params, len(wanted))
                # Preemption changes nothing about what was found at first.
                (num_cached,) = cached[request_id, index]
                assert num_cached < (1 if index else len(prompt))
                is_scored = params.prompt_logprobs is not None and not index
                scores = expected_scores(prompt, salts[0]) if is_scored else []
                assert [item.logprob for item in scored[request_id, index]] == scores
                assert [item.token_id for item in scored[request_id, index]] == (list(prompt)[1:] if is_scored else [])
        assert not found, f"tokens of unknown requests: {found}"
        self.count()

    def check_end(self, last, params, num_tokens):
        """Checks why a sample has ended."""
        assert last.finish_reason in ("stop", "length", "error")
        has_failed = params.mask is not None and num_tokens == params.mask.fails_at
        is_last = last.token_ids[-1:] and last.token_ids[-1] in params.stop_token_ids
        if has_failed and not is_last and last.finish_reason != "length":
            assert (last.finish_reason, last.stop_reason) == ("error", "RuntimeError: the mask fails")
            self.seen["masks failed"] += 1
        elif params.mask is not None and last.finish_reason == "stop" and not is_last:
            assert last.stop_reason is None
            self.seen["masks ended"] += 1
        if is_last:
            assert last.finish_reason == "stop"
            assert params.mask is not None or num_tokens > params.min_tokens


def walk(seed: int, seen: dict[str, int]) -> None:
    """Runs one history.

    Args:
      seed: chooses the history.
      seen: counts what happened in all histories.
    """
    draw = random.Random(seed)
    block_size = draw.choice([1, 2, 4, 8])
    num_seqs, longest = draw.randint(2, 6), draw.choice([16, 23, 41])
    budget = draw.choice([num_seqs, num_seqs + 3, 16])
    config = EngineConfig(
        max_model_len=longest,
        max_num_seqs=num_seqs,
        max_tokens_per_step=budget,
        max_prompts_per_step=draw.randint(1, num_seqs),
        decode_rows=tuple(sorted({1, draw.randint(1, num_seqs), num_seqs})),
        mixed_tokens=tuple(sorted({2, draw.randint(1, budget), budget})),
        max_logprobs=2,
        num_host_blocks=draw.choice([0, 3, 100, 100]),
        max_tokens_beside_decodes=draw.choice([None, None, 1, 3, num_seqs + 1]),
        prefix_caching=draw.random() < 0.8,
        max_draft_tokens=(most := draw.choice([0, 1, 3, 6])),
        verify_tokens=tuple(sorted({min(2, budget), budget})) if most and draw.random() < 0.5 else (),
        free_tokens_per_step=draw.choice([1, 4, 128]),
        max_shared_prefixes=draw.choice([0, 1, 3]),
        least_shared_tokens=draw.choice([1, 8]),
        preemption=draw.choice(["cheaper", "recompute", "swap"]),
        swap_bytes_per_second=draw.choice([1.0, 1e6, 1e12]),
    )
    # If no layer sees everything, the simulation needs a window that contains the token before a row's first one.
    few, more = draw.randint(1, 12), draw.randint(2, 24)
    windows = draw.choice(
        [None, None, [None, few], [few, few, None], [more], [more, min(few, more)], [more, few, None]]
    )
    proposer = Clairvoyant(draw, draw.choice([0.3, 0.9, 1.0])) if config.max_draft_tokens else None
    engine = make_engine(200, block_size, config, sliding_windows=windows, proposer=proposer)
    if proposer is not None:
        proposer.engine = engine
    engine._runner.num_shards = draw.choice([1, 1, 2])  # devices that the pool's blocks are split over
    sizes = [draw.randint(3, max(4, 2 * longest // block_size)) for _ in engine._groups]
    engine.reset(dataclasses.replace(config, num_blocks=draw.choice([tuple(sizes), sizes[0]])))
    story = Story(engine, draw, {}, [], seen, Ledger(engine), draw.choice([0.0, 0.8]))
    for _ in range(draw.randint(5, 40)):
        draw.choices([story.add, story.step, story.cancel, story.update, story.reset], [5, 10, 1, 0.8, 0.1])[0]()
    story.end()


def run(seeds: range) -> dict[str, int]:
    """Runs histories and returns the counts of what happened in them."""
    names = "requests", "refused", "cancelled", "failed", "recomputed", "swapped", "found", "updated", "restarted"
    names += "shared", "drafted", "accepted", "behind", "masks failed", "masks ended"
    seen = dict.fromkeys(names, 0)
    for seed in seeds:
        try:
            walk(seed, seen)
        except Exception as error:
            raise AssertionError(
                f"history {seed} went wrong: `tests.engine_walk.run(range({seed}, {seed + 1}))`"
            ) from error
    return seen


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine_walk")
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first history")
    args = parser.parse_args(argv)
    total: collections.Counter[str] = collections.Counter()
    last = args.first + args.histories
    for first in range(args.first, last, 500):
        total.update(run(range(first, min(first + 500, last))))
        print(f"histories {args.first} to {min(first + 500, last) - 1}, none went wrong: {dict(total)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
