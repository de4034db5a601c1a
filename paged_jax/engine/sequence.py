"""Sequences: the engine's state of each unfinished sample of a request."""

import dataclasses
from typing import Any

from paged_jax.engine.request import FinishReason, SamplingParams, TokenLogprob


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of a request, unfinished; the scheduler keeps it in its list of waiting or of running sequences.

    While it has a seat, `num_tokens` and `num_computed` stand in the arrays of `Seats`.

    Attributes:
      request_id: the request's id, which counts requests in order of arrival.
      index: the index of the sample in its request.
      params: the request's parameters, with a seed.
      tokens: the prompt and every output token that the host has read.
      num_prompt: tokens of the prompt.
      max_total: the largest number of tokens, prompt and output together.
      seed: the seed of the draws.
      seat: the sequence's row of the block tables and of the last tokens on the device; None if it has none. A child
        gets its seat together with its parent, before it runs.
      seats: the `Seats`, while it has one.
      children: samples of the same request that begin when the prompt of this one is computed.
      host_blocks: for each group of layers, the host blocks that hold its cache while it is swapped out, else None.
      hashes: the names of its full blocks so far (prefix.py).
      scored: the log-probabilities of the prompt's tokens so far, by their positions.
      num_found: how many of its tokens were found in the prefix cache when it was first admitted; None before.
      is_restarted: whether its next `Delta` is the first one after a restart.
      finish_reason: None while the sequence is unfinished.
      text: the `TextStream` that turns its tokens into text, or None.
      mask: the `MaskedSample` that says which tokens may come next, or None.
    """

    request_id: int
    index: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    max_total: int
    seed: int
    seat: int | None = None
    seats: Any = None
    children: list["Sequence"] = dataclasses.field(default_factory=list)
    host_blocks: list[list[int]] | None = None
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    scored: dict[int, TokenLogprob] = dataclasses.field(default_factory=dict)
    num_found: int | None = None
    is_restarted: bool = False
    finish_reason: FinishReason | None = None
    text: Any = None
    mask: Any = None

    def __post_init__(self):
        self._num_tokens, self._num_computed = len(self.tokens), 0

    @property
    def num_tokens(self) -> int:
        """How many tokens the sequence has, including those that launched steps draw and the host has not read yet."""
        return self._num_tokens if self.seats is None else int(self.seats.num_tokens[self.seat])

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        if self.seats is None:
            self._num_tokens = value
        else:
            self.seats.num_tokens[self.seat] = value

    @property
    def num_computed(self) -> int:
        """How many of its tokens are in the cache, or swapped out to the host, once all launched steps are done."""
        return self._num_computed if self.seats is None else int(self.seats.num_computed[self.seat])

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        if self.seats is None:
            self._num_computed = value
        else:
            self.seats.num_computed[self.seat] = value

    @property
    def num_unread(self) -> int:
        """How many of its tokens the host has not read: up to 1 between two calls of `Engine.step`, up to 2 inside."""
        return self.num_tokens - len(self.tokens)

    @property
    def num_to_compute(self) -> int:
        """How many tokens are not in the cache yet; the last of them gives the next token's logits."""
        return self.num_tokens - self.num_computed

    @property
    def place(self) -> tuple[int, int, int]:
        """The sequence's place in line: the smaller, the sooner it is served and the later preempted."""
        return self.params.priority, self.request_id, self.index

    @property
    def arrival(self) -> tuple[int, int]:
        """The sequence's name, in order of arrival."""
        return self.request_id, self.index

    @property
    def has_drawn(self) -> bool:
        """Whether it has tokens after its prompt, including tokens that the host has not read yet."""
        return self.num_tokens > self.num_prompt

    @property
    def wants_scores(self) -> bool:
        """Whether the log-probabilities of its prompt's tokens are wanted; only the first sample's are."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def is_plain(self) -> bool:
        """Whether nothing but `max_total` ends it, and nothing is told of it but its tokens."""
        is_watched = self.text is not None or self.mask is not None or self.params.stop_token_ids
        return not (is_watched or self.is_restarted or self.wants_scores or self.params.logprobs is not None)

    @property
    def is_exhausted(self) -> bool:
        """Whether the launched steps draw the sequence's last possible token, so that it needs no more steps."""
        return self.num_tokens >= self.max_total

    def restart(self) -> None:
        """Drops all tokens after the prompt. The sequence has no blocks, and the host has read all of its tokens."""
        assert self.seat is None and not self.num_unread and not self.num_computed  # noqa: PT018
        del self.tokens[self.num_prompt :], self.hashes[:]
        self.num_tokens = self.num_prompt
        self.scored, self.is_restarted = {}, True
        self.num_found = None if self.index == 0 else 0
