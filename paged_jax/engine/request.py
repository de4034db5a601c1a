"""Requests: their parameters and their results."""

import collections.abc
import dataclasses
import functools
import hashlib
import operator
import secrets
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from paged_jax._static import integer

type FinishReason = Literal["stop", "length", "cancelled", "error"]
type LogitBias = collections.abc.Mapping[int, float] | collections.abc.Iterable[tuple[int, float]]

MAX_BIASES = 512  # tokens whose logits a request may change, the stop tokens that min_tokens forbids included
_LARGEST_PENALTY = 1e6
_LARGEST_FLOAT = float(np.finfo(np.float32).max)  # on the device parameters are float32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How many tokens a request wants and how they are drawn; requests in one batch may differ in all of it.

    Attributes:
      max_tokens: the largest number of new tokens of each sample; None for as many as fit.
      n: the number of samples, that is, of independent continuations of the prompt.
      temperature: divides the logits; 0 always takes the most likely token.
      top_k: draws from the `top_k` most likely tokens only (and from those as likely as the last of them); 0 for all.
      top_p: draws from the smallest set of most likely tokens whose probabilities add up to `top_p`; 1 for all.
      min_p: draws only from tokens that are at least `min_p` times as likely as the most likely one; 0 for all.
      repetition_penalty: divides the positive logits of all tokens that the prompt or the output has, and multiplies
        the negative ones; 1 for none.
      presence_penalty, frequency_penalty: are subtracted from the logits of all tokens that the output has: the first
        once, the second once for each time; from -2 to 2.
      logit_bias: summands of the logits of some tokens, from -100 to 100, by token id.
      min_tokens: how many tokens a sample has before a stop token or a stop text may end it.
      mask: says before each token which tokens may come, as a grammar does: a `TokenMask`. It decides alone where
        `min_tokens` would forbid every token that it allows.
      priority: requests with a lower one are served first, and preempted last; of equal ones the earlier request. A
        request may wait as long as more urgent ones come.
      seed: the seed of the draws, from 0 to 2**64 - 1; None for one that the engine takes from its own. The tokens of a
        sample depend on its seed, its index and their positions, but not on the other requests of a batch.
      stop_token_ids: tokens that end a sample; they are among its tokens, but not in its text.
      stop: texts that end a sample; they are not in its text. The engine needs a tokenizer to find them. A text that is
        a special token of the tokenizer is found, too.
      include_stop: whether the stop token or text that ends a sample is in its text.
      skip_special_tokens: whether special tokens are left out of the text.
      logprobs: for how many of the most likely tokens to report log-probabilities, beside the drawn token's own; None
        for no log-probabilities. They are the model's: none of these parameters changes them.
      prompt_logprobs: the same for the tokens of the prompt. Such a prompt is not looked up in the prefix cache, and a
        step computes no more of its tokens than the engine has seats.

    Example:
      >>> from paged_jax.engine import SamplingParams
      >>> SamplingParams(max_tokens=64, temperature=0.7, top_p=0.95, seed=1).n
      1
    """

    max_tokens: int | None = None
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = ()
    min_tokens: int = 0
    mask: Any = None
    priority: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        integers = (
            ("max_tokens", 1),
            ("n", 1),
            ("top_k", 0),
            ("min_tokens", 0),
            ("logprobs", 0),
            ("prompt_logprobs", 0),
        )
        for name, least in integers:
            if getattr(self, name) is not None or name in ("n", "top_k", "min_tokens"):
                object.__setattr__(self, name, _integer_in(name, getattr(self, name), least, 2**31 - 1))
        object.__setattr__(self, "priority", _integer_in("priority", self.priority, -(2**31), 2**31 - 1))
        object.__setattr__(self, "seed", _read_seed(self.seed))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name))
        if not 0 <= self.temperature <= _LARGEST_FLOAT:
            raise ValueError(f"temperature must be 0 or more and finite in float32, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        stop_token_ids = tuple(_integer_in("stop_token_ids", x, 0, 2**31 - 1) for x in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", _read_biases(self.logit_bias))
        self._check_adjustments()
        if isinstance(self.stop, str):
            raise TypeError(f"stop must be a tuple of texts, got the text {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must hold texts that are not empty, got {self.stop!r}")
        for name in ("include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")

    def _check_adjustments(self) -> None:
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        least, most = 1 / _LARGEST_PENALTY, _LARGEST_PENALTY
        if not least <= self.repetition_penalty <= most:
            raise ValueError(f"repetition_penalty must be in [{least}, {most}], got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}")
        num_biases = len(dict(self.logit_bias)) + (len(self.stop_token_ids) if self.min_tokens else 0)
        if num_biases > MAX_BIASES:
            raise ValueError(
                "logit_bias, and stop_token_ids where there are min_tokens, may name at most "
                f"{MAX_BIASES} tokens together, got {num_biases}"
            )
        if self.mask is not None and not callable(getattr(self.mask, "start", None)):
            raise TypeError(f"mask must have a method start, as a TokenMask has, got {self.mask!r}")

    @functools.cached_property
    def has_penalties(self) -> bool:
        """Whether tokens must be counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @functools.cached_property
    def is_adjusted(self) -> bool:
        """Whether logits are changed before a token is drawn, beyond temperature, top_k and top_p."""
        return bool(self.has_penalties or self.min_p or self.logit_bias or self.min_tokens or self.mask is not None)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")


