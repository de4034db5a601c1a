"""Runs and compiles the Triton kernels without a GPU, with functions that replace `jax_triton.triton_call`.

`interpreted()` runs every launch in Triton's interpreter, on NumPy memory. The interpreter must be switched on before
triton is imported, so tests run this file as a script, in a process of its own:

    TRITON_INTERPRET=1 python -m tests.triton_interpreter NAME ...

`recorded(launches)` only records launches, and `compiled(launch, capability)` compiles a launch to a cubin. Neither
needs jax_triton; some of its versions can only be imported with a JAX for GPUs.
"""

import contextlib
import dataclasses
import importlib
import sys
import types
import warnings
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import paged_jax
from paged_jax import _dispatch
from paged_jax.kernels.problem import Device
from paged_jax.kernels.triton import cache_ops, cache_tuning, launch, mla_tuning, tuning
from tests import (
    inputs,
    rpa_cases,
    test_block_ops,
    test_cache_ops,
    test_decode,
    test_mla,
    test_ragged,
    test_wide_scales,
    test_write_and_attend,
)
from tests.cases import DECODE_CASES, Case, Sparse
from tests.triton_arithmetic import arithmetic_mended

_TYPES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
}


# A GPU of two multiprocessors splits the contexts of these batches if splits may be as short as a tile of 16.
SPLIT = [
    Case("split-hnd-bfloat16", 2, 1, 16, 16, "bfloat16", seq_lens=(200, 7, 0, 65), query_lens=(1, 7, 0, 20), padding=3),
    Case(
        "split-everything", 4, 1, 16, 8, "bfloat16", "float8_e4m3fn", "nhd", (130, 9, 90), (5, 9, 1), max_seq_len=136,
        padding=2, scale="traced", alibi=True, sliding_window=80, logits_soft_cap=4.0, sinks=True,
        block_sparse=Sparse(2, 3, 8, 1), k_scale="slot", v_scale="head",
    ),
]  # fmt: skip
# On that GPU these sequences take several waves, so the longest ones start first. Some have the same length.
RANKED = Case("ranked", 2, 1, 16, 16, seq_lens=(9, 30, 9, 0, 30, 9), query_lens=None)
# Partitions are shorter than a sparse block, and a reduce reads them in several steps.
SPARSE = Case(
    "sparse-partitions", 4, 2, 16, 8, "bfloat16", seq_lens=(200, 37), query_lens=(20, 1), partition_size=8, scale=-0.3,
    block_sparse=Sparse(0, 3, 16, -1, 1),
)  # fmt: skip
# Windows begin among the new tokens, within a tile and some tiles after the first one.
WINDOW = Case("window-of-new-tokens", 2, 1, 16, 16, seq_lens=(150,), query_lens=(140,), sliding_window=20)
# So many sequences that a program reads their starts in two steps. They fill that GPU, so none is split.
MANY = Case("many-sequences", 1, 1, 16, 16, seq_lens=(3, 1) * 66, query_lens=(1, 1) * 66)


@dataclasses.dataclass
class Launch:
    """One call of `triton_call`: a signature, a config and a grid."""

    kernel: object
    inputs: tuple
    outputs: list
    config: object
    grid: tuple
    aliases: dict


@contextlib.contextmanager
def standing_in(triton_call, device=None):
    """Replaces jax_triton's function by `triton_call(launch) -> outputs`, and makes every op call it without jit."""

    def call(*inputs, kernel, out_type, grid, cfg, input_output_aliases=None, **_):
        return triton_call(Launch(kernel, inputs, out_type, cfg, grid, input_output_aliases or {}))

    package = importlib.import_module("paged_jax.kernels.triton")
    device_code = [
        f"{package.__name__}.device.{file}" for file in ("attend", "latent", "items", "reduce", "write", "copy")
    ]
    for name in ("triton.compiler", *device_code):
        importlib.import_module(name)  # imported here, because imports under the patched sys.modules are lost

    def eagerly(op, operands, *, implementation=None, unwanted=(), **static):
        return getattr(package, op)(*operands, **static)

    module = types.ModuleType("jax_triton")
    module.triton_call = call
    with (
        mock.patch.dict(sys.modules, {"jax_triton": module}),
        mock.patch.object(_dispatch, "call", eagerly),
        mock.patch.object(launch, "missing", return_value=[]),
        mock.patch.object(launch, "device", return_value=device or Device()),
    ):
        yield


