"""Patch for an experiment: one lane of a loading warp arrives for all."""
import jax.experimental.mosaic.gpu.dialect_lowering as dl
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, arith
NAME = dl.mgpu.ArriveExpectTxOp.OPERATION_NAME
original = dl._lowerings[NAME]
def patched(ctx, op):
    if ctx.thread_semantics != utils.ThreadSubset.WARP:
        return original(ctx, op)
    i32 = ir.IntegerType.get_signless(32)
    n = op.expect_tx if isinstance(op.expect_tx, ir.Value) else utils.c(int(op.expect_tx), i32)
    barrier = utils.DialectBarrierRef.from_barrier_memref(op.barrier)
    ptr = llvm.ptrtoint(i32, barrier.get_ptr())
    pred = arith.extui(i32, ctx.single_lane_predicate)
    code = """{ .reg .pred one; .reg .b64 state; setp.ne.b32 one, $2, 0;
      @one mbarrier.arrive.noComplete.shared.b64 state, [$0], 127;
      @one mbarrier.arrive.expect_tx.shared.b64 state, [$0], $1; }"""
    llvm.inline_asm(None, [ptr, n, pred], code, "r,r,r,~{memory}", has_side_effects=True)
    return []
def use(on): dl._lowerings[NAME] = patched if on else original
