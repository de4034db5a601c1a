"""Counts what an engine does from its plans and its deltas, and compares its statistics with these counts."""

import numpy as np


class Ledger:
    """Follows one engine over a simulated pool (engine_simulation.py), whose caches have one byte in each block.

    Args:
      engine: the engine, which has done nothing yet.
    """

    def __init__(self, engine):
        self.engine, launch = engine, engine._runner.launch
        self.restart()

        def note_and_launch(plan):
            self.note(plan)
            return launch(plan)

        engine._runner.launch = note_and_launch

    def restart(self):
        """Begins anew, as the engine does in its reset."""
        self.num_steps = self.num_prompt_tokens = self.num_output_tokens = self.num_shared_tokens = 0
        self.num_drafted = self.num_accepted_tokens = self.num_looked_up_tokens = self.num_found_tokens = 0
        self.num_recomputed = self.num_swapped = 0
        self.running, self.on_host, self.has_dropped = [], set(), False

    def before_step(self):
        """Notes which sequences run, since a step may preempt some of them."""
        self.running = list(self.engine._scheduler.running)

    def note(self, plan):
        """Counts the work of a plan."""
        chunks = {chunk.sequence.arrival: chunk for chunk in plan.chunks}
        self.num_steps += 1
        for chunk in chunks.values():
            end = min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt)
            self.num_prompt_tokens += max(end - chunk.start, 0)
            self.num_drafted += len(chunk.draft)
        self.num_shared_tokens += sum((num_rows - 1) * num_tokens for num_rows, num_tokens in plan.prefixes)
        for sequence in self.running:
            if sequence in self.engine._scheduler.waiting:
                is_on_host = sequence.host_blocks is not None
                self.num_swapped += is_on_host
                self.num_recomputed += not is_on_host
                self.on_host |= {sequence.arrival} if is_on_host else set()
        for sequence in plan.seated:
            if sequence.arrival in self.on_host:
                self.on_host.remove(sequence.arrival)
            elif sequence.arrival in chunks:  # the samples that begin with their parent's blocks have none
                num_drawn = sum(other is sequence for other in plan.samples.sequences)
                self.num_looked_up_tokens += sequence.num_tokens - num_drawn
                self.num_found_tokens += chunks[sequence.arrival].start

    def take(self, deltas):
        """Counts the tokens that a step gave. Beside the first one of a sample, each is there by a right guess."""
        self.num_output_tokens += sum(len(delta.token_ids) for delta in deltas)
        self.num_accepted_tokens += len(deltas) - len({(delta.request_id, delta.index) for delta in deltas})

    def note_update(self, drops_tokens):
        """Notes that the weights have changed: nothing on the host is of use; tokens of the last step may be void."""
        self.on_host.clear()
        self.has_dropped |= drops_tokens

    def check(self):
        """Compares all statistics but the rate with what was counted, and with the block tables."""
        engine, stats = self.engine, self.engine.stats()
        launched = engine._launched
        unread = 0 if launched is None else sum(len(chunk.draft) for chunk in launched.plan.chunks)
        names = "num_steps", "num_prompt_tokens", "num_output_tokens", "num_shared_tokens", "num_recomputed"
        for name in (*names, "num_swapped", "num_looked_up_tokens"):
            assert getattr(stats, name) == getattr(self, name), name
        assert stats.hit_rate == self.num_found_tokens / max(self.num_looked_up_tokens, 1)
        assert stats.num_draft_tokens == self.num_drafted - unread
        assert stats.num_accepted_tokens == self.num_accepted_tokens or self.has_dropped
        assert stats.num_compiled == len(engine._runner._programs)
        managers, samples = engine._blocks.managers, [s for some in engine._requests.values() for s in some]
        assert stats.num_running == engine.num_running == (managers[0].state.seq_lens > 0).sum()
        unfinished = sum(s.finish_reason is None and not s.is_exhausted for s in samples)
        running = sum(not s.is_exhausted for s in engine._scheduler.running)
        if engine._restarted is None:
            assert stats.num_waiting == unfinished - running
        pools, num_used, num_held = [], 0, 0
        for group, manager in zip(engine._groups, managers, strict=True):
            state, size = manager.state, manager.block_size
            used = {}
            for seat, column in np.argwhere(state.block_tables >= 0).tolist():
                block, rest = int(state.block_tables[seat, column]), int(state.seq_lens[seat]) - column * size
                used[block] = max(used.get(block, 0), min(rest, size))
            num_free = int((state.ref_counts == 0).sum())
            counts = num_free, manager.num_blocks - num_free - len(used), len(used)
            pools.append((group.sliding_window, len(group.layers), len(group.layers), *counts))
            num_used, num_held = num_used + sum(used.values()), num_held + len(used) * size
        assert [tuple(vars(pool).values()) for pool in stats.pools] == pools
        totals = tuple(map(sum, zip(*(pool[3:] for pool in pools), strict=True)))
        assert (stats.free_blocks, stats.cached_blocks, stats.held_blocks) == totals
        assert abs(stats.waste - (1 - num_used / num_held if num_held else 0)) < 1e-9