def recorded(launches, device=None):
    """Records the launches; each returns zeros."""

    def record(made):
        launches.append(made)
        return [jnp.zeros(x.shape, x.dtype) for x in made.outputs]

    return standing_in(record, device)


@contextlib.contextmanager
def interpreted(device=None):
    """Runs the launches in Triton's interpreter."""

    def run(made):
        outputs = {o: fenced(made.inputs[i]) for i, o in made.aliases.items()}
        inputs = [
            Memory(outputs[made.aliases[i]]) if i in made.aliases else x if isinstance(x, int) else Memory(fenced(x))
            for i, x in enumerate(made.inputs)
        ]
        fresh = []
        for o, x in enumerate(made.outputs):
            if o not in outputs:  # outputs start as bytes 0xff, which are NaN, to reveal elements that are not written
                size = int(np.prod(x.shape)) * x.dtype.itemsize
                outputs[o] = fenced(np.full(size, 0xFF, np.uint8).view(x.dtype).reshape(x.shape))
                fresh.append(Memory(outputs[o]))
        made.kernel[made.grid](*inputs, *fresh, cfg=made.config)
        for o, x in outputs.items():
            assert fence_stands(x), f"the kernel wrote outside of its output {o}, {x.dtype} {x.shape}"
        return [jnp.asarray(outputs[o]) for o in range(len(made.outputs))]

    # The interpreter lacks instructions of the GPU, and rounds float8 differently.
    def by_hand(*args, original=cache_tuning.quantisation, **keywords):
        return dataclasses.replace(original(*args, **keywords), native=False)

    def converted(*args, original=tuning.attention, **keywords):
        return dataclasses.replace(original(*args, **keywords), staged_values=False)

    with (
        arithmetic_mended(),
        standing_in(run, device),
        mock.patch.object(cache_tuning, "quantisation", by_hand),
        mock.patch.object(tuning, "attention", converted),
    ):
        yield


_FENCE = 2**20


def fenced(x):
    """Copies an array between bytes 0xff. Reads of these bytes give NaN, and `fence_stands` finds writes to them."""
    x = np.asarray(x)
    memory = np.full(2 * _FENCE + x.nbytes, 0xFF, np.uint8)
    inside = memory[_FENCE : _FENCE + x.nbytes].view(x.dtype).reshape(x.shape)
    inside[...] = x
    return inside


def fence_stands(x):
    """Whether the bytes around an array of `fenced` are unchanged."""
    memory = x
    while memory.base is not None:
        memory = memory.base
    return bool((memory[:_FENCE] == 0xFF).all() and (memory[-_FENCE:] == 0xFF).all())


