"""Digests of pages that the GPU computes where they lie: 300 MB in a fraction of a millisecond.

A page is digested before it is copied to the host and after it came back. So the digest covers both copies,
and what lay in host memory or on a disk meanwhile. The digest of a page is that of its key (crc32c) and the
digest of `move_spans` over its words in all planes, added modulo 2**32.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from crc32c import crc32c

from ....kernels.digest_spans import DIGEST_FIELDS, digest_spans_triton
from ....kernels.move_spans import ALIGNMENT, MODULUS, WORD_BYTES, num_chunks

FIRST_PAGES = 1024  # that a table has room for at the start: pinning more memory later would stop kernels


class DeviceDigests:
    """Digests of pages of `planes`, uint8 `[num_pages, bytes]` each, on a stream. For one thread; it digests
    one list of pages after the other.
    """

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        """Compiles the kernel. Raises ValueError for pages that are no multiple of ALIGNMENT bytes."""
        bad = [plane.shape[1] for plane in planes if (plane.data_ptr() | plane.shape[1]) % ALIGNMENT]
        if bad:
            raise ValueError(f"a page of {bad[0]} bytes is no multiple of {ALIGNMENT}")
        sizes = [plane.shape[1] // WORD_BYTES for plane in planes]
        self._planes = [
            (plane.data_ptr(), plane.stride(0), size, first)
            for plane, size, first in zip(planes, sizes, accumulate(sizes, initial=0), strict=False)
        ]
        self._num_chunks = num_chunks(max(sizes))
        self._memory = self._table(FIRST_PAGES)
        self._num_spans = 0
        self.begin([0])
        torch.cuda.current_stream(planes[0].device).synchronize()

    def __repr__(self) -> str:
        return f"<DeviceDigests of {len(self._planes)} planes>"

    def begin(self, pages: Sequence[int]) -> None:
        """Launches the digests of `pages` on the current stream."""
        self._num_spans = count = len(pages) * len(self._planes)
        if self._memory.numel() < self._numbers(count):
            self._memory = self._table(len(pages))
        spans, sums = self._views()
        numbers, places = spans.numpy().reshape(len(pages), len(self._planes), DIGEST_FIELDS), np.array(pages)
        for n, (address, stride, size, first) in enumerate(self._planes):
            numbers[:, n, 0] = address + stride * places
            numbers[:, n, 1:] = size, first
        digest_spans_triton(spans, sums)

    def read(self, keys: Sequence[bytes]) -> list[int]:
        """The digests of the pages of the last `begin`, which has ended, under their `keys`."""
        sums = self._views()[1].numpy().reshape(len(keys), -1).sum(axis=1)
        return [(crc32c(key) + int(total)) % MODULUS for key, total in zip(keys, sums, strict=True)]

    def _views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The table's spans and sums. The kernel reads and writes a few words of them over the link."""
        begin, end = self._num_spans * DIGEST_FIELDS, self._numbers(self._num_spans)
        spans, sums = self._memory[:begin], self._memory[begin:end]
        return spans.view(-1, DIGEST_FIELDS), sums.view(-1, self._num_chunks)

    def _numbers(self, num_spans: int) -> int:
        return num_spans * (DIGEST_FIELDS + self._num_chunks)

    def _table(self, num_pages: int) -> torch.Tensor:
        return torch.empty(self._numbers(num_pages * len(self._planes)), dtype=torch.int64, pin_memory=True)
