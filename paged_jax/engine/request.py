"""Requests, the sequences that they become, and what comes back of them."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Protocol

type FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What a request wants of its tokens; all of it may differ from request to request in one batch.

    Attributes:
      max_tokens: new tokens of each sample at most; None for as many as fit.
      n: samples, that is, independent continuations of the prompt.
      temperature: divides the logits; 0 for the most likely token always.
      top_k: only the `top_k` most likely tokens can be drawn (and those as likely as the last of them); 0 for all.
      top_p: only the fewest most likely tokens that together reach this probability; 1 for all.
      seed: of the draws, from 0 to 2**64 - 1; None for the request's number. A sample depends on its seed, its index
        and its positions alone, not on the batches that it was in.
      stop_token_ids: tokens that end a sample; they are among its tokens, but not in its text.
      stop: texts that end a sample; they are not in its text. The engine needs a tokenizer for them.
      logprobs: how many most likely tokens to tell the log-probabilities of, beside the token that was drawn; None for
        no log-probabilities. They are the model's: temperature, top_k and top_p do not change them.
    """

    max_tokens: int | None = None
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self):
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        _check_integer("n", self.n, 1, 2**31 - 1)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_integer("seed", self.seed, 0, 2**64 - 1, optional=True)
        _check_integer("logprobs", self.logprobs, 0, 2**31 - 1, optional=True)
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, 2**31 - 1)
        if isinstance(self.stop, str):
            raise TypeError(f"stop must be a tuple of texts, got the text {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must hold texts that are not empty, got {self.stop!r}")


def _check_integer(name: str, value: Any, least: int, most: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be in [{least}, {most}], got {value}")


class Tokenizer(Protocol):
    """What an engine needs of a tokenizer to give text; `tokenizers.Tokenizer` has it."""

    def decode(self, ids: Any, /) -> str:
        """The text of token ids."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token that was drawn.

    Attributes:
      token_id: the token.
      logprob: natural logarithm of its probability.
      top: the most likely tokens in falling order, as (token id, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):
    """What is new of one sample.

    Attributes:
      request_id: what `add_request` returned.
      index: of the sample, from 0 to n - 1.
      token_ids: new tokens.
      text: new text; "" without a tokenizer. Text that may turn out to begin a stop text is held back.
      logprobs: one for each of `token_ids`, if they were asked for.
      finish_reason: None as long as more will come; "stop" after a stop token or text, "length" after max_tokens.
      stop_reason: the stop token or text that ended the sample, if one did.
    """

    request_id: int
    index: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished sample: all its `Delta`s in one."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of a request on its way through the engine; the scheduler moves it between its two lists.

    Attributes:
      request_id: the request's number, in order of arrival.
      index: of the sample.
      params: what the request wants.
      tokens: the prompt and every output token that the host has read.
      num_prompt: tokens of the prompt.
      max_total: tokens of the prompt and the output together at most.
      seed: of the draws.
      num_unread: output tokens that a launched step samples and the host has not read: 0 or 1.
      num_computed: tokens whose keys and values the launched steps leave in the cache.
      seat: row of the allocator's tables and of the last tokens on the device; None if the sequence does not run.
      children: samples of the same request that begin when the prompt of this one is computed.
      host_blocks: where its blocks are while it is swapped out, else None.
      hashes: content hashes of its full blocks so far.
      num_cached: how many of its blocks the prefix cache has been told of.
      finish_reason: None as long as it goes on.
      text: what turns its tokens into text, or None.
    """

    request_id: int
    index: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    max_total: int
    seed: int
    num_unread: int = 0
    num_computed: int = 0
    seat: int | None = None
    children: list["Sequence"] = dataclasses.field(default_factory=list)
    host_blocks: list[int] | None = None
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    text: Any = None

    @property
    def arrival(self) -> tuple[int, int]:
        """Its place in line: who came earlier is served first and preempted last."""
        return self.request_id, self.index

    @property
    def num_tokens(self) -> int:
        """Tokens that there are, read by the host or not."""
        return len(self.tokens) + self.num_unread

    @property
    def num_to_compute(self) -> int:
        """Tokens that are not in the cache yet; the last of them gives the next token's logits."""
        return len(self.tokens) + self.num_unread - self.num_computed

    @property
    def is_exhausted(self) -> bool:
        """Whether the launched steps sample all that the sequence may have: it needs the cache no more."""
        return self.num_tokens >= self.max_total
