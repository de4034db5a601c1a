"""Tests the choice of an implementation: which errors fall through, what users are told, and which names are taken."""

import logging
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import paged_jax
from paged_jax import _dispatch, _selection, which_implementation
from paged_jax.kernels import problem, triton
from paged_jax.kernels.mosaic_gpu.decode import choose
from paged_jax.kernels.problem import Unsupported
from paged_jax.kernels.triton import launch, tuning

QUERY, CACHE = jnp.ones((2, 4, 16), jnp.bfloat16), jnp.ones((5, 2, 8, 16), jnp.bfloat16)
DECODE = QUERY, CACHE, CACHE, jnp.zeros((2, 3), jnp.int32), jnp.array([3, 20], jnp.int32)
PAIRS = jnp.array([[0, 1]], jnp.int32)


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Forgets which ops were traced, and which warnings were given, in other tests."""
    _dispatch._bind.cache_clear()
    _selection._said.clear()
    yield
    _dispatch._bind.cache_clear()


def refusing(*reasons):
    def kernel(*operands, **static):
        raise Unsupported("triton", reasons)

    return kernel


def lower_for_cuda(op, *arrays, **options):
    return jax.jit(lambda *arrays: op(*arrays, **options)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_the_type_names_every_implementation_that_is_tried():
    assert (*_dispatch._ON_CUDA, "xla") == _dispatch.IMPLEMENTATIONS
    assert set(_dispatch._FOR_EVERY_GPU) < set(_dispatch._ON_CUDA)
    for name in _dispatch.IMPLEMENTATIONS:
        assert _dispatch._package(name).paged_attention


def test_only_unsupported_falls_through():
    with mock.patch.object(triton, "paged_attention", refusing("lacks it")):
        lower_for_cuda(paged_jax.paged_attention, *DECODE)
    _dispatch._bind.cache_clear()

    def mistaken(*operands, **static):
        raise NotImplementedError("a rule that JAX lacks")

    with (
        mock.patch.object(triton, "paged_attention", mistaken),
        pytest.raises(NotImplementedError, match="a rule that JAX lacks"),
    ):
        lower_for_cuda(paged_jax.paged_attention, *DECODE)


def test_a_call_that_falls_to_xla_on_cuda_says_so_once_a_reason(caplog):
    with (
        mock.patch.object(triton, "paged_attention", refusing("lacks this", "lacks that")),
        mock.patch.object(triton, "paged_attention_v1", refusing("lacks that")),
        mock.patch.object(triton, "paged_attention_v2", refusing("lacks that", "lacks more")),
        mock.patch.object(triton, "copy_blocks", refusing("lacks copies")),
        caplog.at_level(logging.WARNING, "paged_jax"),
    ):
        jax.jit(paged_jax.paged_attention).lower(*DECODE)
        assert not caplog.messages  # on a CPU, XLA is the right choice, and there is no warning
        lower_for_cuda(paged_jax.paged_attention, *DECODE)
        said = ["paged_attention runs through 'xla': 'triton' lacks this; lacks that"]
        assert caplog.messages == said
        lower_for_cuda(paged_jax.paged_attention, *DECODE, sliding_window=4)
        lower_for_cuda(paged_jax.paged_attention_v1, *DECODE)
        assert caplog.messages == said
        lower_for_cuda(paged_jax.copy_blocks, CACHE, CACHE, PAIRS)
        said += ["copy_blocks runs through 'xla': 'triton' lacks copies"]
        assert caplog.messages == said
        lower_for_cuda(paged_jax.paged_attention_v2, *DECODE)
        assert caplog.messages == [*said, "paged_attention_v2 runs through 'xla': 'triton' lacks that; lacks more"]
        lower_for_cuda(paged_jax.paged_attention, *DECODE, implementation="xla")
    assert {(record.name, record.levelname) for record in caplog.records} == {("paged_jax", "WARNING")}


def test_which_implementation():
    here = which_implementation(paged_jax.paged_attention, *DECODE, platform="cpu")
    assert (here.op, here.name, list(here.reasons)) == ("paged_attention", "xla", ["mosaic_gpu", "triton"])
    with mock.patch.object(triton, "copy_blocks", refusing("lacks copies")):
        refused = which_implementation(paged_jax.copy_blocks, CACHE, CACHE, PAIRS, platform="cuda")
    assert (refused.name, refused.reasons) == ("xla", {"triton": ("lacks copies",)})
    assert str(refused) == "copy_blocks runs through 'xla': 'triton' lacks copies"
    with mock.patch.object(triton, "copy_blocks", return_value=None):
        taken = which_implementation(paged_jax.copy_blocks, CACHE, CACHE, PAIRS, platform="cuda")
    assert (taken.name, taken.reasons, str(taken)) == ("triton", {}, "copy_blocks runs through 'triton'")
    with mock.patch.object(triton, "paged_attention", refusing("lacks it")), pytest.raises(Unsupported, match="lacks"):
        which_implementation(paged_jax.paged_attention, *DECODE, implementation="triton", platform="cuda")


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="here they run")
def test_what_needs_a_gpu_says_so_elsewhere(implementation):
    def call(*arrays):
        return paged_jax.paged_attention(*arrays, implementation=implementation)

    arrays = [jnp.ones((2, 4, 64), jnp.bfloat16), *[jnp.ones((5, 2, 8, 64), jnp.bfloat16)] * 2, *DECODE[3:]]
    for lower in (call, jax.jit(call), jax.vmap(call, in_axes=(None, None, None, None, None), axis_size=2)):
        with pytest.raises(Unsupported, match=f"^implementation '{implementation}' needs an NVIDIA GPU$"):
            lower(*arrays)
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU, this is a cpu"):
        which_implementation(paged_jax.paged_attention, *arrays, implementation=implementation)
    assert "paged_jax_refuse" not in lower_for_cuda(call, *arrays)


def test_arrays_of_a_gpu_ask_for_cuda_beside_those_of_the_host():
    def array(platform):
        made = mock.Mock()
        made.__class__ = jax.Array
        made.devices.return_value = [SimpleNamespace(platform=platform)]
        return made

    assert _selection._platform([array("cpu"), array("gpu"), 3]) == "cuda"
    assert _selection._platform([array("cpu"), array("cpu")]) == "cpu"


@pytest.mark.parametrize(("capability", "wanted"), [("9.0", 90), ("12.1", 121), ("gfx942", 0)])
def test_the_facts_of_a_gpu(capability, wanted):
    gpus = [SimpleNamespace(compute_capability=capability, core_count=7), SimpleNamespace(core_count=9)]
    with mock.patch.object(jax, "local_devices", return_value=gpus):
        assert problem.device() == problem.Device(wanted, 7)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_windows_and_partitions_are_no_longer_than_the_longest_context(implementation):
    """Sums of positions would overflow in kernels. The call is refused once its facts are known."""
    query, pool = jnp.ones((2, 4, 64), jnp.bfloat16), jnp.ones((5, 2, 16, 64), jnp.bfloat16)
    options = {"sliding_window": 2**31 - 1, "partition_size": 2**31 - 16, "implementation": implementation}
    made, seen = (tuning, "attention") if implementation == "triton" else (choose, "in_partitions"), []

    def refuse(facts, gpu):
        seen.append(facts)
        raise Unsupported(implementation, ["is refused"])

    with mock.patch.object(*made, refuse), mock.patch.object(launch, "missing", return_value=[]):
        lengths = DECODE[3:]
        with pytest.raises(Unsupported, match="is refused"):
            jax.eval_shape(partial(paged_jax.paged_attention_v2, **options), query, pool, pool, *lengths)
    assert seen[0].sliding_window == 2**30
    assert seen[0].partition_size in (None, 2**30)  # in Triton it is a choice


def test_which_implementation_takes_shapes_methods_and_nothing_else():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in DECODE]
    asked = which_implementation(paged_jax.paged_attention_v2, *shapes, partition_size=8, platform="cpu")
    assert asked.name == "xla"
    cache = paged_jax.PagedKVCache(CACHE, CACHE)
    assert which_implementation(cache.attend, QUERY, *DECODE[3:], platform="cpu").op == "paged_attention"
    with pytest.raises(TypeError, match="op must be a function of paged_jax that runs on an implementation"):
        which_implementation(jnp.sum, QUERY)
    with pytest.raises(ValueError, match=r"platform must be one of \('cpu', 'cuda'\) or None, got 'gpu'"):
        which_implementation(paged_jax.paged_attention, *DECODE, platform="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout must be one of"):
        which_implementation(paged_jax.paged_attention, *DECODE, layout="bshd")


def attend(*arrays):
    return paged_jax.paged_attention(*arrays)


def attend_with_a_cache(query, key_cache, value_cache, *where):
    return paged_jax.PagedKVCache(key_cache, value_cache).attend(query, *where)


@pytest.mark.parametrize("step", [attend, attend_with_a_cache])
def test_a_question_leaves_a_jitted_function_as_it_was(step):
    """JAX caches the traces of jitted functions, also of those inside the function that is asked about."""
    wanted = paged_jax.paged_attention(*DECODE)
    chosen = which_implementation(paged_jax.paged_attention, *DECODE, platform="cuda").name
    for around in (lambda jitted: jitted, lambda jitted: lambda *arrays: jitted(*arrays)):
        jitted = jax.jit(lambda *arrays: step(*arrays))
        assert which_implementation(around(jitted), *DECODE, platform="cuda").name == chosen
        np.testing.assert_array_equal(jitted(*DECODE), wanted)
        assert chosen == "xla" or f"custom_call @{chosen}" in lower_for_cuda(jitted, *DECODE)


@pytest.mark.parametrize("step", [attend, attend_with_a_cache])
def test_a_jitted_function_that_has_run_has_an_answer(step):
    jitted = jax.jit(lambda *arrays: step(*arrays))
    jitted(*DECODE)
    chosen = which_implementation(paged_jax.paged_attention, *DECODE, platform="cuda")
    for fun in (jitted, lambda *arrays: jitted(*arrays)):
        for _ in range(2):
            assert which_implementation(fun, *DECODE, platform="cuda") == chosen


def test_which_implementation_of_a_batch_of_calls():
    batched = jax.vmap(lambda query: paged_jax.paged_attention(query, *DECODE[1:]))
    chosen = which_implementation(paged_jax.paged_attention, *DECODE, platform="cuda")
    assert which_implementation(batched, QUERY[None], platform="cuda") == chosen


def test_with_a_gpu_the_leader_is_tried_first_and_every_refusal_is_told():
    many = jnp.tile(QUERY, (4, 1, 1)), *DECODE[1:3], *(jnp.tile(x, (4,) + (1,) * (x.ndim - 1)) for x in DECODE[3:])
    with mock.patch.object(jax, "local_devices"), mock.patch.object(triton, "paged_attention", refusing("lacks it")):
        selection = which_implementation(paged_jax.paged_attention, *many, platform="cuda")
    assert selection.name == "xla"
    assert list(selection.reasons) == ["mosaic_gpu", "triton"]


@pytest.mark.slow_on_cpu
def test_host_numbers_pass_the_transfer_guard():
    f32, merged = QUERY.astype(jnp.float32), QUERY[..., 0].astype(jnp.float32)
    new, slots = QUERY[:, :2], DECODE[4]
    starts, batch = jnp.array([0, 1, 2], jnp.int32), QUERY[None]
    with jax.transfer_guard("disallow"):
        paged_jax.paged_attention(*DECODE)
        paged_jax.paged_attention_v1(*DECODE, scale=0.5, logits_soft_cap=2.0)
        paged_jax.paged_attention_v2(*DECODE, k_scale=np.float32(2), partition_size=8)
        paged_jax.ragged_paged_attention(*DECODE, starts)
        paged_jax.prefix_attention(QUERY, new, new, *DECODE[1:], starts)
        paged_jax.write_and_attend(QUERY, new, new, *DECODE[1:], slots)
        paged_jax.write_to_paged_cache(new, new, CACHE, CACHE, slots)
        paged_jax.copy_blocks(CACHE, CACHE, PAIRS)
        paged_jax.swap_blocks(CACHE, CACHE, CACHE, CACHE, PAIRS)
        paged_jax.merge_attention_states(f32, merged, f32, merged)
        jax.vmap(lambda query: paged_jax.paged_attention(query, *DECODE[1:]))(batch)


def test_a_bfloat16_numpy_scalar_is_a_number():
    out = paged_jax.paged_attention(*DECODE, scale=ml_dtypes.bfloat16(0.5))
    assert (out == paged_jax.paged_attention(*DECODE, scale=0.5)).all()
