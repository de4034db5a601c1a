"""Runs MLIR and PTX for the 128 threads of a warpgroup at once, in NumPy (`warpgroup.py`)."""

import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from tests.inputs import dtype_of

THREADS = 128
THREAD = np.arange(THREADS)
GLOBAL, SHARED = 1, 3  # address spaces
_ALL_LANES = 0xFFFFFFFF


class Run:
    """One run of a function: its values, and the operations of MLIR."""

    def __init__(self, gpu: Any, values):
        self.gpu, self.values = gpu, values

    def block(self, block, where):
        """Runs a block's operations; returns the values of its terminator."""
        for op in block.operations:
            op = op.operation
            operands = [self.values[x] for x in op.operands]
            if op.name in ("scf.yield", "func.return"):
                return operands
            results = self.one(op, operands, where)
            for result, x in zip(op.results, results, strict=True):
                self.values[result] = x
        return []

    def one(self, op, operands, where) -> list:
        """Runs an operation; returns its results."""
        name = op.name.replace(".", "_")
        if hasattr(self, name):
            return getattr(self, name)(op, operands, where)
        return [_SIMPLE[op.name](*operands)]

    def arith_constant(self, op, _, __):
        attribute = op.attributes["value"]
        type_ = op.results[0].type
        if isinstance(type_, ir.VectorType):
            one = ir.DenseElementsAttr(attribute).get_splat_value()
            return [np.full(type_.shape, one.value, _dtype(type_.element_type))]
        return [np.asarray(attribute.value).astype(_dtype(type_))]

    def arith_cmpi(self, op, operands, _):
        compare = arith.CmpIPredicate(int(op.attributes["predicate"]))
        x, y = (_unsigned(v) for v in operands) if compare.name.startswith("u") else operands
        return [_COMPARISONS[compare.name[-2:]](x, y)]

    def arith_cmpf(self, op, operands, _):
        compare = arith.CmpFPredicate(int(op.attributes["predicate"]))
        return [{"OGT": np.greater, "UNE": np.not_equal, "OLT": np.less}[compare.name](*operands)]

    def arith_select(self, _, operands, __):
        condition, x, y = operands
        extra = max(np.ndim(x), np.ndim(y)) - 1
        return [np.where(condition.reshape(*condition.shape, *[1] * extra) if condition.ndim else condition, x, y)]

    def _cast(self, op, operands, _):
        return [np.asarray(operands[0]).astype(_dtype(op.results[0].type))]

    arith_extsi = arith_index_cast = arith_trunci = arith_sitofp = arith_extf = arith_truncf = _cast

    def arith_extui(self, op, operands, _):
        return [_unsigned(np.asarray(operands[0])).astype(_dtype(op.results[0].type))]

    llvm_zext = arith_extui

    def _pointer(self, _, operands, __):
        return operands

    llvm_inttoptr = llvm_ptrtoint = _pointer

    def arith_bitcast(self, op, operands, _):
        x, type_ = np.asarray(operands[0]), op.results[0].type
        if isinstance(type_, ir.VectorType):
            return [np.ascontiguousarray(x).view(_dtype(type_.element_type)).reshape(-1, *type_.shape)]
        return [np.ascontiguousarray(x).view(_dtype(type_)).reshape(x.shape[:1])]

    llvm_bitcast = vector_bitcast = arith_bitcast

    def vector_extract(self, op, operands, _):
        return [np.asarray(operands[0])[..., op.attributes["static_position"][0]]]

    def vector_broadcast(self, op, operands, _):
        [size] = op.results[0].type.shape
        x = np.broadcast_to(operands[0], THREADS)
        return [np.repeat(x[:, None], size, axis=1)]

    def vector_from_elements(self, _, operands, __):
        return [np.stack([np.broadcast_to(x, THREADS) for x in operands], 1)]

    def llvm_mlir_undef(self, op, _, __):
        type_ = op.results[0].type
        return [np.zeros((THREADS, *type_.shape), _dtype(type_.element_type))]

    def vector_insert(self, op, operands, _):
        x, into = operands
        result = into.copy()
        result[..., op.attributes["static_position"][0]] = x
        return [result]

    def nvvm_shfl_sync(self, op, operands, _):
        x = np.broadcast_to(operands[1], THREADS)
        assert "bfly" in str(op.attributes["kind"])
        return [x[THREAD ^ np.asarray(operands[2])]]

    def nvvm_vote_sync(self, op, operands, _):
        assert "any" in str(op.attributes["kind"])
        condition = np.broadcast_to(operands[1], THREADS)
        return [np.repeat(condition.reshape(-1, 32).any(axis=1), 32)]

    def scf_if(self, op, operands, where):
        condition = np.broadcast_to(operands[0], THREADS)
        blocks = [region.blocks[0] for region in op.regions if len(region.blocks)]
        found = [self.block(b, where & c) for b, c in zip(blocks, (condition, ~condition), strict=False)]
        return [np.where(condition.reshape(-1, *[1] * (np.ndim(x) - 1)), x, y) for x, y in zip(*found, strict=True)]

    def scf_for(self, op, operands, where):
        bounds, carry = [np.unique(x) for x in operands[:3]], operands[3:]
        assert all(x.size == 1 for x in bounds), "threads have different bounds of a loop"
        begin, end, step = (int(x[0]) for x in bounds)
        block = op.regions[0].blocks[0]
        for i in range(begin, end, step):
            for argument, x in zip(block.arguments, [np.int64(i), *carry], strict=True):
                self.values[argument] = x
            carry = self.block(block, where)
        return carry

    def llvm_extractvalue(self, op, operands, _):
        return [operands[0][op.attributes["position"][0]]]

    def llvm_inline_asm(self, op, operands, where):
        code = ir.StringAttr(op.attributes["asm_string"]).value
        constraints = ir.StringAttr(op.attributes["constraints"]).value.split(",")
        outs = [x.lstrip("=&") for x in constraints if x.startswith("=")]
        results = _Ptx(self.gpu, where).run(code, outs, operands)
        if not op.results:
            return []
        return [results if len(outs) > 1 else results[0]]


