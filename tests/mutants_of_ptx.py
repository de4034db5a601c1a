"""The bugs that `tests.mutants` makes on purpose in what the Hopper kernels do in MLIR and PTX."""

from tests.mutants_made import Mutant

_TESTS = "tests/test_mosaic_gpu_ptx.py"

MUTANTS_OF_PTX = [
    Mutant(
        "ptx: queries past the first half of a wide item are in both halves",
        "kernels/mosaic_gpu/ragged/ptx/rows.py",
        "    if geometry.half_tokens * group < WGMMA_ROWS:\n",
        "    if False:\n",
        _TESTS,
    ),
    Mutant(
        "ptx: rows of half a swizzle's width lie in each other's place",
        "kernels/mosaic_gpu/ragged/ptx/rows.py",
        "i32(CHUNK * (lanes - 1))",
        "i32(CHUNK * lanes)",
        _TESTS,
    ),
    Mutant(
        "ptx: products may see a query before its copy",
        "kernels/mosaic_gpu/ragged/ptx/rows.py",
        '        assembly("fence.proxy.async.shared::cta;", "")\n',
        "        pass\n",
        _TESTS,
    ),
    Mutant(
        "ptx: a thin item's last chunks are not stored",
        "kernels/mosaic_gpu/ragged/ptx/rows.py",
        "div(add(mul(num_rows, chunks_per_row), i32(WARPGROUP - 1)), WARPGROUP)",
        "div(mul(num_rows, chunks_per_row), WARPGROUP)",
        _TESTS,
    ),
    Mutant(
        "ptx: new tokens of another kv head",
        "kernels/mosaic_gpu/ragged/ptx/tiles.py",
        "index = add(mul(add(first_row, row), problem.num_kv_heads), kv_head)",
        "index = add(mul(add(first_row, row), problem.group), kv_head)",
        _TESTS,
    ),
    Mutant(
        "ptx: a segment of new tokens begins one row too late",
        "kernels/mosaic_gpu/ragged/ptx/tiles.py",
        "less(row, i32(i * kind.segment_tokens))",
        "less(row, i32(i * kind.segment_tokens + 1))",
        _TESTS,
    ),
    Mutant(
        "ptx: lanes zero rows of the next warp",
        "kernels/mosaic_gpu/ragged/ptx/tiles.py",
        "stays = as_i32(arith.ori(is_kept, is_others))",
        "stays = as_i32(is_kept)",
        _TESTS,
    ),
    Mutant(
        "ptx: copies may overwrite raw bytes that other lanes have not read",
        "kernels/mosaic_gpu/ragged/ptx/tiles.py",
        "        mgpu.utils.warp_barrier()  # later copies",
        "        pass  # later copies",
        _TESTS,
    ),
    Mutant(
        "ptx: converted chunks all lie in the first period",
        "kernels/mosaic_gpu/ragged/ptx/tiles.py",
        "(chunk // period * period)}",
        "(chunk // period)}",
        _TESTS,
    ),
    Mutant(
        "ptx: scales of slots from a block of as many heads as queries have",
        "kernels/mosaic_gpu/ragged/ptx/tiles.py",
        "size = 4 * problem.num_kv_heads * problem.block_size",
        "size = 4 * problem.num_heads * problem.block_size",
        _TESTS,
    ),
    Mutant(
        "ptx: scales of rows that are not kept stay what they were",
        "kernels/mosaic_gpu/ragged/ptx/tiles.py",
        "@own st.shared.f32",
        "@kept st.shared.f32",
        _TESTS,
    ),
    Mutant(
        "ptx: sums overwrite the sum before them while threads read it",
        "kernels/mosaic_gpu/ragged/ptx/scan.py",
        "        mgpu.warpgroup_barrier()  # all threads have read column `first`\n",
        "",
        _TESTS,
    ),
    Mutant(
        "ptx: a warp's sums count its own twice",
        "kernels/mosaic_gpu/ragged/ptx/scan.py",
        "arith.cmpi(arith.CmpIPredicate.ult, i32(i), warp)",
        "arith.cmpi(arith.CmpIPredicate.ule, i32(i), warp)",
        _TESTS,
    ),
    Mutant(
        "ptx: the largest values overflow their order",
        "kernels/mosaic_gpu/ragged/ptx/scan.py",
        "_LARGEST = (1 << 22) - 1",
        "_LARGEST = (1 << 24) - 1",
        _TESTS,
    ),
    Mutant(
        "ptx: wide and thin items are claimed by one counter",
        "kernels/mosaic_gpu/ragged/ptx/items.py",
        "add(address(counts_gmem), i64(4 * (0 if kind.is_wide else 1)))",
        "address(counts_gmem)",
        _TESTS,
    ),
    Mutant(
        "ptx: a claim overwrites the number that some threads have not read",
        "kernels/mosaic_gpu/ragged/ptx/items.py",
        "        mgpu.warpgroup_barrier()  # all threads have read the previous number\n",
        "",
        _TESTS,
    ),
    Mutant(
        "ptx: each thread claims an item",
        "kernels/mosaic_gpu/ragged/ptx/items.py",
        "mov.b32 number, 0; @first atom",
        "mov.b32 number, 0; atom",
        _TESTS,
    ),
    Mutant(
        "ptx: a warp's share overwrites sums that other warps have not read",
        "kernels/mosaic_gpu/mla/merge.py",
        "    mgpu.utils.warpgroup_barrier()  # all warps have read the sums of the previous part\n",
        "",
        "tests/test_mosaic_gpu_merge.py -k latent",
    ),
]
