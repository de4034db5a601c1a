"""The decode kernel: one query for each sequence."""
