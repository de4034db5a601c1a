"""Device code: what Triton compiles. Nothing here is imported before a kernel is launched."""
