"""Corrections of the arithmetic of Triton's interpreter, for `triton_interpreter.py`."""

import contextlib
import importlib
import math
import types
from unittest import mock

import ml_dtypes
import numpy as np

# The interpreter would compute every sum and product of integers in 64 bits, too, to see that 32 are enough. Small
# arrays need no more, and `triton_items.hold_offsets` and `hold_shifts_beyond_32_bits` compare the large results.
_UNCHECKED = {"sanitize_overflow": False}


@contextlib.contextmanager
def _types_are_kept(interpreter):
    """Keeps what the interpreter otherwise makes anew for every operation: types of blocks, and shapes of tensors.

    It also looks no further at operands of one shape, and at values that are no compile-time constants.
    """
    tl, core = interpreter.tl, importlib.import_module("triton.language.core")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def init(self, handle, type):
        if not hasattr(type, "kept"):
            shape = type.shape if type.is_block() else ()
            type.kept = core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.kept

    def with_element_ty(self, scalar, original=tl.block_type.with_element_ty):
        kept = self.__dict__.setdefault("others", {})
        if scalar.name not in kept:
            kept[scalar.name] = original(self, scalar)
        return kept[scalar.name]

    numpy_types = {}

    def numpy_type(dtype, original=interpreter._get_np_dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = original(dtype)
        return numpy_types[dtype.name]

    def shape_of(type):
        return getattr(type.shape, "values", type.shape) if type.is_block() else ()

    def broadcast(self, lhs, rhs, original=semantic.broadcast_impl_value):
        return (lhs, rhs) if shape_of(lhs.type) == shape_of(rhs.type) else original(self, lhs, rhs)

    def unwrapped(value, original=core._unwrap_if_constexpr):
        return value if type(value) in plain else original(value)

    with (
        mock.patch.object(core.tensor, "__init__", init),
        mock.patch.object(core, "_unwrap_if_constexpr", unwrapped),
        mock.patch.object(semantic, "broadcast_impl_value", broadcast),
        mock.patch.object(tl.block_type, "with_element_ty", with_element_ty),
        mock.patch.object(tl.block_type, "to_ir", lambda self, builder: self),
        mock.patch.object(interpreter, "_get_np_dtype", numpy_type),
    ):
        yield


@contextlib.contextmanager
def arithmetic_mended():
    """Corrects Triton's interpreter, which truncates bfloat16 instead of rounding, and treats its bits as integers.

    The interpreter takes float8_e4m3fn's NaN for 480.

    The interpreter also rounds a fused multiply-add twice, and lacks inline assembly, with which one kernel moves a
    register. In Triton 3.6 it makes an index of a scalar by `int(array of one element)`, which NumPy 2.5 refuses.

    It also makes the interpreter twice as fast: see `_types_are_kept` and `_UNCHECKED`.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    tl, handle, builder = interpreter.tl, interpreter.TensorHandle, interpreter.InterpreterBuilder
    bfloat16 = ml_dtypes.bfloat16

    def widened(x):
        return handle(x.data.view(bfloat16).astype(np.float32), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def cast(original):
        def mended(self, x, dtype, *rounding):
            if dtype.scalar == tl.bfloat16 and x.dtype.scalar != tl.bfloat16:
                x = x if x.dtype.scalar == tl.float32 else original(self, x, tl.float32, *rounding)
                return handle(x.data.astype(bfloat16).view(np.uint16), tl.bfloat16)
            x = widened(x)
            if x.dtype.scalar == tl.float8e4nv:
                x = handle(x.data.view(ml_dtypes.float8_e4m3fn).astype(np.float32), tl.float32)
            return x if x.dtype.scalar == dtype.scalar else original(self, x, dtype, *rounding)

        return mended

    def elementwise(original):
        def mended(self, *operands_and_function):
            *operands, function = operands_and_function
            if operands[0].dtype.scalar != tl.bfloat16:
                return original(self, *operands_and_function)
            result = original(self, *map(widened, operands), function)
            is_number = result.data.dtype == np.float32
            return handle(result.data.astype(bfloat16).view(np.uint16), tl.bfloat16) if is_number else result

        return mended

    def dot(self, a, b, *rest, original=builder.create_dot):
        return original(self, widened(a), widened(b), *rest)

    def fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data + z.data
        return handle(exact.astype(z.data.dtype), z.dtype)

    def scalars(tensor, scope, original=interpreter._patch_lang_tensor):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched = set()

    def patch_once(function, original=interpreter._patch_lang):
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            original(function)
        return interpreter._LangPatchScope()  # this scope is empty and restores nothing

    def move(self, code, constraints, values, *rest):
        assert code == "mov.b32 $0, $1;", code
        return types.SimpleNamespace(get_result=lambda _: values[0])

    with (
        _types_are_kept(interpreter),
        mock.patch.object(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(**_UNCHECKED)),
        mock.patch.object(interpreter, "_patch_lang_tensor", scalars),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(builder, "create_inline_asm", move),
        mock.patch.object(builder, "create_fma", fma),
        mock.patch.object(builder, "unary_op", elementwise(builder.unary_op)),
        mock.patch.object(builder, "binary_op", elementwise(builder.binary_op)),
        mock.patch.object(builder, "cast_impl", cast(builder.cast_impl)),
        mock.patch.object(builder, "create_fp_to_fp", cast(builder.create_fp_to_fp)),
        mock.patch.object(builder, "create_dot", dot),
    ):
        yield
