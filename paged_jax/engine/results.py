"""Turns drawn tokens into results: extends a sequence's text, finishes it, and makes the engine's `Delta`s."""

import collections.abc

from paged_jax.engine.mask import MaskedSample
from paged_jax.engine.plan import Samples
from paged_jax.engine.request import Delta, Tokenizer, TokenLogprob
from paged_jax.engine.sampling import Drawn
from paged_jax.engine.sequence import Sequence
from paged_jax.engine.text import TextStream


def equip(sequence: Sequence, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Gives a sequence without output its text stream and its mask.

    Args:
      sequence: the sequence.
      tokenizer: turns tokens into text; None for no text.
      vocab_size: how many tokens the model has.
    """
    params = sequence.params
    if tokenizer is not None:
        sequence.text = TextStream(
            tokenizer,
            sequence.tokens,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
        )
    if params.mask is not None:
        sequence.mask = MaskedSample(params.mask, vocab_size)


def take_all(
    samples: Samples, accepted: collections.abc.Iterable[int], token_ids: list[int], drawn: Drawn
) -> tuple[list[Delta], list[Sequence]]:
    """Appends a step's drawn tokens to their sequences, without those that come after a sequence's end.

    Args:
      samples: whose tokens they are.
      accepted: which of them count.
      token_ids: the tokens.
      drawn: what the step drew.

    Returns:
      A `Delta` for each token, and the sequences that have ended.
    """
    deltas, ended, are_plain, new = [], [], samples.are_plain.tolist(), tuple.__new__
    for i in accepted:
        sequence, token_id = samples.sequences[i], token_ids[i]
        if sequence.finish_reason is not None:
            continue
        if are_plain[i]:  # most tokens: what `take` would do, in a third of the time
            sequence.tokens.append(token_id)
            found = sequence.num_found or 0
            told = sequence.request_id, sequence.index, (token_id,), "", (), None, None, found, (), False
            deltas.append(new(Delta, told))
            continue
        deltas.append(take(sequence, token_id, drawn, i))
        if sequence.finish_reason is not None:
            ended.append(sequence)
    return deltas, ended


def take(sequence: Sequence, token_id: int, drawn: Drawn, i: int) -> Delta:
    """Appends a drawn token to its sequence and, if it is the last one, sets the sequence's `finish_reason`.

    Args:
      sequence: the sequence, which is unfinished.
      token_id: the token.
      drawn: what the step drew.
      i: the token's place in it.

    Returns:
      The token, its log-probability and its text.
    """
    if sequence.mask is not None and sequence.mask.has_ended:  # the mask allows no first token
        return _end_masked(sequence, (), "", ())
    params = sequence.params
    sequence.tokens.append(token_id)
    logprobs = () if params.logprobs is None else (logprob_of(token_id, drawn, i, params.logprobs),)
    stop_reason: int | str | None = token_id if token_id in params.stop_token_ids else None
    text = ""
    if sequence.text is not None and (stop_reason is None or params.include_stop):
        text = sequence.text.push(token_id)
        stop_reason = sequence.text.stopped_by if stop_reason is None else stop_reason
    is_full = len(sequence.tokens) >= sequence.max_total
    if stop_reason is not None or is_full:
        if sequence.text is not None:
            text += sequence.text.flush()
            stop_reason = sequence.text.stopped_by if stop_reason is None else stop_reason
        sequence.finish_reason = "stop" if stop_reason is not None else "length"
    elif sequence.mask is not None:
        sequence.mask.advance(token_id)
        if sequence.mask.has_ended:
            return _end_masked(sequence, (token_id,), text, logprobs)
    return _delta(sequence, (token_id,), text, logprobs, stop_reason)


def logprob_of(token_id: int, drawn: Drawn, i: int, num_top: int) -> TokenLogprob:
    """The log-probability of a step's i-th drawn token, and the most likely tokens at the same position."""
    assert drawn.logprobs is not None and drawn.top_ids is not None and drawn.top_logprobs is not None  # noqa: PT018
    top = zip(drawn.top_ids[i, :num_top].tolist(), drawn.top_logprobs[i, :num_top].tolist(), strict=True)
    return TokenLogprob(token_id, float(drawn.logprobs[i]), tuple(top))


def _end_masked(sequence: Sequence, token_ids: tuple[int, ...], text: str, logprobs: tuple[TokenLogprob, ...]) -> Delta:
    """Finishes a sequence whose mask has failed or allows no further token."""
    stop_reason = None
    if sequence.text is not None:
        text += sequence.text.flush()
        stop_reason = sequence.text.stopped_by
    error = sequence.mask.error
    sequence.finish_reason = "stop" if error is None else "error"
    return _delta(sequence, token_ids, text, logprobs, stop_reason if error is None else error)


def _delta(
    sequence: Sequence,
    token_ids: tuple[int, ...],
    text: str,
    logprobs: tuple[TokenLogprob, ...],
    stop_reason: int | str | None,
) -> Delta:
    """Makes a `Delta` of new tokens and of the prompt's log-probabilities that are new since the last one."""
    prompt_logprobs = ()
    if sequence.scored:
        prompt_logprobs = tuple(sequence.scored[position] for position in sorted(sequence.scored))
        sequence.scored = {}
    is_restarted, sequence.is_restarted = sequence.is_restarted, False
    return Delta(
        sequence.request_id,
        sequence.index,
        token_ids,
        text,
        logprobs,
        sequence.finish_reason,
        stop_reason,
        sequence.num_found or 0,
        prompt_logprobs,
        is_restarted,
    )
