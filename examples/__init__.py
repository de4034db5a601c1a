"""Text generation through the paged cache: a decoder, its checkpoints, and the programs and scripts that run it."""
