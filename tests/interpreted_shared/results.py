"""Stores whose rows are an array's columns."""

import jax.experimental.pallas as pl


def store_columns(out_gmem, x, row, first):
    out_gmem[pl.ds(row, x.shape[1]), pl.ds(first, x.shape[0])] = x.T
