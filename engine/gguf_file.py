"""Read a GGUF file's metadata and tensor table, every length checked.  Reads no weights.

The layout is that of ggml's GGUF specification, versions 2 and 3, little-endian:
    "GGUF" | u32 version | u64 tensors | u64 keys | keys | tensor table | padding | data
The `gguf` package's reader spends seconds on a vocabulary and trusts its input; ours does neither.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.model_config import BadCheckpoint

Value = int | float | bool | str | list[str] | npt.NDArray[np.generic]

VERSIONS = (2, 3)
STRING, ARRAY, BOOL = 8, 9, 7
# GGUF value type -> little-endian numpy type; 7 is a bool in one byte.
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}
ARRAY_LIMIT = 1 << 24  # elements; the largest vocabularies have a few hundred thousand
NAME_LIMIT = 1 << 16  # bytes of a key or tensor name
_u32 = struct.Struct("<I")
_u64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor's blocks lie."""

    name: str
    shape: tuple[int, ...]  # rows first: GGUF's order reversed
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's keys and tensors, in file order; all tensors lie within the file."""

    path: Path
    values: dict[str, Value]
    tensors: dict[str, GgufTensor]
    data_start: int  # bytes; metadata and tensor table end before it
    size: int = field(default=0)  # bytes of the whole file


def read_gguf(path: Path) -> GgufFile:
    """Read everything but the weights; raise BadCheckpoint when the file is not sound."""
    try:
        size = path.stat().st_size
        if size < 24:
            raise BadCheckpoint(f"{path.name} has {size} bytes; a GGUF file has at least 24. "
                                "Download it again.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).file()
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}.") from error


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = len(data)
        self._at = 0

    def file(self) -> GgufFile:
        magic, version = bytes(self._take(4)), self._number(_u32)
        if magic != b"GGUF":
            raise self._bad(f"begins with {magic!r}, not with GGUF")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = " (big-endian)" if swapped in VERSIONS else ""
            raise self._bad(f"has GGUF version {version}{hint}; versions 2 and 3 are read")
        tensor_count, key_count = self._number(_u64), self._number(_u64)
        self._fits(key_count, 13, "keys")
        values: dict[str, Value] = {}
        for _ in range(key_count):
            key = self._name("key")
            if key in values:
                raise self._bad(f"has the key {key!r} twice")
            values[key] = self._value(self._number(_u32), key)
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise self._bad(f"has general.alignment {alignment!r:.40}; it must be a multiple of 8")
        self._fits(tensor_count, 32, "tensors")
        listed = [self._listed() for _ in range(tensor_count)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in listed:
            if name in tensors:
                raise self._bad(f"has the tensor {name!r} twice")
            tensors[name] = self._placed(name, shape, kind, start + offset)
        return GgufFile(self._path, values, tensors, start, self._end)

    def _bad(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._path.name} {why}. Download it again, or choose another file.")

    def _fits(self, count: int, each: int, what: str) -> None:
        if count * each > self._end - self._at:
            raise self._bad(f"lists {count:,} {what} at byte {self._at:,}; it is too short")

    def _take(self, count: int) -> bytes:
        self._fits(count, 1, "bytes")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, kind: struct.Struct) -> int:
        number: int = kind.unpack(self._take(kind.size))[0]
        return number

    def _name(self, what: str) -> str:
        length = self._number(_u64)
        if length > NAME_LIMIT:
            raise self._bad(f"has a {what} name of {length:,} bytes; the limit is {NAME_LIMIT:,}")
        return self._text(self._take(length))

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._bad(f"has text before byte {self._at:,} that is not UTF-8") from None

    def _value(self, kind: int, key: str) -> Value:
        if kind == STRING:
            return self._text(self._take(self._number(_u64)))
        if kind == ARRAY:
            inner, count = self._number(_u32), self._number(_u64)
            if count > ARRAY_LIMIT:
                raise self._bad(f"has {count:,} elements in {key!r:.80}; the limit is "
                                f"{ARRAY_LIMIT:,}")
            return self._strings(count) if inner == STRING else self._numbers(inner, count, key)
        number = self._numbers(kind, 1, key)[0]
        return bool(number) if kind == BOOL else number.item()

    def _numbers(self, kind: int, count: int, key: str) -> npt.NDArray[np.generic]:
        if kind not in NUMBERS:
            raise self._bad(f"has a value of type {kind} in {key!r:.80}; types 0 to 12 are known")
        dtype = np.dtype(NUMBERS[kind])
        self._fits(count, dtype.itemsize, f"elements of {key!r:.80}")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> list[str]:
        self._fits(count, 8, "strings")
        data, at, end = self._data, self._at, self._end  # locals: 100,000 turns in a vocabulary
        texts: list[str] = []
        for _ in range(count):
            if end - at < 8:
                raise self._bad(f"ends within a list of {count:,} strings")
            start = at + 8
            at = start + _u64.unpack_from(data, at)[0]
            if at > end:
                raise self._bad(f"has a string at byte {start:,} that passes its end")
            try:
                texts.append(data[start:at].decode())
            except UnicodeDecodeError:
                raise self._bad(f"has text at byte {start:,} that is not UTF-8") from None
        self._at = at
        return texts

    def _listed(self) -> tuple[str, tuple[int, ...], int, int]:
        """One line of the tensor table: name, shape (rows first), type, offset within the data."""
        name = self._name("tensor")
        dimensions = self._number(_u32)
        if not 1 <= dimensions <= 4:
            raise self._bad(f"gives {name!r:.80} {dimensions} dimensions; 1 to 4 are possible")
        shape = tuple(self._number(_u64) for _ in range(dimensions))[::-1]
        return name, shape, self._number(_u32), self._number(_u64)

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        """The tensor, when its type is known and its blocks lie within the file."""
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError:
            raise self._bad(f"has {name!r:.80} in the unknown tensor type {kind}") from None
        weights, block_bytes = GGML_QUANT_SIZES[quantisation]
        if shape[-1] % weights or 0 in shape:
            raise self._bad(f"gives {name!r:.80} the shape {shape}; {quantisation.name} rows have "
                            f"a multiple of {weights} weights")
        size = math.prod(shape) // weights * block_bytes
        if offset + size > self._end:
            raise self._bad(
                f"is cut short: {name!r:.80} of shape {shape} would end at byte {offset + size:,}, "
                f"the file at {self._end:,}")
        return GgufTensor(name, shape, quantisation, offset, size)