class Memory:
    """A NumPy array with the methods that Triton's interpreter calls on a tensor."""

    def __init__(self, array):
        self.array, self.dtype = array, _TYPES[array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    cpu = untyped_storage

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        pass

    copy_ = set_

    def storage_offset(self):
        return 0

    size = stride = storage_offset


def signature(made):
    """The argument types by position, as in jax_triton; scalars of 1 are compile-time constants."""
    aliased = set(made.aliases.values())
    pointers = [x for o, x in enumerate(made.outputs) if o not in aliased]
    types = ["i32" if isinstance(x, int) else "*" + _TYPES[x.dtype.name] for x in (*made.inputs, *pointers)]
    ones = {i for i, x in enumerate(made.inputs) if isinstance(x, int) and x == 1}
    return tuple("constexpr" if i in ones else type_ for i, type_ in enumerate(types))


def source_of(made):
    """A launch's kernel as Triton's compiler takes it, and the compiler's options."""
    from triton.compiler import ASTSource

    names, types = made.kernel.arg_names, signature(made)
    constants = {names[i]: 1 for i, type_ in enumerate(types) if type_ == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(types) if type_.startswith("*")}
    source = ASTSource(
        made.kernel,
        dict(zip(names, (*types, "constexpr"), strict=True)),
        constexprs={**constants, "cfg": made.config},
        attrs=aligned,
    )
    chosen = made.config.tuning if isinstance(made.config, tuning.AttentionKernel) else made.config
    return source, {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages, "enable_fp_fusion": True}


def compiled(made, capability):
    """Compiles a launch for this compute capability, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = source_of(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's own code gives warnings
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@contextlib.contextmanager
def short_splits(tile=16):
    """Makes ragged attention split contexts of a few tiles; raises an error if a launch splits none."""

    def shorter(original):
        return lambda *args, **keywords: dataclasses.replace(original(*args, **keywords), least_split=1, tile=tile)

    def call(module, kernel, *args, original=launch.call, **keywords):
        results = original(module, kernel, *args, **keywords)
        if kernel in ("ragged_kernel", "latent_kernel"):
            exp_sums = np.asarray(results[3])
            assert not np.isnan(exp_sums).all(), "no context was split"
        return results

    with (
        mock.patch.object(tuning, "attention", shorter(tuning.attention)),
        mock.patch.object(mla_tuning, "tuning_of", shorter(mla_tuning.tuning_of)),
        mock.patch.object(launch, "call", call),
    ):
        yield


def run_items(kernel, grid, inputs, outputs, cfg):
    """Runs a kernel of `triton_items` in the interpreter."""
    memory = [x if isinstance(x, int) else Memory(x) for x in (*inputs, *outputs)]
    kernel[grid](*memory, cfg=cfg)
    return outputs


def run(function, *, quick=True, **arrays):
    """Replaces the fixture `run` of the tests of every implementation."""
    return jax.tree.map(np.asarray, function(**arrays, implementation="triton"))


def run_rpa(function, *arrays, **options):
    """Replaces the fixture `run` for `rpa_cases.hold`."""
    return jax.tree.map(np.asarray, function(*arrays, **options, implementation="triton"))


def hold_unattended_blocks(case):
    """Cached blocks to which no query of a kv head attends are NaN."""
    sparse = importlib.import_module("tests.test_mosaic_gpu_sparse")
    made = inputs.make(case)
    arrays = sparse.poison_unattended(case, made, made.ragged) | made.arrays | test_decode.op_options(made.static)
    sparse.check(case, made, run(paged_jax.ragged_paged_attention, return_lse=True, **arrays))


def hold_latents(name):
    """Runs the tests of multi-head latent attention on a case."""
    case = next(case for case in test_mla.CASES if str(case) == name)
    test_mla.test_decode(case, run)
    if case.case.query_lens is not None:
        test_mla.hold_ragged(case, run)


def shortened(case):
    """The case without two of the usual sequences, whose time grows with tokens here: others have such lengths, too."""
    if case.seq_lens != Case.seq_lens:
        return case
    lens = {"seq_lens": (37, 0, 130, 64), "query_lens": case.query_lens and (5, 0, 33, 1)}
    return dataclasses.replace(case, **lens)


def hold_edges():
    test_write_and_attend.test_tokens_past_max_seq_len_are_written_and_not_attended_to(run)
    test_decode.test_a_head_whose_sink_is_off(run)
    test_decode.test_partitions_longer_than_every_context(run)
    test_ragged.test_the_tables_of_prefix_attention_may_hold_the_contexts_alone(run)
    test_ragged.test_ragged_and_prefix(WINDOW, run)


def hold_copies(dtype):
    test_block_ops.test_copy_blocks(dtype, run)
    test_block_ops.test_copy_blocks_of_many_layers(run)
    test_block_ops.test_swap_blocks_round_trip("hnd", dtype, run)
    test_block_ops.test_copy_blocks_of_odd_sizes((5, 9, 3, 1000), (5, 1, 1, 16), run)
    with mock.patch.object(cache_ops, "CopyKernel", partial(cache_tuning.CopyKernel, scan=64)):
        test_block_ops.test_copy_blocks_of_many_pairs(run, count=130)


def hold_writes(layout, dtype):
    test_cache_ops.test_write(layout, dtype, run)
    if (layout, dtype) == ("nhd", "float8_e5m2"):
        test_cache_ops.test_write_keeps_what_is_not_a_number(run)
    if layout == "hnd":
        test_cache_ops.test_write_saturates_and_rounds_to_nearest_even(dtype, run)
        test_cache_ops.test_write_of_bfloat16_saturates_in_float16(run)


def main(names):
    """Runs the tests of every implementation on cases. Some names have parts: "write-LAYOUT-DTYPE", "rpa-CASE"."""
    cases = {case.name: case for case in DECODE_CASES}
    not_causal = {case.name: case for case in test_ragged.NOT_CAUSAL}
    split = {case.name: case for case in SPLIT}
    with interpreted():
        for name in names:
            if name == "items":
                importlib.import_module("tests.triton_items").hold(run_items)
            elif name == "offsets":
                importlib.import_module("tests.triton_items").hold_offsets(run_items)
            elif name == "edges":
                hold_edges()
            elif name == "sparse-shifts":
                test_decode.hold_shifts_beyond_32_bits(run)
            elif name == "cut":
                test_decode.hold_cut_sequences(40, run)
            elif name == "scales-of-any-sign":
                test_decode.hold_scales_of_any_sign(run)
                test_wide_scales.hold_a_factor_of_zero(run)
                test_decode.hold_huge_logits_of_partitions(run)
            elif name == "not-a-number":
                for cache_dtype in test_decode.NOT_NUMBERS:
                    test_decode.hold_what_is_not_a_number(run, cache_dtype, 16)
                test_ragged.hold_new_tokens_that_float16_cannot_hold(run)
                importlib.import_module("tests.triton_items").hold_conversions(run_items)
            elif name == RANKED.name:
                with interpreted(Device(90, 2)):
                    test_decode.test_decode(RANKED, run)
            elif name == SPARSE.name:
                test_decode.test_decode(SPARSE, run)
                test_ragged.test_ragged_and_prefix(SPARSE, run)
                hold_unattended_blocks(SPARSE)
            elif name == MANY.name:
                with interpreted(Device(90, 2)):
                    test_ragged.test_ragged_and_prefix(MANY, run)
            elif name in split:
                with interpreted(Device(90, 2)), short_splits():
                    test_ragged.test_ragged_and_prefix(split[name], run)
                    if name == "split-hnd-bfloat16":
                        test_ragged.hold_in_any_order(run, longest=300)
            elif name in cases:
                case = shortened(cases[name])
                test_decode.test_decode(case, run)
                if name in ("hnd-bfloat16", "vllm-e4m3", "everything"):  # "fused-..." picks splits in the same way
                    test_decode.test_paged_attention_picks_one_of_them(name, run)
                if case.query_lens is not None:
                    test_ragged.test_ragged_and_prefix(case, run)
            elif name == "split-latents":
                with interpreted(Device(90, 8)), short_splits():
                    hold_latents("long")
            elif name.startswith("latent-"):
                hold_latents(name.removeprefix("latent-"))
                if name == "latent-e4m3":
                    test_mla.hold_queries_whose_last_elements_are_large(run)
            elif name.startswith("moved-latents-"):
                test_mla.test_write(name.removeprefix("moved-latents-"), run)
                test_mla.test_copy_and_swap_blocks(name.removeprefix("moved-latents-"), run)
            elif name in not_causal:
                test_ragged.test_without_causality_every_query_sees_all_of_its_sequence(not_causal[name], run)
                if name == "all-of-it":
                    test_ragged.test_without_causality_there_may_be_more_queries_than_tokens(run)
            elif name.startswith("rpa-"):
                rpa_cases.hold(rpa_cases.BY_NAME[name.removeprefix("rpa-")], run_rpa)
            elif name.startswith("fused"):
                test_write_and_attend.test_write_and_attend(
                    test_write_and_attend.BY_NAME[name.removeprefix("fused-")], run
                )
                if name == "fused-hnd-bfloat16":
                    test_write_and_attend.test_a_new_token_that_no_row_sees_may_hold_anything(1, run)
                    with interpreted(Device(90, 1)):  # this GPU splits no context
                        test_write_and_attend.test_a_new_token_that_no_row_sees_may_hold_anything(4, run)
            elif name.startswith("copy"):
                hold_copies(name.removeprefix("copy-"))
            else:
                hold_writes(*name.removeprefix("write-").split("-"))
            print(name, "ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
