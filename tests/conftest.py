"""Strict JAX settings, run-time shape checks, the GPU marker's rule and the fixtures all tests share.

Runs before any test module, hence before `paged_jax` is first imported: the import hook needs that.
"""

import ctypes
import gc
import os
import random
import tempfile
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import hypothesis
import hypothesis.configuration
import jax
import jaxtyping
import numpy as np
import pytest
from jax._src import lru_cache
from jax.experimental.compilation_cache import compilation_cache

if "PYTEST_XDIST_WORKER" in os.environ:  # The processes of a run share a GPU. Each would take most of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_filtering", "off")  # the search through an error's frames takes longer than most tests
jax.config.update("jax_traceback_in_locations_limit", 0)  # stacks of every operation are a seventh of tracing's time
jax.config.update("jax_enable_compilation_cache", False)  # `kept_programs` turns it on, in a folder of its own
jax.config.update("jax_num_cpu_devices", 8)  # for shard_map, and threads for the Pallas interpreter: two a thread block

# Seconds within which whatever a test waits for must happen. A passing test does not come near them, even on a busy
# machine: no test depends on how fast the machine is, because it holds what must be unfinished at some moment.
PATIENCE = 120

# jaxtyping annotations are enforced in these modules, whose arrays were checked before. Others are left out: `ops` has
# messages of its own, pytree classes may hold more than arrays, and Triton reads its kernels' source.
_HOOKED = (
    "paged_jax.allocator",
    "paged_jax.kernels.xla",
    "paged_jax.kernels.mosaic_gpu.decode.call",
    "paged_jax.kernels.triton.decode",
    "paged_jax.kernels.triton.ragged",
    "paged_jax.kernels.triton.cache_ops",
    "paged_jax.kernels.triton.mla",
)
jaxtyping.install_import_hook(_HOOKED, "beartype.beartype")

pytest_plugins = ("tests.engine_checks",)  # the fixtures of the engine's tests

# Loaded by name: under CI=true hypothesis would otherwise choose a profile of its own.
hypothesis.settings.register_profile("paged_jax", deadline=None, derandomize=True, database=None, max_examples=20)
hypothesis.settings.load_profile("paged_jax")
hypothesis.configuration.set_hypothesis_home_dir(os.path.join(tempfile.gettempdir(), "paged_jax-hypothesis"))


def has_gpu():
    """Whether JAX sees a GPU here."""
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


# Most of the tests' time is LLVM's. Its unoptimised code computes the same thing, and compiles in two thirds of that
# time. Processes that tests start find the same in their environment. The tests that compare bits take FULL_COMPILE,
# which is what users get; on a machine with a GPU the tests take no other code than users either.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
FULL_COMPILE = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
if not has_gpu():
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    # XLA compiles in 0.96 of the time without glibc's fast bins, which each large free() empties. 1 is M_MXFAST.
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(1, 0)


def cases_beyond_samples(items):
    """The cases that are not drawn, of tests marked as `sampled`. A test's name decides which cases are."""
    cases = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    beyond = []
    for name, of_test in cases.items():
        (size,) = of_test[0].get_closest_marker("sampled").args
        drawn = random.Random(name).sample(of_test, min(size, len(of_test)))
        beyond += [item for item in of_test if item not in drawn]
    return beyond


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_collection_modifyitems(config, items):
    """Deselects tests that need a GPU on machines without one, and slow tests unless they are asked for."""
    on_cpu = [item for item in items if not item.get_closest_marker("gpu")]
    more = [item for item in on_cpu if item.get_closest_marker("slow_on_cpu")] + cases_beyond_samples(on_cpu)
    for item in more:
        item.add_marker("slow")
    unwanted = [] if has_gpu() else ["gpu"]
    unwanted += [] if "slow" in config.option.markexpr else ["slow"]
    unrunnable = {item for item in items if any(map(item.get_closest_marker, unwanted))}
    if unrunnable:
        config.hook.pytest_deselected(items=list(unrunnable))
        items[:] = [item for item in items if item not in unrunnable]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives each process neighbouring files, whose tests share programs; a process with nothing to do takes others."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish():
    """Hides objects that live to the end from the garbage collector: JAX's modules and the collected tests.

    Then the collector looks less often, because tracing makes many objects and few cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_terminal_summary(terminalreporter):
    """Prints at the end how many cases each GPU implementation takes; `test_refusals.py` checks these numbers."""
    kept = (Path(__file__).with_name("refusals.txt")).read_text(encoding="utf-8").splitlines()
    terminalreporter.section("what GPU implementations take (why not the rest: tests/refusals.txt)")
    terminalreporter.write_line("; ".join(line for line in kept if not line.startswith(" ")))


@pytest.fixture(params=["xla", *(pytest.param(i, marks=pytest.mark.gpu) for i in (None, "triton", "mosaic_gpu"))])
def implementation(request):
    """All implementations: "xla" on the CPU, the others, and None for the automatic choice, on a GPU."""
    return request.param


def keep_whole(cache, key, program):
    """Keeps a program in JAX's cache, in place of `LRUCache.put`: other processes find all of it or nothing."""
    kept = f"{cache.path / key}{lru_cache._CACHE_SUFFIX}"
    if not os.path.exists(kept):
        part = f"{kept}.{os.getpid()}-{threading.get_ident()}"
        Path(part).write_bytes(program)
        os.replace(part, kept)


@pytest.fixture(scope="session", autouse=True)
def kept_programs(tmp_path_factory):
    """A folder in which XLA's programs are kept: equal ones are compiled once in a run, whatever process needs them.

    Processes that tests start read all of them, and add those whose compilation takes a while.
    """
    if has_gpu():
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "programs"
    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.05,
    }
    for name, value in options.items():
        jax.config.update(name, value)
    # Most programs are small, and the same in many tests: reading one takes a fifth of the time.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # which otherwise looks at these options once
    environment = {name.upper(): str(value) for name, value in options.items()}
    with mock.patch.dict(os.environ, environment), mock.patch.object(lru_cache.LRUCache, "put", keep_whole):
        yield


@pytest.fixture
def gpu():
    """A warpgroup in NumPy, on which calls of `inline` functions run."""
    from tests.warpgroup import Warpgroup

    with Warpgroup().running() as made:
        yield made


@pytest.fixture
def device(implementation):
    """Where the implementation runs."""
    return jax.devices("cpu" if implementation == "xla" else "gpu")[0]


@pytest.fixture
def skip_lacking(implementation):
    """A context manager that skips the test, in its words, when a GPU implementation says it lacks something."""

    @contextmanager
    def skip_lacking():
        try:
            yield
        except NotImplementedError as error:
            if implementation not in ("triton", "mosaic_gpu") or implementation not in str(error):
                raise
            pytest.skip(str(error))

    return skip_lacking


@pytest.fixture
def run(implementation, device, skip_lacking):
    """`run(function, **arrays)`: NumPy results of `jit(function)(**arrays)` on the implementation's device.

    `function` also takes `implementation`.
    """

    def run(function, *, quick=True, **arrays):
        options = (QUICK_COMPILE if quick else FULL_COMPILE) if implementation == "xla" else None
        jitted = jax.jit(partial(function, implementation=implementation), compiler_options=options)
        with skip_lacking():
            return jax.tree.map(np.asarray, jitted(**jax.device_put(arrays, device)))

    return run


@pytest.fixture(scope="session")
def running():
    """A server of the tiny model in this process: `tests.http_server.Running`. Compiling its programs takes a while."""
    from tests.http_server import Running

    with Running() as running:
        yield running
