"""What the ragged kernel has in MLIR and PTX; the interpreter replaces it."""
