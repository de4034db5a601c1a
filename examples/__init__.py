"""Text generation through the paged cache: a small decoder, its checkpoints, and the loops and scripts that run it."""
