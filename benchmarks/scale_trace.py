"""Shows where the time of steps over several GPUs goes, from the start and end of every kernel on every GPU, by CUPTI.

Each GPU has a clock of its own, but all GPUs end an all-reduce at almost the same time. So a GPU's times are shifted by
the median difference between the ends of all-reduces on this GPU and on the first one.
"""

import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

_PAUSE = 1.0  # more than this many us between two kernels count as a pause


class Event(NamedTuple):
    """A kernel or a copy on a GPU; microseconds."""

    name: str
    start: float
    end: float


def read_trace(folder: str) -> tuple[list[list[Event]], dict[str, int]]:
    """Reads the events of each GPU in order of time, and counts the host's calls of the driver by name."""
    (path,) = Path(folder).rglob("*.xplane.pb")
    gpus, calls = [], Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        is_gpu = plane.name.startswith("/device:GPU")
        events = []
        for line in plane.lines:
            if is_gpu and line.name.startswith("Stream"):
                events += [Event(e.name, e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3) for e in line.events]
            elif not is_gpu:
                calls.update(e.name.split(" ")[0] for e in line.events if re.match("cu[A-Z]", e.name))
        if events:
            gpus.append(sorted(events, key=lambda event: event.start))
    return gpus, dict(calls)


def is_all_reduce(name: str) -> bool:
    """Whether a kernel exchanges sums with other GPUs: XLA's, NCCL's or ours."""
    return re.search(r"all_reduce|psum|AllReduce", name) is not None


def summary(gpus: Sequence[Sequence[Event]], num_steps: int) -> dict[str, Any]:
    """Describes a step by the events of `num_steps` steps in a row, without the first one.

    Args:
        gpus: the events of each GPU in order of time.
        num_steps: how many steps they are.

    Returns:
        Fields of a row; times are microseconds. For a step, on average over GPUs and steps: the time from begin to end,
        the time of its kernels, the time without a kernel, and the numbers of kernels, of pauses and of all-reduces.
        For an all-reduce: its time, a GPU's wait until the last GPU begins it, the time from then to its end, the time
        from the first GPU's begin to the last one's, and the pauses before and after it.
    """
    gpus = [events[len(events) // num_steps :] for events in gpus]  # without the first step
    steps = num_steps - 1
    reduces = [[i for i, event in enumerate(events) if is_all_reduce(event.name)] for events in gpus]
    count = min(map(len, reduces))
    answer: dict[str, Any] = {
        "traced_us": statistics.mean(events[-1].end - events[0].start for events in gpus) / steps,
        "kernels_us": statistics.mean(sum(e.end - e.start for e in events) for events in gpus) / steps,
        "num_kernels": statistics.mean(map(len, gpus)) / steps,
        "pauses_us": statistics.mean(sum(pauses(events)) for events in gpus) / steps,
        "num_pauses": statistics.mean(sum(p > _PAUSE for p in pauses(events)) for events in gpus) / steps,
        "num_all_reduces": count / steps,
    }
    if count == 0:
        return answer
    starts, ends = (
        np.array([[getattr(events[i], edge) for i in at[-count:]] for events, at in zip(gpus, reduces, strict=True)])
        for edge in ("start", "end")
    )
    late = np.median(ends - ends[:1], axis=1, keepdims=True)  # how late each GPU's clock is
    starts, ends = starts - late, ends - late
    last = starts.max(axis=0)
    waits = {
        "waits_us": float((last - starts).mean()),
        "moves_us": float((ends - last).mean()),
        "skew_us": float(np.median(last - starts.min(axis=0))),
    }
    before = [e[i].start - e[i - 1].end for e, at in zip(gpus, reduces, strict=True) for i in at if i]
    after = [e[i + 1].start - e[i].end for e, at in zip(gpus, reduces, strict=True) for i in at if i + 1 < len(e)]
    return answer | {
        "all_reduce_us": float((ends - starts).mean()),
        **(waits if len(gpus) > 1 else {}),
        "pause_before_us": statistics.median(before),
        "pause_after_us": statistics.median(after),
    }


def pauses(events: Sequence[Event]) -> list[float]:
    """The lengths of the times between events in which no event runs."""
    found, end = [], events[0].end
    for event in events[1:]:
        if event.start > end:
            found.append(event.start - end)
        end = max(end, event.end)
    return found


def by_name(events: Sequence[Event], num_steps: int, most: int = 16) -> list[tuple[str, float, float]]:
    """The kernels that take most of a step: name, how often in a step, and microseconds in a step."""
    total: dict[str, list[float]] = {}
    for event in events[len(events) // num_steps :]:
        name = re.sub(r"^(all_reduce|psum)_[\d_]*", r"\1_", event.name)[:120]  # XLA numbers these kernels
        total.setdefault(name, []).append(event.end - event.start)
    longest = sorted(total.items(), key=lambda item: -sum(item[1]))[:most]
    return [(name, len(us) / (num_steps - 1), sum(us) / (num_steps - 1)) for name, us in longest]


def trace(run: Callable[[], Any], num_steps: int) -> dict[str, Any]:
    """Traces `run`, which calls `num_steps` steps. Returns `summary`, the host's calls of CUDA and the kernels.

    Of several processes the first one traces its own GPU, and the others merely run the steps.
    """
    if jax.process_index():
        jax.block_until_ready(run())
        return {}
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        gpus, calls = read_trace(folder)
    if not gpus:
        return {"trace_failed": "no GPU in the trace"}
    calls = {name: count / num_steps / len(gpus) for name, count in calls.items()}
    return summary(gpus, num_steps) | {"calls": calls, "kernels": by_name(gpus[0], num_steps)}
