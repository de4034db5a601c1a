"""One engine over the GPUs of several processes: every process takes the same steps from the same requests.

JAX runs a program over the devices of several processes only if all of them start it. An engine's scheduler decides by
its requests alone and never by a clock, so that engines that get the same calls launch the same programs. One process,
the leader, takes the requests and gives out the tokens. Before each step it sends the others, the followers, the calls
that it got since the last one, and they make the same calls.

    requests ──► LeadingEngine ──► step ──► tokens         process 0
                     │ a line of JSON a step
                     └──► follow ──► Engine.step           processes 1, 2, ...

Every process first calls `jax.distributed.initialize`, and makes its engine with the same arguments.
"""

import dataclasses
import json
import socket
import time
from typing import Any, Self

from paged_jax.engine.config import EngineConfig
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Delta, SamplingParams, read_token_ids

_RETRY_SECONDS = 0.1


class LeadingEngine(Engine):
    """The leader's engine. Once `wait_for_followers` has returned, it is used like any other `Engine`.

    Only `measure_steps` cannot be used then: the followers do not run the steps that it measures.

    Use it as a context manager, or call `close` at the end: the followers end then, too.
    """

    _followers: tuple[socket.socket, ...] = ()
    _untold: tuple[dict[str, Any], ...] = ()

    def wait_for_followers(self, address: tuple[str, int], count: int, timeout_seconds: float = 600) -> None:
        """Waits until all followers have made their engines and called `follow`.

        Args:
          address: host and port to listen at. The first `count` connections are taken for followers and are sent all
            prompts, so listen on a private network only.
          count: how many followers there are.
          timeout_seconds: how long to wait for each.

        Raises:
          OSError: a follower did not connect in time, or the address is in use.
        """
        with socket.create_server(address) as listener:
            listener.settimeout(timeout_seconds)
            self._followers = tuple(listener.accept()[0] for _ in range(count))
        for follower in self._followers:
            follower.settimeout(timeout_seconds)
            follower.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Closes the connections, which ends the followers' `follow`."""
        for follower in self._followers:
            follower.close()
        self._followers = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_request(self, prompt: Any, params: SamplingParams = SamplingParams()) -> int:  # noqa: B008 (immutable)
        """Does what `Engine.add_request` does; the followers do it before the next step."""
        self.check(prompt, params)  # a request that is refused is not sent to the followers
        self._tell("add_request", read_token_ids(prompt), dataclasses.asdict(params))
        return super().add_request(prompt, params)

    def cancel(self, request_id: int) -> bool:
        """Does what `Engine.cancel` does; the followers do it before the next step."""
        self._tell("cancel", request_id)
        return super().cancel(request_id)

    def reset(self, config: EngineConfig | None = None) -> None:
        """Does what `Engine.reset` does; the followers do it before the next step."""
        self._checked(config)  # a config that is refused is not sent to the followers
        self._tell("reset", None if config is None else dataclasses.asdict(config))
        super().reset(config)

    def step(self) -> list[Delta]:
        """Does what `Engine.step` does, at the same time as the followers."""
        self._tell("step")
        line, self._untold = json.dumps(self._untold).encode() + b"\n", ()
        for follower in self._followers:
            follower.sendall(line)
        return super().step()

    def _tell(self, name: str, *arguments: Any) -> None:
        if self._followers:
            self._untold = (*self._untold, {"call": name, "arguments": arguments})


def follow(engine: Engine, address: tuple[str, int], timeout_seconds: float = 600) -> None:
    """Makes every call on this engine that the leader gets on its own, until the leader closes.

    Args:
      engine: an engine with the same arguments as the leader's.
      address: host and port at which the leader waits for followers.
      timeout_seconds: how long to try to connect.

    Raises:
      OSError: the leader cannot be reached.
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
    with leader, leader.makefile("rb") as lines:
        for line in lines:
            for told in json.loads(line):
                _do(engine, told["call"], told["arguments"])


def _do(engine: Engine, call: str, arguments: list[Any]) -> None:
    match call:
        case "add_request":
            engine.add_request(arguments[0], SamplingParams(**arguments[1]))
        case "cancel":
            engine.cancel(arguments[0])
        case "reset":
            engine.reset(None if arguments[0] is None else EngineConfig(**arguments[0]))
        case "step":
            engine.step()
