"""Compiles a step of prompts for eight described H200s and says what its schedule puts beside the all-reduces.

    PYTHONPATH=. python halves_aot.py OUT_FOLDER VARIANT [MODEL] [LAYERS] [TP] [JSON of more XLA options]
"""
import dataclasses, importlib, json, os, sys, time
from pathlib import Path
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.getcwd())
import jax
from jax._src.lib import xla_client
from jax.experimental.topologies import TopologyDescription
from benchmarks import scale_steps
from examples import sharding
from examples.sharding import make_mesh, split_config
from tests import hopper_compiler

out, variant = Path(sys.argv[1]), sys.argv[2]
name, layers, tp = (sys.argv[3:6] + ["llama3-8b", "4", "8"][len(sys.argv) - 3:])[:3]
more = json.loads(sys.argv[6]) if len(sys.argv) > 6 else {}
layers, tp = int(layers), int(tp)
H200 = hopper_compiler._DEVICE.replace("84978434048", "150754820096").replace("3352320000000", "4800000000000").replace("H100 80GB HBM3", "H200")
library = Path(str(importlib.import_module(hopper_compiler._PLUGIN).__file__)).with_name("xla_cuda_plugin.so")
api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
xla_client.initialize_pjrt_plugin("cuda")
jax.devices("cpu")
import functools
from jax._src import ffi, xla_bridge
from jax_cuda13_plugin import cuda_plugin_extension
xla_client.register_custom_type_handler("CUDA", functools.partial(cuda_plugin_extension.register_custom_type, api))
xla_client.register_custom_call_handler("CUDA", functools.partial(cuda_plugin_extension.register_custom_call_target, api))
for _name, _value in cuda_plugin_extension.ffi_types().items():
    xla_client.register_custom_type(_name, _value, platform="CUDA")
for _name, _value in cuda_plugin_extension.ffi_handlers().items():
    xla_client.register_custom_call_target(_name, _value, platform="CUDA", api_version=1)
for callback in xla_bridge._plugin_callbacks:
    callback(c_api=api)
topology = xla_client.make_c_api_device_topology(api, "hopper", target_config=H200, topology=os.environ.get("TOPOLOGY", f"1x1x{tp}"))
devices = TopologyDescription(topology._make_compile_only_devices()).devices
print(len(devices), devices[0].device_kind, devices[0].platform)
mesh = make_mesh({"dp": 1, "tp": tp}, devices)
config = scale_steps.MODELS[name]
if os.environ.get("SP"):
    sys.path.insert(0, str(Path(__file__).parent)); import halves_sp; halves_sp.install(mesh)
config = split_config(dataclasses.replace(config, layers=config.layers[:layers]), mesh)
scale_steps.peer_sum = lambda *_: None
model = scale_steps.Model(config, mesh, 1024, variant, int(os.environ.get("PIECES", "1")), tuple(os.environ.get("BY", "").split()))
began = time.time()
real = jax.jit
if more:
    scale_steps.xla_options = (lambda real: lambda *a, **k: real(*a, **k) | more)(scale_steps.xla_options)
lowered = model.lower("prefill", 8)
print("lowered", time.time() - began)
compiled = lowered.compile()
print("compiled", time.time() - began)
out.mkdir(exist_ok=True)
(out / f"{variant}.hlo").write_text(compiled.as_text())
