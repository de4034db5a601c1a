"""The implementations, one folder each; see README.md."""
