"""One engine over the GPUs of several processes: every process takes the same steps from the same requests.

JAX runs a program over the devices of several processes only if all of them start it. An engine's scheduler decides by
its requests alone and never by a clock, so that engines that get the same calls launch the same programs. One process,
the leader, takes the requests and gives out the tokens. Before each step it sends the others, the followers, the calls
that it got since the last one, and they make the same calls.

    requests ──► LeadingEngine ──► step ──► tokens         process 0
                     │ a line of JSON a step, and one for each mask
                     └──► follow ──► Engine.step           processes 1, 2, ...

A step that fails in the leader often fails in the followers too. A follower that fails waits for the leader's next
`reset`, and reports its failure, so that the leader's next step fails as well. Programs on several GPUs run
collectives in the order in which they are started. A reset therefore compares how many programs each process has
started, and raises if the numbers differ: then only a restart of all processes helps.

Every process first calls `jax.distributed.initialize`, and makes its engine with the same arguments.
"""

import collections.abc
import dataclasses
import json
import logging
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Self, override

import numpy as np

from paged_jax.engine.base import RunningRequests
from paged_jax.engine.batch import StepShape
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.engine import Engine
from paged_jax.engine.mask import MaskState, SharedMask, TokenMask
from paged_jax.engine.request import Delta, SamplingParams

_RETRY_SECONDS = 0.1
_LOGGER = logging.getLogger("paged_jax")


class LeadingEngine(Engine):
    """The leader's engine. Once `wait_for_followers` has returned, it is used like any other `Engine`.

    Only `measure_steps` is refused then: the followers do not run the steps that it measures. If a follower is gone, or
    Ctrl-C ends the leader while it sends, the engine has failed for good, and so `reset` raises.

    Use it as a context manager, or call `close` at the end: the followers end then, too.
    """

    _followers: tuple["_Follower", ...] = ()
    _untold: tuple[dict[str, Any], ...] = ()
    _num_resets, _is_cut_off = 0, False

    def wait_for_followers(self, address: tuple[str, int], count: int, timeout_seconds: float = 600) -> None:
        """Waits until all followers have made their engines and called `follow`.

        Args:
          address: host and port to listen at. The first `count` connections are taken for followers and are sent all
            prompts, so listen on a private network only.
          count: how many followers there are.
          timeout_seconds: how long to wait for each, now and at each reset.

        Raises:
          OSError: a follower did not connect in time, or the address is in use.
          ValueError: the config has `between_tokens_seconds`.
        """
        self.check_config(self.config, count)
        with socket.create_server(address) as listener:
            listener.settimeout(timeout_seconds)
            self._followers = tuple(_Follower(listener.accept()[0], timeout_seconds) for _ in range(count))

    def close(self) -> None:
        """Closes the connections, which ends the followers' `follow`."""
        for follower in self._followers:
            follower.close()
        self._followers = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def check_config(self, config: EngineConfig | None, num_followers: int | None = None) -> EngineConfig:
        config = super().check_config(config)
        if config.between_tokens_seconds is not None and (num_followers or self._followers):
            raise ValueError("between_tokens_seconds needs an engine without followers: they would make other plans")
        return config

    @override
    def measure_steps(self, context_len: int, repeats: int = 8) -> dict[StepShape, float]:
        if self._followers:
            raise ValueError("steps cannot be measured while followers are connected: they do not run these steps")
        return super().measure_steps(context_len, repeats)

    @override
    def _add(self, tokens: list[int], params: SamplingParams, max_total: int) -> int:
        fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
        self._tell("add_request", tokens, fields | {"mask": params.mask is not None})
        if params.mask is not None and self._followers:
            params = dataclasses.replace(params, mask=_TellingMask(params.mask, self._send_line))
        return super()._add(tokens, params, max_total)

    @override
    def _cancel(self, request_id: int) -> bool:
        self._tell("cancel", request_id)
        return super()._cancel(request_id)

    @override
    def _reset(self, config: EngineConfig) -> None:
        if self._is_cut_off:
            raise ConnectionError("the followers are lost: restart all processes")
        self._num_resets += 1
        self._tell("reset", dataclasses.asdict(config), self._num_resets)
        self._send()
        super()._reset(config)
        for index, follower in enumerate(self._followers):
            report = {}
            while report.get("reset") != self._num_resets:  # the others are from before this reset
                report = self._receive(index, follower.timeout_seconds)
            if report["failure"]:
                raise RuntimeError(f"follower {index} has failed: {report['failure']}")
            if report["num_started"] != self._runner.num_started:
                self._cut_off()
                raise RuntimeError(
                    f"follower {index} has started {report['num_started']} programs and its leader "
                    f"{self._runner.num_started}, so that they wait for each other: restart all processes"
                )

    @override
    def _update_weights(self, weights: Any, running: RunningRequests) -> None:
        self._tell("update_weights", running)
        self._send()
        for index, follower in enumerate(self._followers):
            failure = self._receive(index, follower.timeout_seconds)["failure"]
            if failure:
                self._cut_off()
                raise RuntimeError(f"follower {index} has not taken other weights, restart all processes: {failure}")
        super()._update_weights(weights, running)

    @override
    def _step(self) -> list[Delta]:
        for index in range(len(self._followers)):
            if report := self._receive(index, 0):
                raise RuntimeError(f"follower {index} has failed: {report['failure']}")
        self._tell("step")
        self._send()
        return super()._step()

    def _send(self) -> None:
        """Sends the followers all calls that they were not told of yet."""
        untold, self._untold = self._untold, ()
        self._send_line(untold)

    def _send_line(self, content: Any) -> None:
        try:
            for follower in self._followers:
                follower.send(content)
        except BaseException:  # a part of the line may have been sent, after which followers cannot read another one
            self._cut_off()
            raise

    def _receive(self, index: int, timeout_seconds: float) -> dict[str, Any]:
        """A follower's next report; if none comes in time, an empty one where the time is 0, else an error."""
        try:
            report = self._followers[index].receive(timeout_seconds)
        except OSError as error:
            self._cut_off()
            raise ConnectionError(f"follower {index} is lost, restart all processes: {error}") from error
        return report

    def _cut_off(self) -> None:
        """Ends the followers, without which no step can run."""
        self._is_cut_off = True
        self.close()

    def _tell(self, name: str, *arguments: Any) -> None:
        if self._followers:
            self._untold = (*self._untold, {"call": name, "arguments": arguments})


