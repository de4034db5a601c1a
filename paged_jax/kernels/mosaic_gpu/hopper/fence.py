"""The fence between what a program stores in global memory and a signal to other programs, which read it."""

import jax.experimental.mosaic.gpu as mgpu

from paged_jax.kernels.mosaic_gpu.hopper.inline import assembly, inline


def show_cluster_what_is_stored() -> None:
    """Lets programs of this cluster see what this warpgroup has stored, once they get a signal that follows.

    A signal goes from multiprocessor to multiprocessor, and is faster than what was stored, which goes to L2. Without
    the fence, whoever gets the signal may read what memory held before (benchmarks/LOG.md, "Splits and their merge").
    """

    @inline()
    def fence(_):
        mgpu.warpgroup_barrier()  # the fence counts for what other threads stored before the barrier, too
        assembly("fence.acq_rel.cluster;", "")

    fence()
