"""Reads `prompt_embeds`: base64 of a safetensors file with one tensor `[tokens, hidden size]`.

Nothing in the client's file is trusted: the header is bounded and checked against the bytes that are there,
and pickled tensors are never read.
"""

import base64
import binascii
import hashlib
import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from ...cluster.protocol.messages import Prefill, PromptEmbeds, PromptRows, Reserve
from ...cluster.protocol.prompt_embeds import ELEMENT_BYTES, parts_of
from ..errors import ApiError, bad_request, printable

NAME = "prompt_embeds"
MAX_HEADER = 16 << 10  # bytes; of one tensor they are some 80
SIZE_BYTES = 8  # of the header's size
REMEDY = "send base64 of safetensors.torch.save({'embeds': tensor})"
# the bits of a number's exponent; infinite or no number if all are set
EXPONENTS = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
PICKLES = (b"PK\x03\x04", b"\x80")  # of torch.save, new and old


class Embeddings(Struct, frozen=True, kw_only=True):
    """The embeddings of one prompt: `data` has rows of `width` elements of type `dtype`, little-endian."""

    data: bytes
    width: int
    dtype: str
    rows: PromptRows

    def parts_before(self, order: Reserve | Prefill) -> Iterator[PromptEmbeds]:
        """The messages that a worker needs before `order`."""
        return parts_of(order, self.data, width=self.width, dtype=self.dtype)


class _Tensor(Struct, forbid_unknown_fields=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def check_size(texts: Sequence[str], times: int, max_bytes: int) -> None:
    """Raises ApiError (400) for base64 of more than `max_bytes` of embeddings, counted `times` times.

    It is called before anything is decoded.
    """
    num_bytes = sum(max(0, len(text) * 3 // 4 - MAX_HEADER) for text in texts) * times
    if num_bytes > max_bytes:
        choices = f" for {times} choices" if times > 1 else ""
        raise _fault(
            f"has {num_bytes} bytes{choices}, at most {max_bytes} are allowed: send less, or raise "
            "--prompt-embeds-mb of the router"
        )


def read_embeds(text: str, width: int) -> Embeddings:
    """The embeddings in `text`, rows of `width` elements. Raises ApiError (400)."""
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _fault(f"is not base64: {REMEDY}") from None
    tensor, data = _only_tensor(file)
    each = ELEMENT_BYTES.get(tensor.dtype)
    if each is None:
        raise _fault(f"has type {printable(tensor.dtype[:16])}: send {', '.join(ELEMENT_BYTES)}")
    if len(tensor.shape) != 2 or tensor.shape[0] < 1 or tensor.shape[1] != width:
        raise _fault(f"has shape {str(tensor.shape[:8])[:80]}: this model takes [tokens, {width}]")
    if tensor.data_offsets != (0, len(data)) or math.prod(tensor.shape) * each != len(data):
        raise _fault(f"has {len(data)} bytes of data, which its header does not describe: {REMEDY}")
    _check_finite(data, tensor.dtype, width)
    digest = hashlib.sha256(f"{tensor.dtype} {width} ".encode())
    digest.update(data)
    return Embeddings(
        data=data,
        width=width,
        dtype=tensor.dtype,
        rows=PromptRows(count=tensor.shape[0], digest=digest.digest()),
    )


def _only_tensor(file: bytes) -> tuple[_Tensor, bytes]:
    size = int.from_bytes(file[:SIZE_BYTES], "little")
    end = SIZE_BYTES + size
    if not 2 <= size <= MAX_HEADER or end > len(file):
        if file.startswith(PICKLES):
            raise _fault(f"is a pickled tensor, which is never read: {REMEDY}")
        raise _fault(f"is not a safetensors file with a header of at most {MAX_HEADER} bytes: {REMEDY}")
    try:
        header = msgspec.json.decode(file[SIZE_BYTES:end], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(raw, type=_Tensor) for raw in header.values()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _fault(f"has a header that is not one of safetensors: {REMEDY}") from None
    if len(tensors) != 1:
        raise _fault(f"has {len(tensors)} tensors: send one for each prompt")
    return tensors[0], file[end:]


def _check_finite(data: bytes, dtype: str, width: int) -> None:
    bits = EXPONENTS[dtype]
    numbers = np.frombuffer(data, dtype="<u4" if dtype == "F32" else "<u2")
    wrong = np.flatnonzero((numbers & bits) == bits)
    if len(wrong):
        row, column = divmod(int(wrong[0]), width)
        raise _fault(f"is not finite at [{row}, {column}]: send numbers only")


def _fault(text: str) -> ApiError:
    return bad_request(f"{NAME} {text}", param=NAME)
