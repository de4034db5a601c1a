"""The fence between what a program stores in global memory and a signal to another program that reads it."""

import jax.experimental.mosaic.gpu as mgpu

from paged_jax.kernels.mosaic_gpu.hopper.inline import assembly, inline


def show_cluster_what_is_stored() -> None:
    """Orders what this warpgroup's threads stored before their next signals to programs of their cluster.

    A finished wait for copies says that the waiting thread sees what they wrote. A signal, which travels from
    multiprocessor to multiprocessor, is faster than some of these bytes on their way to L2: without the fence, the
    program that gets the signal may read what was in memory before (benchmarks/LOG.md, "A program of decode").
    """

    @inline()
    def fence(_):
        mgpu.warpgroup_barrier()  # other threads have stored, too
        assembly("fence.acq_rel.cluster;", "")

    fence()
