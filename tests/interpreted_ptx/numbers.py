"""Arithmetic in one instruction each."""


def of_each(x, code, dtype):
    return 1 / x if code.startswith("rcp") else x.astype(dtype)
