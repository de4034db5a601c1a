"""Decides what each step computes, in plain Python: it uses no device arrays, and no clock except the one in pace.py.

For each step the scheduler does the following, in this order:

1. Layers with a sliding window release the blocks that no later token needs. No planned step reads them.
2. Every running sequence whose prompt is computed gets one token, so that long prompts never hold up decoding.
3. Running sequences whose prompt is not computed yet get a chunk of it each, while the token budget lasts. The budget
   is smaller in a step that also draws tokens of other sequences, if the config says so (pace.py).
4. While there are too few blocks for these tokens, it preempts the last sequence in line: the least urgent one, and of
   equally urgent ones the one that arrived last.
5. If it preempted none, it admits waiting sequences in line, while seats, budget and blocks last.
6. If every row then has one token, and the host knows all tokens, it adds drafts to verify (speculation.py).
7. It lays out the rows. A block is found in the prefix cache as soon as a planned step fills it, so that prompts which
   arrive together are computed once. Where a row would read what another row of its step writes, the step must run a
   program that writes first.

How many tokens each sequence gets stands in an array by seat (seats.py), so that a step costs the host more only where
a sequence does more than to get its next token.

Every sequence finishes at some time, unless more urgent ones come without end: the first in line is never preempted,
and the pool is large enough for any single sequence. The plans depend on the requests and their order alone, so that
several processes that get the same calls make the same plans.
"""

import bisect
import collections.abc
import math

import numpy as np

from paged_jax.engine.blocks import Pairs
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.pace import Pace
from paged_jax.engine.plan import Drafts, Plan, Rows, Samples, Score
from paged_jax.engine.pools import Hits, Pools
from paged_jax.engine.seats import Seats
from paged_jax.engine.sequence import Sequence
from paged_jax.engine.sharing import Sharing
from paged_jax.engine.speculation import Speculator


class Counters:
    """Counts preempted sequences of both kinds, tokens looked up and found in the prefix cache, and spared reads."""

    def __init__(self):
        self.recomputed = self.swapped = self.shared_tokens = 0
        self.looked_up_tokens = self.hit_tokens = 0


