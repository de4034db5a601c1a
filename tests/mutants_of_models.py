"""The bugs that `tests.mutants` makes on purpose in the examples' models, checkpoints and loop."""

from tests.mutants_made import Mutant

MUTANTS_OF_MODELS = [
    Mutant(
        "experts: the first of equal scores is not the best one",
        "examples/moe.py",
        "(ids[None, :] < ids[:, None])",
        "(ids[None, :] > ids[:, None])",
        "tests/test_moe.py -k largest",
    ),
    Mutant(
        "experts: two pairs share a row",
        "examples/expert_kernel.py",
        "(order[:, None] > order[None, :])",
        "(order[:, None] > order[None, :] + 1)",
        "tests/test_expert_kernel.py -k each_pair",
    ),
    Mutant(
        "experts: a tile too few",
        "examples/expert_kernel.py",
        "min(num_pairs, num_experts) * (size - 1)",
        "min(num_pairs, num_experts - 1) * (size - 1)",
        "tests/test_expert_kernel.py -k largest",
    ),
    Mutant(
        "experts: up is multiplied by the gate's matrix",
        "examples/expert_kernel.py",
        "pl.ds(i * half + block * _WIDTH, _WIDTH), inputs]",
        "pl.ds(block * _WIDTH, _WIDTH), inputs]",
        "tests/test_expert_kernel.py -k in_tiles",
    ),
    Mutant(
        "experts: rows of pairs without an expert count",
        "examples/expert_kernel.py",
        "jnp.where(weights[:, :, None] != 0, out * weights[:, :, None], 0)",
        "out + 0 * weights[:, :, None]",
        "tests/test_expert_kernel.py -k in_tiles",
    ),
    Mutant(
        "sampling: steps without top-k and top-p search for them",
        "engine/sampling.py",
        "if kind >= Kind.TOP:",
        "if kind >= Kind.RANDOM:",
        "tests/test_engine_parts.py -k limits",
    ),
    Mutant(
        "sampling: top_p alone needs no search",
        "engine/seats.py",
        "params.top_k > 0 or params.top_p < 1",
        "params.top_k > 0",
        "tests/test_engine_parts.py -k limits",
    ),
    Mutant(
        "checkpoint: files outside the folder are read",
        "examples/tensors.py",
        "if Path(name).name != name or not",
        "if not",
        "tests/test_checkpoint.py -k index",
    ),
    Mutant(
        "checkpoint: infinite weights are refused",
        "examples/tensors.py",
        " & np.isfinite(array.astype(np.float32))",
        "",
        "tests/test_checkpoint.py -k float16_cannot",
    ),
    Mutant(
        "serve: copies of the model share no memory",
        "examples/serve.py",
        "room = HOST_SHARE * available / copies",
        "room = HOST_SHARE * available",
        "tests/test_serve_memory.py -k bounded",
    ),
    Mutant(
        "models: a limit adds positions",
        "examples/decoder.py",
        "max_position_embeddings=min(longest, self.config.max_position_embeddings)",
        "max_position_embeddings=longest",
        "tests/test_real_configs.py",
    ),
    Mutant(
        "models: layers with experts are counted from 0",
        "examples/families.py",
        "[i not in dense and (i + 1) % step == 0 for i",
        "[i not in dense and i % step == 0 for i",
        "tests/test_real_configs.py -k which_layers",
    ),
    Mutant(
        "loop: a stop token at the last place is no stop",
        "examples/loop.py",
        """    finish = jnp.where(output_lens >= request.max_output_lens, LENGTH, RUNNING)
    finish = jnp.where(is_stop, STOP, finish)
""",
        """    finish = jnp.where(is_stop, STOP, RUNNING)
    finish = jnp.where(output_lens >= request.max_output_lens, LENGTH, finish)
""",
        "tests/test_generate.py -k last_place",
    ),
    Mutant(
        "serve: devices that share out blocks hold no more of them",
        "examples/serve.py",
        "room *= parts * config.num_shards",
        "room *= parts",
        "tests/test_serve_memory.py -k devices",
    ),
    Mutant(
        "checkpoint: DeepSeek V3's last layer is one too many",
        "examples/checkpoint.py",
        "or int(m[1]) < config.num_layers}",
        "or int(m[1]) <= config.num_layers}",
        "tests/test_checkpoint.py -k guesses",
    ),
    Mutant(
        "checkpoint: the index is not downloaded",
        "examples/checkpoint.py",
        '    "model.safetensors.index.json",\n',
        "",
        "tests/test_checkpoint.py -k hub_id",
    ),
    Mutant(
        "generate: copies of the model without a prompt run",
        "examples/generate.py",
        "replicas(make_mesh(options.mesh))[: len(options.prompt)]",
        "replicas(make_mesh(options.mesh))",
        "tests/test_mesh.py -k several_copies",
    ),
    Mutant(
        "generate: copies of the model draw the same",
        "examples/generate.py",
        "seed=options.seed + i,",
        "seed=options.seed,",
        "tests/test_mesh.py -k several_copies",
    ),
]