class _Ptx:
    """Runs PTX. A register is an array of 32 or 64 bits, or of bools; its instructions say how to read it."""

    def __init__(self, gpu: Any, where):
        self.gpu, self.active = gpu, where

    def run(self, code: str, outs, operands) -> list:
        """Runs code; returns its results as int32 or float32."""
        if code.startswith("// barrier"):
            assert self.active.all(), "some threads miss a barrier"
            for memory in self.gpu.memories.values():
                memory.barrier(of_warps="warpgroup" not in code)
            return []
        earlier_lanes = (1 << (THREAD % 32).astype(np.uint64)) - 1
        self.registers = {"%tid.x": (self.gpu.first_thread + THREAD).astype(np.uint32), "%lanemask_lt": earlier_lanes}
        for i, x in enumerate(operands):
            assert np.asarray(x).dtype.itemsize in (4, 8), "operands have 32 or 64 bits"
            self.registers[f"${len(outs) + i}"] = _bits(np.broadcast_to(x, THREADS))
        code = re.sub(r"\{(?=\s*\.reg)", ";", code)  # scopes need no braces: names in them are not used twice
        while code != (code := re.sub(r";\s*\}", ";", code)):
            pass
        for line in code.split(";"):
            self.step(" ".join(line.split()))
        types = {"f": np.float32, "r": np.int32, "l": np.int64}
        return [self.registers[f"${i}"].view(types[x]) for i, x in enumerate(outs)]

    def value(self, name: str):
        """The bits of a register or of a constant."""
        name = name.strip()
        if name in self.registers:
            return self.registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(THREADS, number & 0xFFFFFFFF, np.uint32)

    def step(self, line: str):
        """Runs an instruction."""
        if not line or line.startswith((".reg", ".pragma")):
            return
        guard, line = re.fullmatch(r"(?:@(!?\w+) )?(.*)", line).groups()
        where = self.active
        if guard:
            condition = self.registers[guard.removeprefix("!")]
            where = where & (~condition if guard.startswith("!") else condition)
        op, _, rest = line.partition(" ")
        operands = [x.strip() for x in re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)", rest)]
        parts = op.split(".")
        assert parts[0] == "mov" or not any(x.startswith("%") for x in operands), "only mov reads special registers"
        if op == "prefetch.global.L2":
            self.gpu.prefetched += self.at(operands[0])[where].tolist()
        elif op == "cp.async.bulk.prefetch.L2.global":
            sizes = self.value(operands[1]).view(np.int32)
            assert (sizes[where] % 16 == 0).all()
            self.gpu.bulk_prefetches += zip(self.at(operands[0])[where].tolist(), sizes[where].tolist(), strict=True)
        elif parts[0] in ("ld", "st", "atom", "cp"):
            self.memory(parts, operands, where)
        elif parts[0] == "fence":
            assert op == "fence.proxy.async.shared::cta"
            self.gpu.is_fenced = True
        elif op == "shfl.sync.idx.b32":
            assert [self.value(x)[0] for x in operands[3:]] == [31, _ALL_LANES]
            self.registers[operands[0]] = self.value(operands[1])[THREAD // 32 * 32 + self.value(operands[2])]
        elif op.startswith("shfl"):
            self.shift_up(parts, operands)
        elif op == "vote.sync.ballot.b32":
            assert self.value(operands[2])[0] == _ALL_LANES
            votes = self.registers[operands[1]].reshape(4, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
            self.registers[operands[0]] = np.repeat(votes.sum(axis=1), 32).astype(np.uint32)
        elif op == "match.any.sync.b32":
            assert self.value(operands[2])[0] == _ALL_LANES
            lanes = self.value(operands[1]).reshape(4, 32)
            peers = (lanes[:, :, None] == lanes[:, None, :]) * (np.uint64(1) << np.arange(32, dtype=np.uint64))
            self.registers[operands[0]] = peers.sum(axis=2).reshape(-1).astype(np.uint32)
        elif op.startswith("redux"):
            assert (parts[1], parts[3], self.value(operands[2])[0]) == ("sync", "s32", _ALL_LANES)
            reduce = {"add": np.add, "max": np.maximum}[parts[2]].reduce
            of_warps = reduce(self.value(operands[1]).view(np.int32).reshape(4, 32), axis=1)
            self.registers[operands[0]] = np.repeat(of_warps, 32).astype(np.int32).view(np.uint32)
        elif operands[0].startswith("{"):
            low, high = (x.strip() for x in operands[0].strip("{}").split(","))
            x = self.value(operands[1])
            self.registers[low], self.registers[high] = x & 0xFFFF, x >> 16
        else:
            x = _instruction(op, [self.value(x) for x in operands[1:]])
            old = self.registers.get(operands[0])
            self.registers[operands[0]] = (
                x if guard is None else np.where(where, x, np.zeros_like(x) if old is None else old)
            )

    def shift_up(self, parts, operands):
        """Exchanges words between the lanes of each warp; a second result tells which lanes got another lane's word."""
        assert (*parts, *(self.value(x)[0] for x in operands[3:])) == ("shfl", "sync", "up", "b32", 0, _ALL_LANES)
        distance, (to, _, reaches) = int(self.value(operands[2])[0]), operands[0].partition("|")
        lanes = distance <= THREAD % 32
        self.registers[to] = self.value(operands[1])[np.where(lanes, THREAD - distance, THREAD)]
        self.registers[reaches] = lanes

    def memory(self, parts, operands, where):
        """Runs a load, a store, an atomic addition or an asynchronous copy."""
        if parts[:3] == ["cp", "async", "wait_all"]:
            for target, data, threads in self.gpu.copies:
                self.gpu.memories[SHARED].store(target, data, threads)
            self.gpu.copies = []
            return
        if parts[0] == "cp":
            assert operands[2] == "16"
            to, source, size = self.at(operands[0]), self.at(operands[1]), self.value(operands[3])
            assert np.isin(size, (0, 16)).all()
            data = self.gpu.memories[GLOBAL].load(source, 16, where & (size == 16))
            self.gpu.copies.append((to, data, where))
            self.gpu.is_fenced = False
            return
        memory = self.gpu.memories[SHARED if "shared" in parts else GLOBAL]
        many = next((int(x[1]) for x in parts if x in ("v2", "v4")), 1)
        target, names = (operands[1], operands[0]) if parts[0] != "st" else (operands[0], operands[1])
        address = self.at(target)
        names = [x.strip() for x in names.strip("{}").split(",")]
        assert len(names) == many
        if parts[0] == "st":
            data = np.stack([np.ascontiguousarray(self.value(x)) for x in names], 1).view(np.uint8)
            memory.store(address, data.reshape(THREADS, -1), where)
            self.gpu.is_fenced &= "shared" not in parts
            return
        found = memory.load(address, 4 * many, where).view(np.uint32)
        if parts[0] == "atom":
            assert (*parts[-3:], where.sum()) == ("global", "add", "u32", 1), "one thread counts"
            self.gpu.orders.append(".".join(parts[1:-3]))
            memory.store(address, (found + self.value(operands[2])[:, None]).astype(np.uint32).view(np.uint8), where)
        for i, name in enumerate(names):
            old = self.registers.get(name, np.zeros(THREADS, np.uint32))
            self.registers[name] = np.where(where, found[:, i], old).astype(np.uint32)

    def at(self, text: str):
        """The address that an operand in brackets names, of 32 or 64 bits as its register."""
        name, _, offset = text.strip("[]").partition("+")
        return self.value(name).astype(np.int64) + int(offset or 0)


def _instruction(op: str, values):
    """An instruction on registers."""
    name, *parts = op.split(".")
    kind = parts[-1]
    as_kind = {"s32": np.int32, "u32": np.uint32, "b32": np.uint32, "f32": np.float32}
    if op == "setp.le.and.s32":
        x, y = (np.asarray(v, np.uint32).view(np.int32) for v in values[:2])
        return (x <= y) & values[2]
    if op == "popc.b32":
        return np.bitwise_count(values[0]).astype(np.uint32)
    if name == "setp":
        x, y = (np.asarray(v, np.uint32).view(as_kind[kind]) for v in values)
        return {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}[parts[0]](x, y)
    if name == "mov":
        return values[0]
    if op == "and.pred":
        return values[0] & values[1]
    if op == "and.b32":
        return values[0].astype(np.uint32) & values[1].astype(np.uint32)
    if op in ("add.s32", "add.s64"):
        return values[0] + values[1]
    if op == "xor.b32":
        return values[0] ^ values[1]
    if op in ("mul.wide.s32", "mad.wide.s32"):
        x, y = (v.astype(np.uint32).view(np.int32).astype(np.int64) for v in values[:2])
        return (x * y + (values[2].view(np.int64) if name == "mad" else 0)).view(np.uint64)
    if op == "prmt.b32":
        both = np.stack(values[:2], 1).astype("<u4").view(np.uint8)
        chosen = [both[:, int(values[2][0]) >> 4 * i & 7] for i in range(4)]
        return np.stack(chosen, 1).copy().view("<u4")[:, 0]
    if op == "sub.f16x2":
        x, y = (np.ascontiguousarray(v.astype(np.uint32)).view(np.float16) for v in values)
        return (x - y).view(np.uint32)
    if op == "cvt.rn.f16x2.e4m3x2":
        pair = np.stack([values[0] & 0xFF, values[0] >> 8], 1).astype(np.uint8)
        return pair.view(dtype_of("float8_e4m3fn")).astype(np.float16).view(np.uint32)[:, 0]
    if op == "cvt.f32.f16":
        return values[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    if op in ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"):
        dtype = np.dtype(np.float16) if parts[1] == "f16x2" else dtype_of("bfloat16")
        high, low = (v.astype(np.uint32).view(np.float32).astype(dtype) for v in values)
        return np.stack([low, high], 1).view(np.uint32)[:, 0]
    if op == "cvt.rn.f32.u32":
        return values[0].astype(np.uint32).astype(np.float32).view(np.uint32)
    floats = [np.ascontiguousarray(v.astype(np.uint32)).view(np.float32) for v in values]
    if op == "cvt.rzi.s32.f32":
        return floats[0].astype(np.int32).view(np.uint32)
    functions = {
        "fma.rn.f32": lambda x, y, z: x * y + z,
        "ex2.approx.ftz.f32": np.exp2,
        "rcp.approx.ftz.f32": lambda x: 1 / x,
        "lg2.approx.ftz.f32": np.log2,
    }
    return functions[op](*floats).astype(np.float32).view(np.uint32)


def _dtype(type_):
    names = {"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "index": np.int64}
    names |= {"f32": np.float32, "f16": np.float16}
    return names.get(str(type_)) or dtype_of({"bf16": "bfloat16"}[str(type_)])


def _bits(x):
    x = np.ascontiguousarray(x)
    return x.view(np.uint64 if x.dtype.itemsize == 8 else np.uint32)


def _unsigned(x):
    x = np.asarray(x)
    return x.astype(np.uint8) if x.dtype == bool else x.view(f"u{x.dtype.itemsize}")


def _divui(x, y):
    return (_unsigned(x) // _unsigned(y)).view(np.asarray(x).dtype)


def _remui(x, y):
    return (_unsigned(x) % _unsigned(y)).view(np.asarray(x).dtype)


_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_SIMPLE = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.divui": _divui,
    "arith.remui": _remui, "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
    "arith.shrui": lambda x, y: (_unsigned(x) >> _unsigned(y)).view(np.asarray(x).dtype),
    "arith.shli": np.left_shift, "arith.minsi": np.minimum, "arith.maxsi": np.maximum, "arith.addf": np.add,
    "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide, "arith.maximumf": np.maximum,
    "arith.negf": np.negative, "math.fma": lambda x, y, z: x * y + z, "math.exp2": np.exp2,
}  # fmt: skip