class Scheduler:
    """Holds all unfinished sequences: the `running` ones have a seat and blocks, the `waiting` ones have neither.

    Args:
      config: the engine's config.
      blocks: keeps track of the blocks.
      speculator: gives drafts; None for no speculation.
    """

    def __init__(self, config: EngineConfig, blocks: Pools, speculator: Speculator | None = None):
        self.config, self.blocks, self.speculator = config, blocks, speculator
        may_share = config.max_shared_prefixes and not any(each.sliding_window for each in blocks.managers)
        self.sharing = Sharing(config, blocks.managers[0]) if may_share else None
        self.waiting: list[Sequence] = []
        self.seats = Seats(config.max_num_seqs)
        self.counters, self.pace = Counters(), Pace(config)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that run, in line."""
        return self.seats.running

    @property
    def num_waiting(self) -> int:
        """How many unfinished sequences have no blocks, children that wait for their parent's prompt included."""
        return len(self.waiting) + sum(len(s.children) for s in self.waiting + self.running)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence, and with it its children, in line."""
        bisect.insort(self.waiting, sequence, key=lambda other: other.place)

    def schedule(self) -> Plan | None:
        """Plans the next step; returns None if no sequence needs one."""
        seats = self.seats
        is_exhausted = (seats.num_tokens >= seats.max_total)[seats.order]
        for sequence in [self.running[place] for place in is_exhausted.nonzero()[0].tolist()]:
            self._leave(sequence)
        self.blocks.release_behind(seats)
        plan = Plan.empty(len(self.blocks.managers))
        counts = self._continue()
        if not self._make_room(counts, plan):
            self._admit_waiting(counts, plan)
        if not counts.any():
            return None
        self._lay_out(counts, self._add_drafts(counts, plan), plan)
        return plan

    @property
    def may_draft(self) -> bool:
        """Whether the next step will probably compute just the next token of each sequence."""
        is_decoding = all(s.has_drawn and not s.params.is_adjusted for s in self.running)
        return is_decoding and not (self.waiting and self.seats.free)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, whether it runs or waits."""
        if sequence.seat is not None:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            if sequence.host_blocks is not None:
                self.blocks.free_on_host(sequence.host_blocks)
                sequence.host_blocks = None

    def forget_computed(self) -> None:
        """Makes all sequences wait for their tokens to be computed anew, and empties the prefix cache."""
        for sequence in list(self.running):
            self._leave(sequence)
            self.add(sequence)
        for sequence in self.waiting:
            if sequence.host_blocks is not None:
                self.blocks.free_on_host(sequence.host_blocks)
                sequence.host_blocks = None
            sequence.num_computed = 0
        self.blocks.empty_cache()

    def _continue(self) -> np.ndarray:
        """How many tokens each running sequence computes, provided that there are blocks for them: i32 [num_seats]."""
        order, counts = self.seats.order, np.zeros(len(self.seats.sequences), np.int32)
        left = self.seats.num_to_compute[order]
        counts[order[left == 1]] = 1
        budget, num_prompts = self._budget(int(counts.sum()), 0), 0
        for seat in order[left > 1].tolist():
            if budget > 0 and num_prompts < self.config.max_prompts_per_step:
                counts[seat] = self._most_tokens(seat, budget, counts)
                budget -= int(counts[seat])
                num_prompts += 1
        return counts

    def _budget(self, num_decodes: int, num_prompt_tokens: int) -> int:
        """How many more tokens of prompts a step may compute, which has this many tokens already."""
        budget = self.config.max_tokens_per_step - num_decodes - num_prompt_tokens
        most = self.pace.most_tokens
        if most is None or not num_decodes:
            return budget
        # At least one token in each step, so that no prompt waits for ever.
        return min(budget, max(most - num_decodes, 1) - num_prompt_tokens)

    def _most_tokens(self, seat: int, budget: int, counts: np.ndarray) -> int:
        """The most tokens that a row may have: each scored token takes the logits of one seat."""
        room = 1 + self._num_spare(counts) if self.seats.is_scored[seat] else math.inf
        return int(min(self.seats.num_to_compute[seat], budget, room))

    def _num_spare(self, counts: np.ndarray) -> int:
        """Counts the free seats whose logits no scored token takes. A row's own seat serves one of its tokens."""
        return len(self.seats.free) - int((counts - 1)[self.seats.is_scored & (counts > 0)].sum())

    def _make_room(self, counts: np.ndarray, plan: Plan) -> bool:
        """Appends these tokens, preempting sequences until their blocks suffice; says whether it preempted any."""
        preempted = False
        while counts.any():
            copies = self.blocks.append(counts)
            if copies is not None:
                _extend(plan.copies, copies)
                self._computed(counts)
                return preempted
            victim = self.running[-1]
            counts[_seat(victim)] = 0
            self._preempt(victim, plan)
            preempted = True
        return preempted

    def _computed(self, counts: np.ndarray) -> None:
        """Counts tokens of the planned step as computed, and enters the blocks that they fill in the prefix cache."""
        self.seats.num_computed += counts
        self.blocks.cache_full_blocks(self.seats)

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Takes a sequence's blocks and seat away; it waits again at its old place in line."""
        pairs = self.blocks.swap_out(_seat(sequence)) if self._should_swap(sequence) else None
        if pairs is not None:
            _extend(plan.swap_out, pairs)
            sequence.host_blocks = [[host for _, host in some] for some in pairs]
            self.counters.swapped += 1
        else:
            self.counters.recomputed += 1
        self._leave(sequence)
        if pairs is None:
            sequence.num_computed = 0
        self.add(sequence)

    def _should_swap(self, sequence: Sequence) -> bool:
        """Whether to swap a sequence out instead of computing it again.

        The policy "cheaper" compares the estimated time to move its blocks out and back in with the time to compute
        those blocks again that no other sequence holds.
        """
        if not self.config.num_host_blocks or not sequence.num_computed or self.config.preemption == "recompute":
            return False
        if self.config.preemption == "swap":
            return True
        seat = _seat(sequence)
        num_lost = sequence.num_computed - self.blocks.count_shared(seat) * self.blocks.block_size
        swap_seconds = 2 * self.blocks.swapped_bytes(seat) / self.config.swap_bytes_per_second
        return swap_seconds < num_lost / self.config.recompute_tokens_per_second

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of `running`, and gives back its blocks, its seat and its children's seats."""
        self.blocks.cache_full_blocks(self.seats)
        self.blocks.release(_seat(sequence))
        self.seats.stop(sequence)
        for leaving in [*reversed(sequence.children), sequence]:
            self.seats.take_back(leaving)

    def _admit_waiting(self, counts: np.ndarray, plan: Plan) -> None:
        """Admits waiting sequences in line, up to the first one that has no room."""
        if not self.waiting:
            return
        num_decodes = int(np.count_nonzero((counts == 1) & (self.seats.num_to_compute == 0)))
        budget = self._budget(num_decodes, int(counts.sum()) - num_decodes)
        room = self.config.max_prompts_per_step - int(np.count_nonzero(counts > 1))
        reserve: list[int] | None = None
        while self.waiting and budget > 0 and room > 0:
            sequence = self.waiting[0]
            if 1 + len(sequence.children) > self._num_spare(counts):
                return
            # Blocks are kept back for the running sequences: for the rest of their prompts, and one more for each.
            reserve = self.blocks.to_finish(self.seats) if reserve is None else reserve
            is_found = sequence.host_blocks is None and not (sequence.wants_scores and not sequence.has_drawn)
            hits = self.blocks.match(sequence) if is_found else self.blocks.no_hits
            if self.running and not self.blocks.has_room(sequence, hits, reserve):
                return
            budget -= self._admit(self.waiting.pop(0), hits, budget, counts, plan)
            for adopted, blocks in zip(plan.adopted, hits.blocks, strict=True):
                adopted.update(blocks)
            plan.seated.append(sequence)
            room -= 1
            kept = self.blocks.to_go_on(sequence)
            reserve = [before + more for before, more in zip(reserve, kept, strict=True)]

    def _admit(self, sequence: Sequence, hits: Hits, budget: int, counts: np.ndarray, plan: Plan) -> int:
        """Gives a waiting sequence a seat, its cached or swapped blocks, and blocks for its first chunk.

        Returns:
          The tokens of this chunk.
        """
        seat = self.seats.give(sequence)
        for child in sequence.children:
            self.seats.give(child)
            child.num_found = 0
        self.seats.run(sequence)
        if sequence.host_blocks is None:
            sequence.num_computed = hits.num_blocks * self.blocks.block_size
            self.seats.num_cached[seat] = hits.num_blocks
            if sequence.num_found is None:
                sequence.num_found = sequence.num_computed
            self.blocks.adopt(seat, hits)
            self.counters.looked_up_tokens += sequence.num_tokens
            self.counters.hit_tokens += sequence.num_computed
        counts[seat] = self._most_tokens(seat, budget, counts)
        num_computed, first = sequence.num_computed, np.zeros_like(counts)
        if sequence.host_blocks is not None:
            _extend(plan.swap_in, self.blocks.restore(seat, num_computed, sequence.host_blocks))
            sequence.host_blocks = None
        first[seat] = counts[seat]
        copies = self.blocks.append(first)
        assert copies is not None and not any(copies), "a sequence was admitted without blocks, or must copy one"  # noqa: PT018
        if num_computed:
            plan.entries += self.blocks.entries(seat, 0, num_computed)
        self._computed(first)
        return int(counts[seat])

    def _add_drafts(self, counts: np.ndarray, plan: Plan) -> Drafts:
        """Gives seats drafts, and blocks for them, if all rows decode and no block has to be taken from anyone.

        A step has no drafts if a row's logits are changed (adjust.py, mask.py): the changes depend on earlier tokens.
        """
        has_begun = any(plan.adopted) or any(plan.swap_in)
        if self.speculator is None or has_begun:
            return {}
        planned = [sequence for sequence in self.running if counts[_seat(sequence)]]
        if any(s.params.is_adjusted for s in planned):
            return {}
        # A row of one token may also be a part of a text that is computed anew.
        is_decoding = (s.has_drawn and not s.num_to_compute and not s.num_unread for s in planned)
        if not all(is_decoding) or counts.max() > 1:
            return {}
        drafts = {_seat(sequence): draft for sequence, draft in self.speculator.draft(planned).items()}
        lengths = {seat: len(draft) for seat, draft in drafts.items()}
        copies = self.blocks.append(lengths)
        if copies is None:
            self.speculator.pause()
            return {}
        assert not any(copies), "the block of the last token is shared"
        for seat, length in lengths.items():
            self.seats.num_computed[seat] += length
            counts[seat] += length
        return drafts

    def correct(self, plan: Plan, num_right: collections.abc.Mapping[Sequence, int]) -> None:
        """Shortens sequences with verified drafts to their right tokens.

        Args:
          plan: the step's plan.
          num_right: how many of its drawn tokens count, for each sequence.
        """
        lengths = {}
        for row in plan.rows.drafts:
            sequence, count = plan.rows.sequences[row], num_right[plan.rows.sequences[row]]
            length = int(plan.rows.ends[row] - plan.rows.counts[row]) + count
            sequence.num_tokens = length + 1
            if sequence.seat is not None:
                sequence.num_computed = lengths[sequence.seat] = length
        if lengths:
            self.blocks.truncate(lengths)

    def _lay_out(self, counts: np.ndarray, drafts: Drafts, plan: Plan) -> None:
        """Orders the rows, and plans a draw where a sequence's last token is computed."""
        seats = self.seats
        order = seats.order[counts[seats.order] > 0]
        is_one = counts[order] == 1
        order = order if is_one.all() else np.concatenate([order[~is_one], order[is_one]])
        if self.sharing is not None and plan.seated:
            self.sharing.forget()
        if self.sharing is not None and is_one.all():
            order = self._share(order, self.sharing, plan)
        ends, of_row = seats.num_computed[order], seats.sequences[order].tolist()
        by_row = {row: drafts[seat] for row, seat in enumerate(order.tolist()) if seat in drafts} if drafts else {}
        plan.rows = rows = Rows(of_row, order, ends, counts[order], seats.is_drawn[order], by_row)
        starts = ends - rows.counts
        plan.num_prompt_tokens = int(np.maximum(np.minimum(ends, seats.num_prompt[order]) - starts, 0).sum())
        last_begins = (ends - 1) // self.blocks.block_size * self.blocks.block_size  # of blocks that `row_blocks` names
        for row in (starts < last_begins).nonzero()[0].tolist():
            plan.entries += self.blocks.entries(int(order[row]), int(starts[row]), int(last_begins[row]))
        for row in seats.is_scored[order].nonzero()[0].tolist():
            positions = range(starts[row] + 1, min(ends[row] + 1, of_row[row].num_prompt))
            plan.scores += [Score(of_row[row], row, offset, position) for offset, position in enumerate(positions)]
        self._draw(rows, plan)
        plan.row_blocks = self.blocks.last_blocks(order)
        adopted = zip(plan.adopted, plan.row_blocks, strict=True)
        reads_written = any(blocks and not blocks.isdisjoint(last.tolist()) for blocks, last in adopted)
        plan.is_decode = len(rows) == int(counts.sum()) and not reads_written
        plan.prefixes = plan.prefixes if plan.is_decode else []
        self.counters.shared_tokens += sum((num_rows - 1) * size for num_rows, size in plan.prefixes)

    def _draw(self, rows: Rows, plan: Plan) -> None:
        """Plans a token for each row that ends with its sequence's last one, for its children, and after its drafts."""
        seats = self.seats
        num_draws = (rows.ends == seats.num_tokens[rows.seats]).astype(np.int64)
        parents = (num_draws * (rows.ends == seats.num_prompt[rows.seats])).nonzero()[0].tolist()
        for row in parents:
            num_draws[row] += len(rows.sequences[row].children)
        for row, draft in rows.drafts.items():
            num_draws[row] = 1 + len(draft)
        of_row, firsts = np.arange(len(rows)).repeat(num_draws), num_draws.cumsum() - num_draws
        owners, positions, follows = rows.seats[of_row], rows.ends[of_row], {}
        for row in parents:
            children = rows.sequences[row].children
            owners[firsts[row] + 1 : firsts[row] + 1 + len(children)] = [_seat(child) for child in children]
            self._begin_children(rows.sequences[row], plan)
        last_seats = owners.copy()
        for row, draft in rows.drafts.items():
            first, end = int(firsts[row]), int(firsts[row]) + 1 + len(draft)
            positions[first:end] -= np.arange(len(draft), -1, -1)
            follows |= dict(zip(range(first + 1, end), draft, strict=True))
            # The host reads these tokens before it plans the next step, which needs no last token of this seat.
            last_seats[first:end] = len(seats.sequences)
        seats.num_tokens[owners] = positions + 1
        seats.is_drawn[owners] = last_seats == owners
        are_plain = seats.is_plain[owners] & (positions + 1 < seats.max_total[owners])
        needs = int(np.bitwise_or.reduce(seats.needs[owners]))
        sequences, params = seats.sequences[owners].tolist(), seats.params[:, owners]
        plan.samples = Samples(sequences, of_row, positions, last_seats, params, are_plain, needs, follows)

    def _share(self, seats: np.ndarray, sharing: Sharing, plan: Plan) -> np.ndarray:
        """Puts rows that share a prefix together, before all others."""
        groups, order = sharing.find(seats)
        plan.prefixes = [(len(group.rows), group.num_blocks * self.blocks.block_size) for group in groups]
        return seats[order]

    def _begin_children(self, parent: Sequence, plan: Plan) -> None:
        """Makes a sequence's children run, with all blocks of their parent, whose prompt is computed now."""
        seat = _seat(parent)
        for child in parent.children:
            child.num_computed, child.hashes = parent.num_computed, list(parent.hashes)
            self.seats.num_cached[_seat(child)] = self.seats.num_cached[seat]
            self.blocks.fork(seat, _seat(child))
            self.seats.run(child)
            plan.entries += self.blocks.entries(_seat(child), 0, parent.num_computed, of=seat)
        plan.seated += parent.children
        parent.children = []


def _seat(sequence: Sequence) -> int:
    assert sequence.seat is not None, "the sequence does not run"
    return sequence.seat


def _extend(lists: list[Pairs], others: list[Pairs]) -> None:
    """Appends another list's pairs to the pairs of each group."""
    for pairs, more in zip(lists, others, strict=True):
        pairs += more