class _Follower:
    """The leader's connection to a follower; both sides send lines of JSON."""

    def __init__(self, connection: socket.socket, timeout_seconds: float):
        self._connection, self._received, self.timeout_seconds = connection, b"", timeout_seconds
        connection.settimeout(timeout_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, content: Any) -> None:
        """Sends a line: calls, which the follower makes in their order, or what a mask allows."""
        self._connection.sendall(json.dumps(content).encode() + b"\n")

    def receive(self, timeout_seconds: float) -> dict[str, Any]:
        """Gives the follower's next report; an empty one if there is none yet and the time to wait is 0."""
        while b"\n" not in self._received:
            if not select.select([self._connection], [], [], timeout_seconds)[0]:
                if not timeout_seconds:
                    return {}
                raise TimeoutError(f"it has not answered for {timeout_seconds} s")
            if not (some := self._connection.recv(2**16)):
                raise ConnectionError("its process has ended")
            self._received += some
        line, self._received = self._received.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """Closes the connection, which ends the follower's `follow`."""
        self._connection.close()


class _TellingMask(SharedMask):
    """The leader's mask, which sends the allowed tokens to the followers."""

    def __init__(self, mask: TokenMask, send: Callable[[Any], None]):
        self._mask, self._send = mask, send

    @override
    def start(self) -> MaskState:
        return self._mask.start()

    @override
    def exchange(self, allowed: np.ndarray, error: str | None) -> tuple[np.ndarray, str | None]:
        self._send({"allowed": allowed.tobytes().hex(), "error": error})
        return allowed, error


