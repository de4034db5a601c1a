"""What every engine offers, however many copies of a model it has: requests go in, steps are run, tokens come out."""

import abc
import collections.abc
import contextlib
from typing import Any, Literal

from paged_jax.engine.config import EngineConfig
from paged_jax.engine.request import Completion, Delta, SamplingParams
from paged_jax.engine.stats import Stats

type RunningRequests = Literal["continue", "restart"]


class EngineFailed(RuntimeError):
    """Raised by an engine that a call has left in an unknown state, until `reset`. Its requests are lost.

    Example:
      >>> from paged_jax.engine import EngineFailed
      >>> issubclass(EngineFailed, RuntimeError)
      True
    """


class BaseEngine(abc.ABC):
    """The interface of `Engine` and `Replicas`. One thread at a time may call an engine.

    A call that raises anything but the refusal of its arguments, Ctrl-C included, may leave the engine half changed:
    tokens lost, or blocks that no step has filled in the prefix cache. The engine has then failed. It refuses all calls
    that would read or change its requests with `EngineFailed`, until `reset`.

    Example:
      >>> from paged_jax.engine import BaseEngine, Engine, Replicas
      >>> issubclass(Engine, BaseEngine), issubclass(Replicas, BaseEngine)
      (True, True)
    """

    _failure: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the engine refuses its calls until `reset`."""
        return self._failure is not None

    @property
    @abc.abstractmethod
    def max_num_seqs(self) -> int:
        """How many sequences can run at the same time."""

    @property
    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether any request is unfinished."""

    @abc.abstractmethod
    def reset(self, config: EngineConfig | None = None) -> None:
        """Drops all requests, the prefix cache and the statistics; compiles nothing.

        After a step that failed, for want of memory for example, it also makes the engine usable again. A reset that
        raises leaves the engine failed, and may be tried again.

        Args:
          config: new policies, or None to keep the present ones.

        Raises:
          ValueError: the config differs in a field that decides what is compiled.
        """

    @abc.abstractmethod
    def update_weights(self, weights: Any, *, running: RunningRequests = "continue") -> None:
        """Makes all further steps use other weights, which it does not copy; it compiles nothing.

        Nothing that the old weights computed is used again: the prefix cache is emptied, and the keys and values of
        running requests are computed anew. A step that was launched before still gives the tokens that it drew, with
        the log-probabilities of the weights that drew them. The caller must not donate the new weights to a program
        while the engine uses them, until the next update; the old ones are the caller's again.

        Args:
          weights: arrays in the same tree, with the same shapes, dtypes and shardings; `Replicas` take a list, one for
            each of their engines.
          running: "continue" keeps the tokens of unfinished requests, and the new weights draw the next ones; "restart"
            drops these tokens, and the new weights draw all tokens of these requests. See `Delta.is_restarted`.

        Raises:
          ValueError: a leaf differs in more than its values, and its path; nothing has changed then.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from paged_jax import PagedKVCache
          >>> from paged_jax.engine import Engine, EngineConfig, SamplingParams
          >>> def step(weights, caches, batch):
          ...     return jax.nn.one_hot(batch.token_ids[batch.logit_rows] + weights["by"], 16), caches
          >>> caches = (PagedKVCache.create(num_blocks=8, block_size=4, num_kv_heads=1, head_size=8),)
          >>> config = EngineConfig(max_model_len=16, max_num_seqs=2, max_tokens_per_step=8)
          >>> engine = Engine(step, {"by": jnp.int32(1)}, caches, config)
          >>> engine.update_weights({"by": jnp.int32(3)})
          >>> engine.generate([[1]], SamplingParams(max_tokens=4))[0][0].token_ids
          (4, 7, 10, 13)
        """

    @abc.abstractmethod
    def check(self, prompt: collections.abc.Sequence[int], params: SamplingParams) -> int:
        """Raises if a request can never be served. Unlike all other methods, any thread may call this one.

        Args:
          prompt, params: see `add_request`.

        Returns:
          The largest number of tokens that each sample can have, the prompt's included.

        Raises:
          ValueError, TypeError: the request can never be served, and why.
        """

    @abc.abstractmethod
    def add_request(
        self,
        prompt: collections.abc.Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 (immutable)
    ) -> int:
        """Adds a request, which waits until there is room for it.

        Args:
          prompt: token ids, at least one. The engine does not know how many the model has: that is for the caller to
            check.
          params: how many tokens are wanted, and how they are drawn.

        Returns:
          The request's id: its number in order of arrival.

        Raises:
          ValueError, TypeError: the request can never be served, and why.
        """

    @abc.abstractmethod
    def step(self) -> list[Delta]:
        """Runs the requests on by a step.

        Returns:
          A `Delta` for each sample that has a new token.

        Raises:
          EngineFailed: an earlier call has failed. Whatever else a step raises makes the engine fail.
        """

    @abc.abstractmethod
    def is_unfinished(self, request_id: int) -> bool:
        """Whether a request will still give tokens."""

    @abc.abstractmethod
    def cancel(self, request_id: int) -> bool:
        """Drops a request and frees its blocks; no `Delta` of it will follow.

        Args:
          request_id: the id that `add_request` returned.

        Returns:
          Whether there was such an unfinished request.
        """

    @abc.abstractmethod
    def stats(self) -> Stats:
        """The engine's statistics."""

    def stream(
        self,
        prompt: collections.abc.Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008
    ) -> collections.abc.Iterator[Delta]:
        """Adds a request and runs the engine until it is finished.

        The request is added, or refused, when the first `Delta` is asked for. Other requests advance meanwhile, but
        their `Delta`s are lost.

        Args:
          prompt, params: see `add_request`.

        Yields:
          The request's `Delta`s. Leaving the loop early cancels the request.

        Raises:
          ValueError, TypeError: the request can never be served, and why.
        """
        request_id = self.add_request(prompt, params)
        try:
            while self.is_unfinished(request_id):
                yield from (delta for delta in self.step() if delta.request_id == request_id)
        finally:
            self._drop([request_id])

    def generate(
        self,
        prompts: collections.abc.Iterable[collections.abc.Sequence[int]],
        params: SamplingParams | collections.abc.Iterable[SamplingParams] = SamplingParams(),  # noqa: B008
    ) -> list[list[Completion]]:
        """Runs a batch of requests until all of them are finished.

        Other requests advance meanwhile, but their `Delta`s are lost.

        Args:
          prompts: the token ids of each prompt.
          params: one `SamplingParams` for all prompts, or one for each.

        Returns:
          For each prompt its `n` completions.

        Raises:
          ValueError, TypeError: one of the requests can never be served; then none of them is added.
          EngineFailed: an earlier call has failed. Whatever else is raised, Ctrl-C included, ends these requests.
        """
        prompts = [list(prompt) for prompt in prompts]
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        for prompt, wanted in zip(prompts, params, strict=True):
            self.check(prompt, wanted)
        ids: list[int] = []
        news: dict[tuple[int, int], list[Delta]] = {}
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                ids.append(self.add_request(prompt, wanted))
            while any(self.is_unfinished(request_id) for request_id in ids):
                for delta in self.step():
                    news.setdefault((delta.request_id, delta.index), []).append(delta)
        finally:
            self._drop(ids)
        return [
            [Completion.join(news[request_id, index]) for index in range(wanted.n)]
            for request_id, wanted in zip(ids, params, strict=True)
        ]

    def _drop(self, request_ids: list[int]) -> None:
        """Cancels those of these requests that are unfinished; an engine that failed has lost them already."""
        for request_id in request_ids:
            if not self.has_failed and self.is_unfinished(request_id):
                self.cancel(request_id)

    @contextlib.contextmanager
    def _changing(self, call: str) -> collections.abc.Iterator[None]:
        """Refuses a call on an engine that has failed; any error inside the context makes the engine fail.

        Args:
          call: the name of the call; only "reset" is made on an engine that has failed.
        """
        if call != "reset":
            self._check_alive()
        # Until the call succeeds, the engine counts as failed: Ctrl-C may come between any two lines.
        self._failure = f"{call} did not end"
        try:
            yield
        except BaseException as error:
            self._failure = f"{call} raised {type(error).__name__}: {error}"
            raise
        self._failure = None

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(
                f"the engine has failed and needs a reset() before it can be used again: {self._failure}"
            )
