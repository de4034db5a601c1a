"""The ragged kernel: any number of queries for each sequence."""
