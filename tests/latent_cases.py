"""The cases on which the ops of multi-head latent attention are tested, and their poisoned inputs.

A case is one of `cases.Case` with one kv head in layout "nhd", whose key cache is the latent cache.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from tests import inputs
from tests.cases import Case


@dataclass(frozen=True)
class LatentCase:
    """A `Case`, whose keys `inputs.make` draws as latents, and the size of the values."""

    case: Case
    value_size: int

    def __str__(self):
        return self.case.name


def latent_case(name, num_heads, latent_size, value_size, block_size=16, dtype="float32", cache_dtype=None, **options):
    """A case of latents; `scale` is 0.2 if it is not given, and `latent_scale` says whether there is one."""
    scaled = options.pop("latent_scale", cache_dtype == "int8")
    named = {"scale": 0.2, "k_scale": "scalar" if scaled else None} | options
    case = Case(name, num_heads, 1, latent_size, block_size, dtype, cache_dtype, "nhd", **named)
    return LatentCase(case, value_size)


CASES = [
    latent_case("deepseek", 16, 576, 512, 64, "bfloat16", seq_lens=(150, 0, 33), query_lens=(2, 0, 33)),
    latent_case("float32", 4, 64, 32),
    latent_case("float16", 5, 96, 96, 8, "float16", sinks=True),
    latent_case("bfloat16", 8, 144, 128, 32, "bfloat16", logits_soft_cap=3.0),
    latent_case("one-head", 1, 32, 16, 4, "bfloat16"),
    latent_case("many-heads", 130, 80, 64, 16, "bfloat16", seq_lens=(70, 3), query_lens=(3, 1)),
    latent_case("e4m3", 16, 144, 96, 16, "bfloat16", "float8_e4m3fn", latent_scale=True, scale="traced"),
    latent_case("e4m3-without-scale", 3, 48, 48, 16, "float16", "float8_e4m3fn"),
    latent_case("e5m2", 4, 64, 48, 2, "float32", "float8_e5m2", latent_scale=True),
    latent_case("int8", 6, 112, 64, 16, "bfloat16", "int8"),
    latent_case("largest", 2, 1024, 1024, 128, "bfloat16", seq_lens=(130, 7), query_lens=(2, 7)),
    latent_case("smallest", 2, 16, 16, 1, "float16", seq_lens=(20, 7, 0), query_lens=(2, 7, 0)),
    latent_case("large-blocks", 4, 64, 32, 256, "bfloat16", seq_lens=(300, 7), query_lens=(2, 7)),
    latent_case("query-bfloat16-cache-float32", 4, 64, 32, dtype="bfloat16", cache_dtype="float32"),
    latent_case("query-float32-cache-bfloat16", 4, 64, 32, cache_dtype="bfloat16"),
    latent_case("max-seq-len", 4, 64, 32, max_seq_len=100, query_lens=None),
    latent_case("huge-logits", 4, 64, 32, 16, "bfloat16", scale=1.0, logits="huge", sinks=True),
    latent_case("scale-negative", 4, 64, 32, 16, "float16", scale=-0.3),
    latent_case("shared-blocks", 4, 64, 32, seq_lens=(70, 64, 90), query_lens=(6, 1, 26), shared_blocks=4),
    latent_case("all-empty", 4, 64, 32, seq_lens=(0, 0, 0), query_lens=(0, 0, 0), sinks=True),
    latent_case("context-without-query", 4, 64, 32, seq_lens=(20, 33, 48), query_lens=(0, 3, 0), padding=5),
    latent_case("long", 2, 32, 16, 16, "bfloat16", seq_lens=(1500, 3, 700, 0), query_lens=(1, 3, 20, 0)),
    latent_case("all-of-it", 4, 64, 32, 16, "bfloat16"),
    latent_case(
        "everything", 24, 192, 128, 8, "bfloat16", "float8_e4m3fn", latent_scale=True, scale="traced", sinks=True,
        logits_soft_cap=4.0, seq_lens=(300, 7, 0, 129), query_lens=(1, 7, 0, 20),
    ),
    latent_case(
        "equal-logits-over-100k", 1, 16, 16, 256, "bfloat16", seq_lens=(100_000,), query_lens=None, logits="equal"
    ),
]  # fmt: skip

# Those that Hopper's kernel takes, too: row blocks that are full or not, one or several of them; queries in one row
# block or in two, that see one number of tiles or two; lengths that end within tiles and blocks; empty sequences and
# rows of padding.
HOPPER_CASES = [
    latent_case(
        "one-block", 8, 192, 128, 16, "bfloat16", seq_lens=(257, 0, 33, 64), query_lens=(3, 0, 33, 1), sinks=True,
        padding=9, scale=-0.2,
    ),
    latent_case(
        "width", 72, 128, 128, 32, "float16", seq_lens=(150, 9), query_lens=(2, 1), sinks=True, padding=2, scale=-0.3,
        cache_dtype="float16",
    ),
    latent_case(
        "odd-heads", 5, 128, 128, 8, "bfloat16", seq_lens=(70, 200), query_lens=(3, 1), sinks=True, logits_soft_cap=3.0,
        padding=9,
    ),
    latent_case(
        "deepseek-split", 128, 576, 512, 64, "bfloat16", seq_lens=(1500, 70, 3000), query_lens=(1, 3, 2), padding=1
    ),
    latent_case(
        "deepseek-16-heads", 16, 576, 512, 16, "bfloat16", seq_lens=(900, 0, 33, 2049), query_lens=(1, 0, 5, 4),
        sinks=True,
    ),
    latent_case(
        "deepseek-8-heads", 8, 576, 512, 128, "float16", cache_dtype="float16", seq_lens=(1000, 200), query_lens=(16, 9)
    ),
]  # fmt: skip
CASES += HOPPER_CASES


def make(case):
    """Makes a case's inputs: `decode` and `ragged`, arrays by name; `arrays`, array options; `static`, the others."""
    made = inputs.make(case.case)
    arrays = {"sinks": made.arrays.get("sinks"), "latent_scale": made.arrays.get("k_scale")}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    scale = {name: given["scale"] for given in (made.arrays, made.static) for name in ("scale",) if name in given}
    static = {"logits_soft_cap": made.static["logits_soft_cap"], "value_size": case.value_size}
    if case.case.name == "all-of-it":
        static["causal"] = False
    calls = {"decode": made.decode, "ragged": made.ragged}
    for name, call in calls.items():
        if call is not None:
            call = {key: x for key, x in call.items() if key not in ("key_cache", "value_cache")}
            calls[name] = {**call, "latent_cache": getattr(made, name)["key_cache"][:, :, 0]}
    if case.case.scale == "traced":
        arrays |= scale
    else:
        static |= scale
    return SimpleNamespace(**calls, arrays=arrays, static=static, num_rows=made.num_rows)
