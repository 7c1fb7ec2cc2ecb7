"""The header of a safetensors file: name, dtype, shape and place of every tensor."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from ..errors import CheckpointError
from .text_part import text_name

LENGTH_BYTES = 8  # the header's length, little-endian, stands before the header
DTYPES_BY_CODE: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in bytes [first, end) of its file. `code` is the dtype as the file spells it, and `name`
    that in a text model alone.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    first: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return self.end - self.first

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype; None if torch has none of this code."""
        return DTYPES_BY_CODE.get(self.code)


@dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """A file's size in bytes, its raw header, and its tensors in the order of their data."""

    path: Path
    size: int
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @classmethod
    def read(cls, path: Path) -> "SafetensorsFile":
        """The file at `path`. Raises CheckpointError for a malformed header, or one that does not fit the
        file.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if LENGTH_BYTES + length > size:
                raise CheckpointError(f"{path}: not a complete safetensors file; fetch it again")
            header = file.read(length)
        try:
            tensors = _tensors_of(header, LENGTH_BYTES + length)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path}: its safetensors header is malformed; fetch it again") from None
        if any(not LENGTH_BYTES + length <= each.first <= each.end <= size for each in tensors):
            raise CheckpointError(f"{path}: not a complete safetensors file; fetch it again")
        return cls(path=path, size=size, header=header, tensors=tensors)


def _tensors_of(header: bytes, base: int) -> tuple[StoredTensor, ...]:
    """The tensors of a header whose data begins at byte `base`. Raises ValueError or a lookup error."""
    found = []
    for name, entry in json.loads(header).items():
        if name == "__metadata__":
            continue
        first, end = (base + int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(size) for size in entry["shape"])
        made = StoredTensor(name=text_name(name), code=str(entry["dtype"]), shape=shape, first=first, end=end)
        if made.dtype is not None and math.prod(shape) * made.dtype.itemsize != made.num_bytes:
            raise ValueError(name)
        found.append(made)
    return tuple(sorted(found, key=lambda each: (each.first, each.end)))
