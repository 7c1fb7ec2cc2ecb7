"""Prompt embeddings on the control plane: their element types, their parts, their part in the salt."""

from collections.abc import Iterator

from .codec import CONTROL_MAX_FRAME
from .messages import Prefill, PromptEmbeds, PromptRows, Reserve

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # by safetensors' name of the type
PART_BYTES = CONTROL_MAX_FRAME - (64 << 10)  # leaves space for the other fields of a message


def parts_of(
    order: Reserve | Prefill, data: bytes | memoryview, *, width: int, dtype: str
) -> Iterator[PromptEmbeds]:
    """The messages that bring `data`, rows of `width` elements of type `dtype`, before `order`."""
    row_bytes = width * ELEMENT_BYTES[dtype]
    step = max(1, PART_BYTES // row_bytes)
    for start in range(0, len(data) // row_bytes, step):
        yield PromptEmbeds(
            room=order.room,
            epoch=order.epoch,
            instance=order.instance,
            start=start,
            width=width,
            dtype=dtype,
            data=bytes(data[start * row_bytes : (start + step) * row_bytes]),
        )


def cache_salt(salt: str, embeds: PromptRows | None) -> str:
    """The salt of a prompt's pages in prefix caches: equal for equal embeddings of one tenant only."""
    return f"{salt}\0{embeds.digest.hex()}" if embeds is not None else salt
