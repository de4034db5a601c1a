"""Code that is traced into kernels, and what describes it: references, shared memory, outputs."""
