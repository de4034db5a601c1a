"""Decides what each step computes, in plain Python: it uses no device arrays and no clock.

For each step the scheduler does the following, in this order:

1. Layers with a sliding window release the blocks that no later token needs. No planned step reads them.
2. Every running sequence whose prompt is computed gets one token, so that long prompts never hold up decoding.
3. Running sequences whose prompt is not computed yet get a chunk of it each, while the token budget lasts. The budget
   is smaller in a step that also draws tokens of other sequences, if the config says so.
4. While there are too few blocks for these tokens, it preempts the last sequence in line: the least urgent one, and of
   equally urgent ones the one that arrived last.
5. If it preempted none, it admits waiting sequences in line, while seats, budget and blocks last.
6. If every row then has one token, and the host knows all tokens, it adds drafts to verify (speculation.py).
7. It lays out the rows. A block is found in the prefix cache as soon as a planned step fills it, so that prompts which
   arrive together are computed once. Where a row would read what another row of its step writes, the step must run a
   program that writes first.

Every sequence finishes at some time, unless more urgent ones come without end: the first in line is never preempted,
and the pool is large enough for any single sequence. The plans depend on the requests and their order alone, so that
several processes that get the same calls make the same plans.
"""

import bisect
import math

from paged_jax.engine.blocks import Pairs
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.plan import Chunk, Plan, Sample, Score
from paged_jax.engine.pools import Hits, Pools
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
        self.running: list[Sequence] = []
        self.free_seats = list(range(config.max_num_seqs))[::-1]
        self.counters = Counters()

    @property
    def num_waiting(self) -> int:
        """How many unfinished sequences have no blocks, children that wait for their parent's prompt included."""
        return len(self.waiting) + sum(len(s.children) for s in self.waiting + self.running)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence, and with it its children, in line."""
        bisect.insort(self.waiting, sequence, key=lambda other: other.place)

    def schedule(self) -> Plan | None:
        """Plans the next step; returns None if no sequence needs one."""
        for sequence in [s for s in self.running if s.is_exhausted]:
            self._leave(sequence)
        self.blocks.release_behind(self.running)
        plan = Plan.empty(len(self.blocks.managers))
        tokens = self._continue()
        preempted = self._make_room(tokens, plan)
        if not preempted:
            self._admit_waiting(tokens, plan)
        if not tokens:
            return None
        self._lay_out(tokens, self._add_drafts(tokens, plan), plan)
        return plan

    @property
    def may_draft(self) -> bool:
        """Whether the next step will probably compute just the next token of each sequence."""
        is_decoding = all(s.has_drawn and not s.params.is_adjusted for s in self.running)
        return is_decoding and not (self.waiting and self.free_seats)

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
            sequence.num_computed = sequence.num_cached = 0
        self.blocks.empty_cache()

    def _continue(self) -> dict[Sequence, int]:
        """How many tokens each running sequence computes, provided that there are blocks for them."""
        left = [(sequence, sequence.num_to_compute) for sequence in self.running]
        tokens = {sequence: 1 for sequence, count in left if count == 1}
        budget, num_prompts = self._budget(len(tokens), 0), 0
        for sequence, count in left:
            if count > 1 and budget > 0 and num_prompts < self.config.max_prompts_per_step:
                tokens[sequence] = int(min(count, budget, self._most_tokens(sequence, tokens)))
                budget -= tokens[sequence]
                num_prompts += 1
        return tokens

    def _budget(self, num_decodes: int, num_prompt_tokens: int) -> int:
        """How many more tokens of prompts a step may compute, which has this many tokens already."""
        budget = self.config.max_tokens_per_step - num_decodes - num_prompt_tokens
        most = self.config.max_tokens_beside_decodes
        if most is None or not num_decodes:
            return budget
        # At least one token in each step, so that no prompt waits for ever.
        return min(budget, max(most - num_decodes, 1) - num_prompt_tokens)

    def _most_tokens(self, sequence: Sequence, tokens: dict[Sequence, int]) -> float:
        """The most tokens that a row may have: each scored token takes the logits of one seat."""
        return 1 + self._num_spare(tokens) if sequence.is_scored else math.inf

    def _num_spare(self, tokens: dict[Sequence, int]) -> int:
        """Counts the free seats whose logits no scored token takes. A row's own seat serves one of its tokens."""
        return len(self.free_seats) - sum(count - 1 for sequence, count in tokens.items() if sequence.is_scored)

    def _make_room(self, tokens: dict[Sequence, int], plan: Plan) -> bool:
        """Appends these tokens, preempting sequences until their blocks suffice; says whether it preempted any."""
        preempted = False
        while tokens:
            copies = self.blocks.append({_seat(sequence): count for sequence, count in tokens.items()})
            if copies is not None:
                _extend(plan.copies, copies)
                self._computed(tokens)
                return preempted
            victim = self.running[-1]
            tokens.pop(victim, None)
            self._preempt(victim, plan)
            preempted = True
        return preempted

    def _computed(self, tokens: dict[Sequence, int]) -> None:
        """Counts tokens of the planned step as computed, and enters the blocks that they fill in the prefix cache."""
        for sequence, count in tokens.items():
            sequence.num_computed += count
        self.blocks.cache_full_blocks(tokens)

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Takes a sequence's blocks and seat away; it waits again at its old place in line."""
        pairs = self.blocks.swap_out(_seat(sequence)) if self._should_swap(sequence) else None
        if pairs is not None:
            _extend(plan.swap_out, pairs)
            sequence.host_blocks = [[host for _, host in some] for some in pairs]
            self.counters.swapped += 1
        else:
            self.counters.recomputed += 1
        num_computed = sequence.num_computed
        self._leave(sequence)
        sequence.num_computed = num_computed if pairs is not None else 0
        sequence.num_cached = 0
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
        seat = _seat(sequence)
        self.blocks.cache_full_blocks([sequence])
        self.blocks.release(seat)
        self.running.remove(sequence)
        self.free_seats += [_seat(child) for child in reversed(sequence.children)]
        self.free_seats.append(seat)
        sequence.seat = None
        for child in sequence.children:
            child.seat = None

    def _admit_waiting(self, tokens: dict[Sequence, int], plan: Plan) -> None:
        """Admits waiting sequences in line, up to the first one that has no room."""
        if not self.waiting:
            return
        num_decodes = sum(count == 1 and not sequence.num_to_compute for sequence, count in tokens.items())
        budget = self._budget(num_decodes, sum(tokens.values()) - num_decodes)
        room = self.config.max_prompts_per_step - sum(count > 1 for count in tokens.values())
        # Blocks are kept back for the running sequences: for the rest of their prompts, and one more for each.
        reserve = self.blocks.to_finish(self.running)
        while self.waiting and budget > 0 and room > 0:
            sequence = self.waiting[0]
            if 1 + len(sequence.children) > self._num_spare(tokens):
                return
            is_found = sequence.host_blocks is None and not sequence.is_scored
            hits = self.blocks.match(sequence) if is_found else self.blocks.no_hits
            if self.running and not self.blocks.has_room(sequence, hits, reserve):
                return
            self._admit(self.waiting.pop(0), hits, budget, tokens, plan)
            for adopted, blocks in zip(plan.adopted, hits.blocks, strict=True):
                adopted.update(blocks)
            plan.seated.append(sequence)
            budget -= tokens[sequence]
            room -= 1
            kept = self.blocks.to_go_on(sequence)
            reserve = [before + more for before, more in zip(reserve, kept, strict=True)]

    def _admit(self, sequence: Sequence, hits: Hits, budget: int, tokens: dict[Sequence, int], plan: Plan) -> None:
        """Gives a waiting sequence a seat, its cached or swapped blocks, and blocks for its first chunk."""
        sequence.seat = self.free_seats.pop()
        for child in sequence.children:
            child.seat, child.num_found = self.free_seats.pop(), 0
        bisect.insort(self.running, sequence, key=lambda other: other.place)
        if sequence.host_blocks is None:
            sequence.num_computed = hits.num_blocks * self.blocks.block_size
            sequence.num_cached = hits.num_blocks
            if sequence.num_found is None:
                sequence.num_found = sequence.num_computed
            self.blocks.adopt(sequence.seat, hits)
            self.counters.looked_up_tokens += sequence.num_tokens
            self.counters.hit_tokens += sequence.num_computed
        tokens[sequence] = int(min(sequence.num_to_compute, budget, self._most_tokens(sequence, tokens)))
        num_computed = sequence.num_computed
        if sequence.host_blocks is not None:
            _extend(plan.swap_in, self.blocks.restore(sequence.seat, num_computed, sequence.host_blocks))
            sequence.host_blocks = None
        copies = self.blocks.append({sequence.seat: tokens[sequence]})
        assert copies is not None and not any(copies), "a sequence was admitted without blocks, or must copy one"  # noqa: PT018
        if num_computed:
            plan.entries += self.blocks.entries(sequence.seat, 0, num_computed)
        self._computed({sequence: tokens[sequence]})

    def _add_drafts(self, tokens: dict[Sequence, int], plan: Plan) -> dict[Sequence, list[int]]:
        """Gives rows drafts, and blocks for them, if all rows decode and no block has to be taken from anyone.

        A step has no drafts if a row's logits are changed (adjust.py, mask.py): the changes depend on earlier tokens.
        """
        has_begun = any(plan.adopted) or any(plan.swap_in)
        if self.speculator is None or has_begun or any(s.params.is_adjusted for s in tokens):
            return {}
        # A row of one token may also be a part of a text that is computed anew.
        is_decoding = (s.has_drawn and not s.num_to_compute and not s.num_unread for s in tokens)
        if not all(is_decoding) or max(tokens.values()) > 1:
            return {}
        drafts = self.speculator.draft(list(tokens))
        copies = self.blocks.append({_seat(sequence): len(draft) for sequence, draft in drafts.items()})
        if copies is None:
            self.speculator.pause()
            return {}
        assert not any(copies), "the block of the last token is shared"
        for sequence, draft in drafts.items():
            sequence.num_computed += len(draft)
            tokens[sequence] += len(draft)
        return drafts

    def correct(self, plan: Plan, num_right: dict[Sequence, int]) -> None:
        """Shortens sequences with verified drafts to their right tokens.

        Args:
          plan: the step's plan.
          num_right: how many of its drawn tokens count, for each sequence.
        """
        lengths = {}
        for chunk in plan.chunks:
            if chunk.draft and chunk.sequence.seat is not None:
                chunk.sequence.num_computed = chunk.start + num_right[chunk.sequence]
                lengths[chunk.sequence.seat] = chunk.sequence.num_computed
        if lengths:
            self.blocks.truncate(lengths)

    def _lay_out(self, tokens: dict[Sequence, int], drafts: dict[Sequence, list[int]], plan: Plan) -> None:
        """Orders the rows. Where a sequence's last token is computed, plans a draw and starts the children."""
        rows = [item for item in tokens.items() if item[1] > 1]
        rows += [item for item in tokens.items() if item[1] == 1]
        if self.sharing is not None and plan.seated:
            self.sharing.forget()
        if self.sharing is not None and rows[0][1] == 1:
            rows = self._share(rows, self.sharing, plan)
        for row, (sequence, count) in enumerate(rows):
            seat, end = _seat(sequence), sequence.num_computed
            draft = drafts.get(sequence, ())
            plan.chunks.append(Chunk(sequence, seat, end - count, count, draft))
            if count > 1:
                plan.entries += self.blocks.entries(seat, end - count, end)
            if sequence.is_scored:
                positions = range(end - count + 1, min(end + 1, sequence.num_prompt))
                plan.scores += [Score(sequence, row, offset, position) for offset, position in enumerate(positions)]
            if end < sequence.num_tokens:
                continue
            # The host reads these tokens before it plans the next step, which needs no last token of this seat.
            seat = self.config.max_num_seqs if draft else seat
            for position, follows in enumerate((None, *draft), end - len(draft)):
                plan.samples.append(Sample(sequence, seat, row, position, follows))
            sequence.num_unread += 1
            if sequence.children:
                self._begin_children(sequence, row, plan)
        plan.row_blocks = self.blocks.last_blocks([chunk.seat for chunk in plan.chunks])
        reads_written = any(not a.isdisjoint(b) for a, b in zip(plan.adopted, plan.row_blocks, strict=True))
        plan.is_decode = len(rows) == sum(tokens.values()) and not reads_written
        plan.prefixes = plan.prefixes if plan.is_decode else []
        self.counters.shared_tokens += sum((num_rows - 1) * size for num_rows, size in plan.prefixes)

    def _share(self, rows: list[tuple[Sequence, int]], sharing: Sharing, plan: Plan) -> list[tuple[Sequence, int]]:
        """Puts rows that share a prefix together, before all others."""
        groups = sharing.find([_seat(sequence) for sequence, _ in rows])
        plan.prefixes = [(len(group.rows), group.num_blocks * self.blocks.block_size) for group in groups]
        first = [row for group in groups for row in group.rows]
        return [rows[row] for row in first] + [item for row, item in enumerate(rows) if row not in set(first)]

    def _begin_children(self, parent: Sequence, row: int, plan: Plan) -> None:
        """Makes a sequence's children run, with all blocks of their parent, whose prompt is computed now."""
        for child in parent.children:
            child.num_computed, child.num_cached = parent.num_computed, parent.num_cached
            child.hashes = list(parent.hashes)
            self.blocks.fork(_seat(parent), _seat(child))
            bisect.insort(self.running, child, key=lambda other: other.place)
            plan.entries += self.blocks.entries(_seat(child), 0, parent.num_computed, of=_seat(parent))
            plan.samples.append(Sample(child, _seat(child), row, parent.num_computed))
            child.num_unread += 1
        plan.seated += parent.children
        parent.children = []


def _seat(sequence: Sequence) -> int:
    assert sequence.seat is not None, "the sequence does not run"
    return sequence.seat


def _extend(lists: list[Pairs], others: list[Pairs]) -> None:
    """Appends another list's pairs to the pairs of each group."""
    for pairs, more in zip(lists, others, strict=True):
        pairs += more
