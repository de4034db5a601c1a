"""Folders whose experts are in MXFP4, as gpt-oss has them on the hub, beside the same numbers in float32."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from examples.checkpoint import CheckpointError, load_model
from tests.model_folders import folder, reference
from tests.model_weights import draw_tensors

HIDDEN, WIDTH, EXPERTS = 32, 64, 4


def widened(blocks, scales):
    """The matrices `[num_experts, in, out]`, number by number."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    out = np.zeros((*scales.shape, 32), np.float32)
    for place in np.ndindex(*scales.shape):
        for i, byte in enumerate(blocks[place].tolist()):
            for j, bits in enumerate((byte % 16, byte // 16)):
                sign = -1 if bits >= 8 else 1
                out[(*place, 2 * i + j)] = sign * magnitudes[bits % 8] * 2.0 ** (int(scales[place]) - 127)
    return out.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def make_folders(tmp_path):
    """A folder with experts in MXFP4 and one with the same in float32."""
    found, rng = reference("gpt_oss"), np.random.default_rng(0)
    config = found.config | {"intermediate_size": WIDTH}
    wide = draw_tensors({name: shape for name, shape in found.tensors.items() if "experts" not in name}, found.seed)
    narrow = dict(wide)
    for layer in range(config["num_hidden_layers"]):
        sizes = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
        for name, (num_out, num_in) in sizes.items():
            name = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = rng.integers(0, 256, (EXPERTS, num_out, num_in // 32, 16), np.uint8)
            scales = rng.integers(118, 126, blocks.shape[:3], np.uint8)
            narrow |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wide[name] = np.ascontiguousarray(widened(blocks, scales))
            bias = rng.standard_normal((EXPERTS, num_out), np.float32)
            narrow[f"{name}_bias"] = wide[f"{name}_bias"] = bias
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    for name, tensors, more in (("narrow", narrow, quantized), ("wide", wide, {})):
        shutil.copytree(folder("gpt_oss"), tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, tmp_path / name / "model.safetensors")
    return tmp_path / "narrow", tmp_path / "wide"


def test_mxfp4_is_widened(tmp_path):
    narrow, wide = (load_model(path, jnp.float32)[0] for path in make_folders(tmp_path))
    for (path, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(model)) for model in (narrow, wide)), strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))


def test_other_families_refuse_mxfp4(tmp_path):
    path = tmp_path / "mixtral"
    shutil.copytree(folder("mixtral"), path)
    config = reference("mixtral").config | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantized weights \(mxfp4\) are not supported"):
        load_model(path, jnp.float32)
