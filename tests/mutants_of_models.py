"""The bugs that `tests.mutants` makes on purpose in the examples' models, checkpoints and loop."""

from tests.mutants_made import Mutant

MUTANTS_OF_MODELS = [
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
