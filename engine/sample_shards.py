"""Shards of training samples: sequences of token ids with loss masks, in safetensors files.

A shard holds `tokens` int32 `[T]`, `mask` uint8 `[T]` (1: a token that the target generated, so a drafter has
to predict it) and `offsets` int64 `[N+1]`, the bounds of its N samples. Collectors and decode workers write
them, trainers read them.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PATTERN = "samples-*.safetensors"
RECORDED = "samples-*-r*.safetensors"  # shards of decode workers, among those of PATTERN
TOKEN_BYTES = 5  # of a token in a shard: its id and its mask
SAMPLE_BYTES = 8  # of a sample besides its tokens: its bound
HEADER_BYTES = 512  # at most, of the file besides its samples


@dataclass(frozen=True)
class Sample:
    """One sequence. `mask[i]` is 1 if the target generated token i."""

    tokens: Sequence[int]
    mask: Sequence[int]


class ShardBuffer:
    """The content of a shard that grows. Adding a sample and taking the tensors copy few bytes at a time."""

    def __init__(self) -> None:
        self._tokens, self._mask, self._offsets = array("i"), bytearray(), array("q", [0])

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        """The most bytes that a file of these samples has."""
        return shard_bytes(len(self._tokens), len(self))

    def add(self, sample: Sample) -> None:
        """Adds a sample that is not empty."""
        self._tokens.extend(sample.tokens)
        self._mask.extend(sample.mask)
        self._offsets.append(len(self._tokens))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the shard, over the memory of this buffer, which must not grow any more."""
        return {
            "tokens": torch.frombuffer(self._tokens, dtype=torch.int32),
            "mask": torch.frombuffer(self._mask, dtype=torch.uint8),
            "offsets": torch.frombuffer(self._offsets, dtype=torch.int64),
        }


def shard_bytes(num_tokens: int, num_samples: int) -> int:
    """The most bytes that a file of so many tokens in so many samples has."""
    return HEADER_BYTES + TOKEN_BYTES * num_tokens + SAMPLE_BYTES * (num_samples + 1)


def shard_tensors(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """The tensors of a shard of `samples`, of which none is empty."""
    buffer = ShardBuffer()
    for sample in samples:
        buffer.add(sample)
    return buffer.tensors()
