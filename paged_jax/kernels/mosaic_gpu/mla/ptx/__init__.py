"""The MLA kernel's code that Pallas's interpreter cannot run: MLIR, PTX, and accumulators in registers.

The tests replace the functions of this folder, and nothing else of the kernel, by tests/interpreted_mla.
"""
