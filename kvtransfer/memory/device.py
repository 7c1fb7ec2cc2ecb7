"""The memory of a device, as `cuda_slab` uses it: slabs, and spans that move in and out of them.

Prefill allocates a slab and exports a handle to it. Decode opens the handle. Both move spans: prefill from
its pages into a slot, decode from a mapped slot into its pages. A move runs on a stream of its own. It waits
for the work of the same process that uses the pages, and never for another process.

`CudaDevice` is the device of a GPU. `HostDevice` does the same with shared memory of the host, for tests.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...kernels.move_spans import MODULUS

Spans = npt.NDArray[np.int64]  # [n, 4], as `kernels.move_spans`, or [n, 7], as `kernels.move_rows`

HANDLE_BYTES = 64


class Move(Protocol):
    """A move under way."""

    @property
    def is_held(self) -> bool:
        """Whether it began behind unfinished forwards, so that it may take as long as they do."""

    def poll(self) -> list[int] | None:
        """The digest of each run, in order, once all runs are in place; None before. Does not wait."""

    def wait(self) -> list[int]:
        """As `poll`, but returns when all runs are in place."""


class Prepared(Protocol):
    """A move whose tables are written. It is either started or discarded, once."""

    def start(self, pages: Iterable[int]) -> Move:
        """Starts the move after the launched work that uses `pages`."""

    def discard(self) -> None:
        """Gives the tables back."""


class Device(Protocol):
    """One device and the streams of its moves. All methods belong to one thread."""

    def allocate(self, size: int) -> int:
        """The address of `size` zeroed bytes. Raises SlabError if there is not enough memory."""

    def export(self, address: int) -> bytes:
        """A handle of `HANDLE_BYTES` bytes to allocated memory.

        Whoever has it may read and write the memory. Raises SlabError if the device refuses.
        """

    def free(self, address: int) -> None:
        """Frees allocated memory, which no process may have open. Waits for its moves."""

    def open(self, handle: bytes, size: int) -> int:
        """The address of the `size` bytes that another process exported.

        Each `open` needs one `close`. Raises SlabError if the memory cannot be reached.
        """

    def close(self, handle: bytes) -> None:
        """Ends one `open`. Waits for moves; the last `close` unmaps the memory."""

    def move(
        self,
        runs: Sequence[Spans],
        pages: Iterable[int],
        *,
        is_write: bool,
        is_early: bool = False,
        longest: int | None = None,
    ) -> Move:
        """Starts to copy and digest the spans of each run, after the launched work that uses `pages`.

        All runs of a move have spans of one kind.

        `is_write`: the spans lead into the pages, and not out of them. `is_early`: the move begins behind a
        forward that may still run for long, so it waits on a stream of its own and delays no other move.
        `longest`: no span has more words; None: the device looks for the longest span.
        """

    def prepare(self, run: Spans, *, longest: int) -> Prepared | None:
        """Does what a move of one run into its pages can do before its bytes are there.

        None if too few tables are free. `longest` as for `move`.
        """


def longest_of(runs: Sequence[Spans]) -> int:
    """Words of the longest span of some runs."""
    return max(int(run[:, 2].max()) for run in runs)


def run_table(counts: Sequence[int], chunks: int) -> list[int]:
    """The rows of the runs of `kernels.move_spans`: run i has the next `counts[i]` spans, each of at most
    `chunks` chunks.
    """
    begins = accumulate(counts[:-1], initial=0)
    return [
        number for begin, count in zip(begins, counts, strict=True) for number in (begin, count, chunks, 0)
    ]


def run_digests(sums: npt.NDArray[np.int64]) -> list[int]:
    """The digest of each run of a move, from the `sums` `[runs, programs]` of its kernel."""
    return [total % MODULUS for total in sums.sum(axis=1).tolist()]
