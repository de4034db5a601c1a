"""The implementations, one folder each: the same file names in each, so who has read one can walk the others."""
