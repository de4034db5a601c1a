"""Device code, which Triton compiles. Nothing here is imported before a kernel is launched."""
