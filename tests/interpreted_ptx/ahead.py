"""Prefetches, which change no result."""


def prefetch_queries(query_gmem, starts_gmem, program):
    """Does nothing."""


def prefetch_tables(tables_gmem, lengths, program, block_size):
    """Does nothing."""


def prefetch_tiles(keys_gmem, values_gmem, tables_gmem, tiles, kind):
    """Does nothing."""
