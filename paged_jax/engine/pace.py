"""Holds the time between two tokens, by bounding how many tokens of prompts a step computes beside running sequences.

How long a step takes depends on its compiled size, and also on contexts and on other work of the machine. So the pace
looks at the steps themselves. Each one that is fast enough earns credit, and a slow one costs as much as 150 fast ones
earn, so that fewer than one in a hundred are slow, unless even the smallest steps are. A size that is slow again and
again is given up. A larger size is tried where there is credit to pay for the slow steps of the trial.
"""

import bisect
import time

from paged_jax.engine.config import EngineConfig
from paged_jax.engine.plan import Plan

_PRICE = 150  # fast steps that pay for a slow one
_MOST_CREDIT, _MOST_DEBT = 2 * _PRICE, 4 * _PRICE


class Pace:
    """Chooses the most tokens of steps that compute prompts beside running sequences.

    Args:
      config: the engine's config. Without `between_tokens_seconds` the choice is `max_tokens_beside_decodes`; with it
        the pace begins there.
    """

    def __init__(self, config: EngineConfig):
        self._sizes, self._first = config.mixed_tokens, config.max_tokens_beside_decodes
        self._target = config.between_tokens_seconds
        most = self._sizes[-1] if self._first is None else self._first
        self._level = max(bisect.bisect_right(self._sizes, most) - 1, 0)
        self._credit = self._trust = 0  # in general, and in the present size
        self._read_at = 0.0

    @property
    def most_tokens(self) -> int | None:
        """How many tokens the next step may have, if it draws tokens of running sequences; None for any number."""
        return self._first if self._target is None else self._sizes[self._level]

    def read(self, plan: Plan) -> None:
        """Notes that a step's tokens have come. All steps are told, in their order."""
        if self._target is None:
            return
        before, self._read_at = self._read_at, time.perf_counter()
        if plan.rows.are_drawn.any():  # a sequence got a token in the previous step, too
            is_mixed = not plan.is_decode and not plan.has_drafts
            self._note(int(plan.rows.counts.sum()) if is_mixed else 0, self._read_at - before <= self._target)

    def _note(self, num_tokens: int, is_fast: bool) -> None:
        """Takes in a time between two tokens, and how many tokens the step had; 0 if it computed no prompts."""
        earned = 1 if is_fast else -_PRICE
        self._credit = max(min(self._credit + earned, _MOST_CREDIT), -_MOST_DEBT)
        level = bisect.bisect_left(self._sizes, num_tokens)
        if is_fast or (num_tokens and level <= self._level):  # a larger step was planned before the size was given up
            self._trust = min(self._trust + earned, _PRICE)
        if self._trust < -_PRICE:
            self._level, self._trust = max(level - 1, 0), 0
        elif self._credit == _MOST_CREDIT and self._level < len(self._sizes) - 1:
            self._level, self._trust, self._credit = self._level + 1, 0, _MOST_CREDIT - _PRICE
