"""Stores of some of a warpgroup's 64 rows, in MLIR and PTX. All threads of a warpgroup take part.

Arguments without a type are MLIR values.
"""

import numpy as np

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    add,
    address,
    as_i32,
    assembly,
    bytes_of,
    div,
    element,
    i32,
    i64,
    less,
    mul,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP


def store_word(exists, smem, gmem) -> None:
    """Copies 32 bits from the address `smem` to the address `gmem`, in each thread whose `exists` is 1 (else 0)."""
    assembly(
        """{ .reg .pred exists; .reg .b32 a; setp.ne.b32 exists, $0, 0;
        ld.shared.b32 a, [$1]; @exists st.global.b32 [$2], a; }""",
        "r,r,l",
        exists,
        smem,
        gmem,
    )


def store_first_rows(gmem, registers: np.ndarray, num_tokens, row_size: int, *, rows_of_token: int = 1) -> None:
    """Stores the rows of the first `num_tokens` tokens of an array [64, n] in the layout of wgmma's results.

    The destination has rows of `row_size` float32.
    """
    index = thread_index_read_again()
    lane, warp = rem(index, WARP), div(index, WARP)
    end = num_tokens if rows_of_token == 1 else mul(num_tokens, rows_of_token)
    pairs = registers.reshape(-1, 2)  # of columns 8 * c + 2 * (lane % 4) + 0..1, rows + 8 * h
    start_gmem = address(gmem)
    for h in range(2):
        row = add(mul(warp, 16), add(div(lane, 4), i32(8 * h)))
        exists = less(row, end)
        column = mul(rem(lane, 4), 2)
        start = add(start_gmem, bytes_of(add(mul(row, row_size), column), 4))
        for c in range(len(pairs)):
            values = [element(pairs[c, h], i) for i in range(2)]
            assembly(
                "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists st.global.v2.f32 [$1], {$2, $3}; }",
                "r,l,f,f",
                as_i32(exists),
                add(start, i64(32 * c)),
                *values,
            )
