"""How do I use several GPUs?

Split what one request needs (tensor parallelism): put weights and caches on a mesh, kv heads over one of its axes. The
ops work on the heads that lie on each GPU, and XLA exchanges what the rest of the model needs. Then make copies of that
(data parallelism): an engine on GPUs of its own for each copy, and `Replicas`, which shares out the requests.

    python -m examples.howto.several_gpus
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.howto.continuous_batching import HEAD_SIZE, KV_HEADS, VOCAB, make_weights, step
from paged_jax import PagedKVCache
from paged_jax.engine import Engine, EngineConfig, Replicas, SamplingParams

SPLIT = {"query": PartitionSpec(None, "tp"), "key": PartitionSpec(None, "tp"), "value": PartitionSpec(None, "tp")}


def make_engine(devices):
    """An engine whose heads are split over some devices."""
    mesh = Mesh(np.array(devices), ("tp",), axis_types=(AxisType.Auto,))
    weights = {
        name: jax.device_put(array, NamedSharding(mesh, SPLIT.get(name, PartitionSpec())))
        for name, array in make_weights().items()
    }
    cache = PagedKVCache.create(32, 8, KV_HEADS, HEAD_SIZE, dtype=jnp.float32)  # 32 blocks of 8 tokens
    specs = cache.partition_spec("tp")
    cache = jax.tree.map(lambda pool, spec: jax.device_put(pool, NamedSharding(mesh, spec)), cache, specs)
    config = EngineConfig(
        max_model_len=128,
        max_num_seqs=4,
        max_tokens_per_step=16,
        decode_rows=(4,),  # two sizes of steps are compiled; without these two lines there are more
        mixed_tokens=(16,),
        adjustments=False,
    )
    return Engine(step, weights, (cache,), config)


def main():
    devices = jax.devices()[:4]
    split = 2 if len(devices) > 1 else 1
    engines = [make_engine(devices[i : i + split]) for i in range(0, len(devices), split)]
    print(f"{len(engines)} copies of the model, each on {split} of {len(devices)} devices")

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (5, 40, 17, 3, 28)]
    wanted = SamplingParams(max_tokens=12)
    together = Replicas(engines).generate(prompts, wanted)
    alone = make_engine(devices[:1]).generate(prompts, wanted)
    print("the same tokens as on one device:", together == alone)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # on a machine without a GPU the CPU stands for four devices
    main()
