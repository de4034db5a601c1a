"""Tests attention to shared prefixes and to own tokens in one call: its numbers, and which calls it takes."""

import dataclasses
import functools
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax import PagedKVCache, _dispatch, _validate
from paged_jax.engine import SharedPrefixes
from paged_jax.kernels import problem
from paged_jax.kernels.mosaic_gpu.ragged import choose, count
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted
from paged_jax.kernels.problem import Device
from tests import inputs, oracle, plain
from tests.ragged_interpreter import call

BLOCK_SIZE = 16

# NumPy gives this warning when arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


class Batch(NamedTuple):
    """A decode batch: each prefix's number of rows and blocks, and each row's own tokens behind its prefix.

    Rows after those of the prefixes share none.
    """

    name: str
    prefixes: tuple[tuple[int, int], ...]
    own_lens: tuple[int, ...]
    heads: tuple[int, int, int] = (16, 1, 64)
    cache_dtype: str = "bfloat16"

    def __str__(self):
        return self.name


class Made(NamedTuple):
    """The arrays of a batch. Slots and blocks that no row uses are poisoned."""

    query: np.ndarray
    cache: PagedKVCache
    shared: SharedPrefixes
    whole: tuple[np.ndarray, np.ndarray]  # each row's whole table and length

    def check(self, out, lse=None):
        """Compares results with the oracle's over whole tables."""
        arrays = self.query, np.asarray(self.cache.key_cache), np.asarray(self.cache.value_cache), *self.whole
        exact, rough = (module.decode(*arrays) for module in (oracle, plain))
        plain.assert_close(out, exact[0], rough[0], "out")
        if lse is not None:
            plain.assert_close(lse, exact[1], rough[1], "lse")


