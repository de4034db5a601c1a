"""Weights of the tiny models in tests/data, drawn from a tensor's name: the same here and beside transformers."""

import zlib

import numpy as np


def draw_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draws a tensor: norms around 1, biases around 0, matrices above their usual size so that tokens vary.

    Only the raw bits of NumPy's generator are used, which are the same in all its versions.

    Args:
        name: the tensor's name in a model folder.
        shape: its shape there.
        seed: the model's seed.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])).random_raw(int(np.prod(shape)))
    noise = ((bits >> 40) * 2.0**-24 * 2 - 1) * 3**0.5  # uniform, with mean 0 and variance 1
    noise = noise.astype(np.float32).reshape(shape)
    if "norm" in name and name.endswith("weight"):
        return 1 + np.float32(0.3) * noise
    if name.endswith("sinks"):
        return noise
    if name.endswith("bias"):
        return np.float32(0.3) * noise
    if "embed" in name:
        return noise if "embed_positions" in name else np.float32(0.25) * noise
    fan_in = shape[-2] if len(shape) == 3 else shape[-1]  # a tensor of all experts is [experts, in, out]
    gain = 1.0 if name.endswith(("lm_head.weight", "project_out.weight")) else 2.5
    return noise * np.float32(gain / fan_in**0.5)


def draw_tensors(shapes: dict[str, list[int]], seed: int) -> dict[str, np.ndarray]:
    """Draws all tensors of a model."""
    return {name: draw_tensor(name, tuple(shape), seed) for name, shape in shapes.items()}