def _read_biases(biases: Any) -> tuple[tuple[int, float], ...]:
    """Checks biases and gives them in order of their tokens, so that equal ones are equal."""
    pairs = biases.items() if isinstance(biases, collections.abc.Mapping) else biases
    try:
        pairs = [(token_id, bias) for token_id, bias in pairs]
    except (TypeError, ValueError):
        raise TypeError(f"logit_bias must give numbers by token ids, got {biases!r:.60}") from None
    pairs = [(_integer_in("a token of logit_bias", token_id, 0, 2**31 - 1), bias) for token_id, bias in pairs]
    for token_id, bias in pairs:
        _check_number(f"logit_bias of token {token_id}", bias)
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias must be in [-100, 100], got {bias} for token {token_id}")
    if len(dict(pairs)) < len(pairs):
        raise ValueError("logit_bias must name each token once")
    return tuple(sorted(pairs))


def _integer_in(name: str, value: Any, least: int, most: int) -> int:
    value = integer(name, value)
    if not least <= value <= most:
        raise ValueError(f"{name} must be in [{least}, {most}], got {value}")
    return value


def _read_seed(seed: Any) -> int | None:
    return None if seed is None else _integer_in("seed", seed, 0, 2**64 - 1)


def read_token_ids(prompt: collections.abc.Iterable[Any]) -> list[int]:
    """Gives the token ids of a prompt as Python's integers.

    Raises:
      TypeError: they are not integers.
      ValueError: one is negative, which would stand for another sequence's last token (batch.py), or too large.
    """
    try:
        token_ids = [operator.index(token_id) for token_id in prompt]
    except TypeError:
        raise TypeError(f"a prompt must hold token ids, got {prompt!r:.60}") from None
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < 2**31:
            raise ValueError(f"token ids must be in [0, {2**31 - 1}], got {token_id}")
    return token_ids


class Seeds:
    """Gives a seed to each request that has none.

    Args:
      seed: the same number gives the same seeds; None for others in every process, and after every restart.
    """

    def __init__(self, seed: int | None):
        seed = _read_seed(seed)
        self._is_fresh = seed is None
        self._key = b"" if seed is None else seed.to_bytes(8)
        self.restart()

    def restart(self) -> None:
        """Begins with the first request again."""
        if self._is_fresh:
            self._key = secrets.token_bytes(16)

    def give(self, params: SamplingParams, request_id: int) -> SamplingParams:
        """The parameters with a seed: their own, or else one that depends on the request's id."""
        if params.seed is not None:
            return params
        # A hash, so that no request gets a small number, which is what users choose.
        seed = hashlib.blake2b(request_id.to_bytes(8), key=self._key, digest_size=8).digest()
        return dataclasses.replace(params, seed=int.from_bytes(seed))


class Tokenizer(Protocol):
    """The one method that an engine needs of a tokenizer; `tokenizers.Tokenizer` has it.

    Where `SamplingParams.skip_special_tokens` is False it is called with the keyword `skip_special_tokens=False`. If it
    also has a method `token_to_id(text)`, special tokens can be stop texts.

    Example:
      >>> class Letters:
      ...     def decode(self, ids, skip_special_tokens=True):
      ...         return "".join(map(chr, ids))
      >>> Letters().decode([72, 105])
      'Hi'
    """

    def decode(self, ids: Any, /) -> str:
        """The text of token ids."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a drawn token, or of a prompt's, and the most likely tokens at its place.

    Attributes:
      token_id: the token.
      logprob: the natural logarithm of its probability.
      top: the most likely tokens in falling order, as (token id, log-probability).

    Example:
      >>> from paged_jax.engine import TokenLogprob
      >>> TokenLogprob(token_id=5, logprob=-0.25, top=((5, -0.25), (7, -1.5))).top[0][0]
      5
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):
    """The new tokens of one sample.

    Attributes:
      request_id: the id that `add_request` returned.
      index: the sample's index, from 0 to n - 1.
      token_ids: the new tokens; none if the sample's mask allows no first one.
      text: the new text; "" without a tokenizer. Text that may turn out to begin a stop text is held back.
      logprobs: one for each of `token_ids`, if the request asked for them.
      finish_reason: None while the sample goes on; "stop" after a stop token or text, or where its mask allows no
        token; "length" after max_tokens, or after as many tokens as fit; "error" where its mask has raised.
      stop_reason: the stop token or text that ended the sample, if one did; or what its mask raised, in words.
      num_cached_tokens: tokens of the prompt that were found in the prefix cache when the request began; 0 for all
        samples but the first, with which the others share the prompt.
      prompt_logprobs: one for each token of the prompt but its first, if the request asked for them, in the first
        `Delta` of the first sample.
      is_restarted: whether the sample began again (`update_weights`), so that all tokens given before are void.

    Example:
      >>> from paged_jax.engine import Delta
      >>> Delta(request_id=0, index=0, token_ids=(7,), finish_reason="length").finish_reason
      'length'
    """

    request_id: int
    index: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    is_restarted: bool = False


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished sample: all its `Delta`s put together.

    Attributes:
      token_ids: all tokens of the output.
      text: its text; "" without a tokenizer.
      logprobs: one for each of `token_ids`, if the request asked for them.
      finish_reason, stop_reason, prompt_logprobs: as in `Delta`.

    Example:
      >>> from paged_jax.engine import Completion, Delta
      >>> Completion.join([Delta(0, 0, (7,)), Delta(0, 0, (2,), finish_reason="stop")]).token_ids
      (7, 2)
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @staticmethod
    def join(deltas: list[Delta]) -> "Completion":
        """Puts all `Delta`s of a finished sample together; those before a restart are void."""
        deltas = deltas[max((i for i, delta in enumerate(deltas) if delta.is_restarted), default=0) :]
        last = deltas[-1]
        assert last.finish_reason is not None
        return Completion(
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            "".join(delta.text for delta in deltas),
            tuple(logprob for delta in deltas for logprob in delta.logprobs),
            last.finish_reason,
            last.stop_reason,
            deltas[0].prompt_logprobs,
        )
