"""One short script a question; see examples/README.md."""
