"""The clock of PyTorch's models (torch_model.py, torch_hub_model.py), and the CUDA graphs that it runs."""

import time
from collections.abc import Callable
from typing import Any


def captured(device: str, step: Callable[[], None]) -> Callable[[], Any]:
    """Runs a step a few times, captures it in a CUDA graph, and returns the graph's replay; on a CPU, the step."""
    import torch

    if device != "cuda":
        step()
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def best_seconds(device: str, reset: Callable[[], Any], run: Callable[[], Any], repeats: int) -> float:
    """The best of three measurements of the seconds of one run; each measures `repeats` runs after `reset`."""
    import torch

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(3):
        reset()
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)
