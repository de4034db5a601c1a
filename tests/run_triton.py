"""Runs the tests of every implementation on cases of Triton, in Triton's interpreter.

The interpreter must be switched on before triton is imported, so tests run this file as a script, in a process of its
own:

    TRITON_INTERPRET=1 python -m tests.run_triton NAME ...
"""

import dataclasses
import importlib
import sys
from functools import partial
from unittest import mock

import jax
import numpy as np

import paged_jax
from paged_jax.kernels.problem import Device
from paged_jax.kernels.triton import cache_ops, cache_tuning
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
from tests.triton_interpreter import Memory, interpreted, short_splits

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
    longest = 75 if case.max_seq_len is None else 130
    lens = {"seq_lens": (37, 0, longest, 64), "query_lens": case.query_lens and (5, 0, 21, 1)}
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
                if name in ("vllm-e4m3", "everything"):  # "fused-..." picks splits in the same way
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
                test_ragged.test_without_causality_every_query_sees_all_of_its_sequence(
                    shortened(not_causal[name]), run
                )
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