class _ToldMask(SharedMask):
    """A follower's mask, which allows the tokens that its leader names. It stands for the masks of all requests."""

    def __init__(self, lines: "_Lines"):
        self._lines = lines

    @override
    def start(self) -> MaskState:
        return self

    def fill(self, allowed: np.ndarray, /) -> None:
        """Does nothing: `exchange` gives the tokens."""

    def advance(self, token_id: int, /) -> None:
        """Does nothing, as the leader's mask is told."""

    @override
    def exchange(self, allowed: np.ndarray, error: str | None) -> tuple[np.ndarray, str | None]:
        told = self._lines.take_mask()
        return np.frombuffer(bytes.fromhex(told["allowed"]), np.uint32), told["error"]


class _Lines:
    """The lines that a leader sends: lists of calls and, while a step runs, the tokens that masks allow."""

    def __init__(self, lines: collections.abc.Iterable[bytes]):
        self._lines, self._kept = iter(lines), None

    def __iter__(self) -> collections.abc.Iterator[list[dict[str, Any]]]:
        while (calls := self._kept or json.loads(next(self._lines, b"null"))) is not None:
            self._kept = None
            if isinstance(calls, list):  # the step has failed and needs no mask
                yield calls

    def take_mask(self) -> dict[str, Any]:
        """Returns the tokens that the next mask allows; raises if the leader goes on without its step."""
        content = json.loads(next(self._lines, b"null"))
        if not isinstance(content, dict):
            self._kept = content
            raise ConnectionError("the leader's step has failed")
        return content


def follow(
    engine: Engine,
    address: tuple[str, int],
    timeout_seconds: float = 600,
    *,
    get_weights: Callable[[], Any] | None = None,
) -> None:
    """Makes every call on this engine that the leader gets on its own, until the leader closes.

    A call that fails is logged and reported to the leader; the engine then waits for the leader's next reset.

    Args:
      engine: an engine with the same arguments as the leader's.
      address: host and port at which the leader waits for followers.
      timeout_seconds: how long to try to connect.
      get_weights: gives this process's part of the leader's new weights, each time the leader's `update_weights` is
        called; without it such an update fails, in the leader too.

    Raises:
      OSError: the leader cannot be reached, or has ended without `close`.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            leader = socket.create_connection(address, timeout=timeout_seconds)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
    leader.settimeout(None)  # a leader without requests may send nothing for days
    with leader, leader.makefile("rb") as received:
        lines = _Lines(received)
        for calls in lines:
            for told in calls:
                call, arguments = told["call"], told["arguments"]
                if call == "add_request":
                    arguments[1]["mask"] = _ToldMask(lines) if arguments[1]["mask"] else None
                report: dict[str, Any] = {"failure": _try(engine, call, arguments, get_weights)}
                if call == "reset":
                    report |= {"reset": arguments[1], "num_started": engine.num_started}
                if call in ("reset", "update_weights") or report["failure"]:
                    leader.sendall(json.dumps(report).encode() + b"\n")


def _try(engine: Engine, call: str, arguments: list[Any], get_weights: Callable[[], Any] | None) -> str | None:
    """Makes a call. If it fails, logs the error and returns it in words; later calls are skipped until a reset."""
    if engine.has_failed and call != "reset":
        return None
    try:
        _do(engine, call, arguments, get_weights)
    except Exception as error:
        _LOGGER.exception("the follower has failed, and waits for the leader to reset it")
        return f"{call} raised {type(error).__name__}: {error}"
    return None


def _do(engine: Engine, call: str, arguments: list[Any], get_weights: Callable[[], Any] | None) -> None:
    match call:
        case "add_request":
            engine.add_request(arguments[0], SamplingParams(**arguments[1]))
        case "cancel":
            engine.cancel(arguments[0])
        case "update_weights":
            if get_weights is None:
                raise ValueError("the leader has new weights, and follow() was given no get_weights")
            engine.update_weights(get_weights(), running=arguments[0])
        case "reset":
            engine.reset(EngineConfig(**arguments[0]))
        case "step":
            engine.step()