def make(batch):
    rng = inputs.rng_of(batch.name)
    num_heads, num_kv_heads, head_size = batch.heads
    num_seqs, num_prefixes = len(batch.own_lens), len(batch.prefixes)
    sizes = [size for _, size in batch.prefixes] + [-(-length // BLOCK_SIZE) for length in batch.own_lens]
    width, num_blocks = max(sizes) + 1, sum(sizes) + 2
    ids = iter(rng.permutation(num_blocks - 1)[: sum(sizes)])
    tables = np.full((len(sizes), width), np.iinfo(np.int32).max, np.int32)
    for row, size in zip(tables, sizes, strict=True):
        row[:size] = [next(ids) for _ in range(size)]
    lens = [BLOCK_SIZE * size for _, size in batch.prefixes] + list(batch.own_lens)
    shape = num_blocks, num_kv_heads, BLOCK_SIZE, head_size
    dtype = inputs.dtype_of(batch.cache_dtype)
    pools = [inputs.poison(rng, shape, dtype) for _ in range(2)]
    for pool in pools:
        for table, length in zip(tables, lens, strict=True):
            for t in range(length):
                vectors = rng.standard_normal((num_kv_heads, head_size), np.float32)
                pool[table[t // BLOCK_SIZE], :, t % BLOCK_SIZE] = vectors.astype(dtype)
    starts = np.cumsum([0, *(rows for rows, _ in batch.prefixes)])
    whole_tables, whole_lens = [], []
    for row in range(num_seqs):
        of_row = [p for p in range(num_prefixes) if starts[p] <= row < starts[p + 1]] + [num_prefixes + row]
        blocks = np.concatenate([tables[i][: sizes[i]] for i in of_row])
        whole_tables.append(np.resize(np.append(blocks, -1), 2 * width))
        whole_lens.append(sum(lens[i] for i in of_row))
    i32 = [jnp.asarray(x, jnp.int32) for x in (tables, lens, starts)]
    shared = SharedPrefixes(
        i32[0][:num_prefixes], i32[1][:num_prefixes], i32[2], i32[0][num_prefixes:], i32[1][num_prefixes:]
    )
    query = rng.standard_normal((num_seqs, num_heads, head_size), np.float32).astype(inputs.dtype_of("bfloat16"))
    cache = PagedKVCache(*map(jnp.asarray, pools))
    return Made(query, cache, shared.joined(), (np.stack(whole_tables), np.array(whole_lens, np.int32)))


def operands_of(made, max_query_len=None):
    """The operands of one call."""
    rows = np.concatenate([made.query] * 2)
    caches = made.cache.key_cache, made.cache.value_cache
    found = _validate.ragged_operands(rows, *caches, *made.shared.batch, False, {"max_query_len": max_query_len})
    return found._replace(query=jnp.asarray(made.query), options=dataclasses.replace(found.options, copies=2))


# With groups of 16, wide items have 5 to 8 queries of a sequence, and thin ones up to 4.
BOTH = Batch("both kinds", ((6, 5), (0, 0), (1, 3)), (0, 5, 80, 1, 17, 16, 33, 0, 3))
THIN = Batch("thin only", ((2, 6),), (0, 18, 70), cache_dtype="float8_e4m3fn")
EMPTY = Batch("nothing", ((2, 0),), (0, 0))


@pytest.mark.parametrize(("batch", "tuning"), [(BOTH, {}), (THIN, {"counts_in_kernel": False})], ids=["both", "thin"])
def test_in_the_interpreter(batch, tuning):
    made = make(batch)
    operands = operands_of(made, None if batch is BOTH else 2)
    made.check(*call("ragged_paged_attention", operands, tile=64, thin_tile=64, stages=2, least_split=2, **tuning))
    assert not interpret_pallas_call.get_races().races_found


def attend(query, cache, shared, **options):
    return shared.attend(query, cache, **options)


@pytest.fixture
def one_call():
    """Lets XLA take such calls, too: it attends to a query's rows one by one, and merges their results."""
    with mock.patch.object(_dispatch, "merges_copies", return_value=True) as asked:
        yield
    assert asked.called


@pytest.mark.parametrize("batch", [BOTH, EMPTY], ids=str)
def test_row_by_row(batch, one_call):
    made = make(batch)
    made.check(np.asarray(jax.jit(attend)(*made[:3])))


def test_transformations(one_call):
    """One call works under vmap, in an exported function, and on sharded heads."""
    made = make(Batch("small", ((2, 1),), (3, 20, 0), (4, 2, 16)))
    arrays = jnp.asarray(made.query), made.cache, made.shared
    wanted = jax.jit(attend)(*arrays)
    made.check(np.asarray(wanted))
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), (arrays[0], made.shared))
    batched = jax.vmap(attend, in_axes=(0, None, 0))(twice[0], made.cache, twice[1])
    exported = export.export(jax.jit(attend))(*arrays)
    read_again = export.deserialize(exported.serialize()).call(*arrays)
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices("cpu")[:2])
    heads = NamedSharding(mesh, P(None, "tp"))
    on_two = jax.jit(attend)(*jax.device_put(arrays[:2], heads), jax.device_put(made.shared, NamedSharding(mesh, P())))
    for out in (*batched, read_again, on_two):
        assert (out == wanted).all()


H200 = Device()
ONE_CALL, TWO_CALLS = [("ragged_paged_attention", 2)], [("ragged_paged_attention", 1), ("paged_attention", 1)]


def calls_of(query, cache, shared, *, device=H200, **options):
    """The ops that `SharedPrefixes.attend` calls on a GPU, and how many rows of the batch each query has there."""
    called = []

    def take(op, operands, **_):
        called.append((op, operands.options.copies))
        return operands.query, jnp.zeros(operands.query.shape[:2])

    with (
        mock.patch.object(_dispatch, "call", take),
        mock.patch.object(_dispatch.jax, "local_devices"),
        mock.patch.object(problem, "device", return_value=device),
    ):
        jax.eval_shape(functools.partial(attend, **options), query, cache, shared)
    return called


def abstract(
    num_seqs=64, num_prefixes=1, heads=(32, 8, 128), dtype=jnp.bfloat16, cache_dtype=None, width=512, k_scale=None
):
    """The shapes of a query, a cache and joined prefixes."""
    num_heads, num_kv_heads, head_size = heads
    shapes = (num_prefixes, width), (num_prefixes,), (num_prefixes + 1,), (num_seqs, width), (num_seqs,)
    shared = SharedPrefixes(*[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes])
    pool = jax.ShapeDtypeStruct((4096, num_kv_heads, BLOCK_SIZE, head_size), cache_dtype or dtype)
    query = jax.ShapeDtypeStruct((num_seqs, num_heads, head_size), dtype)
    return query, PagedKVCache(pool, pool, k_scale), jax.eval_shape(SharedPrefixes.joined, shared)


@pytest.mark.parametrize(
    ("sizes", "options", "wanted"),
    [
        ({}, {}, ONE_CALL),
        ({"num_prefixes": 4}, {"implementation": "mosaic_gpu"}, ONE_CALL),
        ({"cache_dtype": jnp.float8_e4m3fn}, {}, TWO_CALLS),
        ({"k_scale": jax.ShapeDtypeStruct((4096, 8, BLOCK_SIZE), jnp.float32)}, {}, TWO_CALLS),
        ({"heads": (16, 8, 128)}, {}, TWO_CALLS),
        ({"heads": (32, 8, 64)}, {}, TWO_CALLS),
        ({}, {"implementation": "triton"}, TWO_CALLS),
        ({"dtype": jnp.float32}, {}, TWO_CALLS),
        ({"heads": (256, 64, 128), "num_seqs": 256}, {}, TWO_CALLS),
        ({}, {"device": Device(80, 108)}, TWO_CALLS),
    ],
    ids=[
        "bfloat16",
        "by name",
        "8 bits",
        "scales of slots",
        "small groups",
        "small heads",
        "another one by name",
        "float32",
        "too much memory",
        "no Hopper GPU",
    ],
)
def test_which_calls_are_one(sizes, options, wanted):
    query, cache, shared = abstract(**sizes)
    assert calls_of(query, cache, shared, **options) == wanted
    assert calls_of(query, cache, dataclasses.replace(shared, batch=None), **options) == TWO_CALLS


def test_without_a_gpu_two_calls_are_made():
    assert not _dispatch.merges_copies(operands_of(make(BOTH)), None)


@pytest.mark.parametrize("seed", range(3))
def test_items_of_random_batches(seed):
    """All items leave a partial result, for which there is room; wide items all begin at once."""
    rng = np.random.default_rng(seed)
    query, cache, shared = abstract(num_seqs=64, num_prefixes=4, width=1024)
    options = dataclasses.replace(operands_of(make(EMPTY)).options, max_seq_len=16 * 1024, max_query_len=64)
    facts = problem.Problem.of_call(query, cache.key_cache, cache.value_cache, shared.batch[0], options)
    tuning = dataclasses.replace(choose.tune(facts, H200), counts_in_kernel=False)
    geometry = Geometry(facts, tuning)
    wide, thin = kinds_of(geometry)
    for _ in range(5):
        ends = np.sort(rng.integers(0, 65, 4))
        lens = [*rng.integers(0, 16 * 1024, 4), 0, *rng.integers(0, rng.choice([50, 2000, 16000]), 64)]
        starts = np.concatenate([[0], ends, 64 + np.arange(65)])
        counts = count.count_before_kernel(*(jnp.asarray(x, jnp.int32) for x in (starts, lens)), geometry)
        items, partials = (
            [int(count.total(what, kind, counts)) for kind in (wide, thin)] for what in list(Counted)[:2]
        )
        assert partials == items
        assert all(0 <= number <= kind.num_partials for number, kind in zip(items, (wide, thin), strict=True))
        assert int(counts.wide_programs[0]) == min(items[0], H200.num_multiprocessors - 1)


GPU_CASES = [
    BOTH,
    THIN,
    EMPTY,
    Batch("one prefix", ((64, 40),), tuple(range(100, 164)), (32, 8, 128)),
    Batch("groups of 16", ((16, 30), (16, 20), (16, 1), (16, 40)), tuple(range(1, 65)), (32, 8, 128)),
    Batch("uneven rows", ((30, 20),), (5000, 1, 3, 700, *[33] * 40), (32, 8, 128)),
    Batch("e4m3", ((40, 30),), (150,) * 64, (32, 8, 128), "float8_e4m3fn"),
    Batch("heads of 80", ((20, 40),), (100,) * 24, (12, 4, 80)),
    Batch("heads of 64, one for each", ((20, 40),), (100,) * 24, (4, 4, 64)),
    Batch("more than 510 sequences", ((500, 3), (3, 20)), tuple(i % 50 for i in range(520)), (8, 2, 64)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", GPU_CASES, ids=str)
def test_on_a_gpu(batch):
    """The results of one call are right, and equal in every run."""
    made = make(batch)
    arrays = jax.device_put(made[:3], jax.devices("gpu")[0])
    with mock.patch.object(_dispatch, "merges_copies", return_value=True):  # 8 bits, too
        run = jax.jit(functools.partial(attend, implementation="mosaic_gpu"))
        first, second = (np.asarray(run(*arrays)) for _ in range(2))
    assert first.tobytes() == second.tobytes()
    made.check(first)
