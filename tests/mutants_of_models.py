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
]
