"""Reads the tensors of a model folder, and only the parts of them that are asked for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from examples.config import CheckpointError, DecoderConfig, read_json
from examples.names import Source

DTYPES = "F32", "F16", "BF16"  # safetensors' names
_POSITIVE = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
FP4 = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)  # what 4 bits stand for
ADVICE = "save the model anew with transformers' save_pretrained"


class Tensor(NamedTuple):
    """A tensor in an open safetensors file."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, *index: slice | int) -> np.ndarray:
        """Reads only this part of the tensor from the file, or all of it without an index."""
        found = self.file.get_slice(self.name).get_dtype()
        if found not in DTYPES:
            raise CheckpointError(f"tensor {self.name} has dtype {found}; supported: {', '.join(DTYPES)}")
        return self.file.get_slice(self.name)[index] if index else self.file.get_tensor(self.name)


class Mxfp4Tensor(NamedTuple):
    """A stack of matrices in the format MXFP4, in which gpt-oss keeps its experts; they are widened as they are read.

    Each 32 numbers that follow one another along the input are 16 bytes, two numbers of 4 bits each, the lower one
    first, and share a power of two. Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0.

    Attributes:
        blocks: uint8 `[num_experts, out, in / 32, 16]`.
        scales: uint8 `[num_experts, out, in / 32]`, exponents of two plus 127.
    """

    blocks: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices, `[num_experts, in, out]`."""
        num_experts, num_out, num_groups = self.scales.shape
        return num_experts, num_groups * 32, num_out

    def read(self, *index: slice) -> np.ndarray:
        """Reads the experts, inputs and outputs of these slices, as float32."""
        experts, inputs, outputs = index
        blocks, scales = (tensor.file.get_slice(tensor.name)[experts, outputs] for tensor in self)
        numbers = FP4[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, 32)
        matrices = np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127).reshape(*scales.shape[:2], -1)
        return matrices.swapaxes(1, 2)[:, inputs]


type AnyTensor = Tensor | Mxfp4Tensor


class Rows:
    """The rows of several sources as one array: first those of each source for the first device, then for the second.

    Args:
        tensors: the folder's tensors.
        sources: the sources, which are joined along their rows.
        config: the decoder's config. Where the folder has fewer kv heads, several devices get copies of one.
        num_parts: how many devices share the rows.
    """

    def __init__(self, tensors: dict[str, AnyTensor], sources: list[Source], config: DecoderConfig, num_parts: int):
        num_parts = num_parts if len(sources) > 1 else 1
        self._pieces: list[tuple[AnyTensor, Source]] = []
        for part in range(num_parts):
            for source in sources:
                size = source.size
                length = max(size // num_parts, config.head_size) if len(sources) == 3 else size // num_parts
                first = part * size // num_parts // length * length
                piece = source._replace(start=source.start + first * source.step, size=length)
                self._pieces.append((tensors[source.name], piece))

    def read(self, start: int, stop: int, *others: slice) -> np.ndarray:
        """Reads the rows from `start` to `stop` of all pieces together, and of them the slices `others`."""
        arrays, before = [], 0
        for tensor, piece in self._pieces:
            low, high = max(start - before, 0), min(stop - before, piece.size)
            if low < high:
                first, last = (piece.start + row * piece.step for row in (low, high - 1))
                if piece.expert is None:
                    arrays.append(tensor.read(slice(first, last + 1), *others))
                else:
                    matrix = tensor.read(slice(piece.expert, piece.expert + 1), *others, slice(first, last + 1))[0]
                    arrays.append(matrix[..., :: piece.step].T)
            before += piece.size
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def find_tensors(folder: Path) -> dict[str, AnyTensor]:
    """Finds the tensors of the folder's file or of its shards, by their names in the whole model.

    Raises:
        CheckpointError: there is no file, or one cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    paths = [folder / "model.safetensors"]
    if not paths[0].exists() and index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of tensors to files")
        named = sorted(set(weight_map.values()))
        if outside := [name for name in named if Path(name).name != name or not name.endswith(".safetensors")]:
            raise CheckpointError(f"{index} names a file that is no *.safetensors of its folder: {_some(outside)}")
        paths = [folder / name for name in named]
    elif not paths[0].exists():
        hint = f", only *.bin: {ADVICE}" if any(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder} has no model.safetensors{hint}")

    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        for name in sorted(file.keys()):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old versions of transformers wrote this tensor, which follows from config.json
            # In a model that was saved without its head, names lack their first part.
            full_name = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
            if full_name in tensors:
                raise CheckpointError(f"{folder} has tensor {name} more than once")
            tensors[full_name] = Tensor(file, name)
    stacks: dict[str, AnyTensor] = {}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        if f"{name}_scales" in tensors:
            stacks[name] = Mxfp4Tensor(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
    return tensors | stacks


def cast(array: np.ndarray, dtype: DTypeLike, names: Iterable[str]) -> np.ndarray:
    """Casts a part of some tensors, and refuses finite values that would become infinite."""
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if jnp.finfo(cast.dtype).max < jnp.finfo(array.dtype).max:
        # NumPy does not know whether a bfloat16 is finite.
        is_lost = np.isinf(cast.astype(np.float32)) & np.isfinite(array.astype(np.float32))
        if is_lost.any():
            raise CheckpointError(f"{cast.dtype} cannot hold a value of {_some(names)}: choose another dtype")
    return cast


def drop_tied_head(tensors: dict[str, AnyTensor], embedding: str) -> None:
    """Drops the output head, which must be a copy of the embedding."""
    head = tensors.pop("lm_head.weight", None)
    if head is not None and embedding in tensors and not np.array_equal(head.read(), tensors[embedding].read()):
        raise CheckpointError(f"tie_word_embeddings is true, yet lm_head.weight and {embedding} differ")


def check_names(folder: Path, wanted: Iterable[str], found: Iterable[str]) -> None:
    """Refuses a folder that lacks a tensor, or has one that the decoder has no place for."""
    wanted, found = set(wanted), set(found)
    if missing := wanted - found:
        raise CheckpointError(f"{folder} lacks tensor {_some(missing)}")
    if unexpected := found - wanted:
        raise CheckpointError(f"{folder} has a tensor that its architecture has no place for: {_some(unexpected)}")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} (and {len(others)} more)" if others else first
