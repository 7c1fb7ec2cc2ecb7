"""The order between forwards and copies: the work after which another stream may use a page.

Forwards run on the device's compute stream, block copies on a separate stream. Each page therefore carries
the event of the newest work that may use it. The allocator stamps the pages of an owner that leaves, because
its work may still run. The writer of a page stamps it after each write. Copies wait for the stamps of the
pages that they touch.

Debug runs (`check_uses`, on the CPU) simulate a device whose work stays unfinished until a thread waits for
it. They assert on every page that a copy touches too early.
"""

from collections.abc import Iterable
from typing import Protocol

import torch


class StreamEvent(Protocol):
    """A point on the compute stream; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether all work before the event is done."""

    def synchronize(self) -> None:
        """Return when all work before the event is done."""


class LateDevice:
    """A compute stream for debug runs: launched work stays unfinished until a thread waits for an event
    behind it.
    """

    def __init__(self) -> None:
        self.num_launched = 0
        self.num_done = 0

    def __repr__(self) -> str:
        return f"<LateDevice {self.num_done} of {self.num_launched} done>"


class LateEvent:
    """An event of a `LateDevice`, behind all work launched so far."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._at = device.num_launched

    def query(self) -> bool:
        return self._at <= self._device.num_done

    def synchronize(self) -> None:
        self._device.num_done = max(self._device.num_done, self._at)


class PageOrder:
    """The events of `num_pages` pages of a pool on `device`.

    The CPU needs none: its work is done when the call returns.

    The scheduler thread stamps, the link thread waits. One stamp per page is enough, because the compute
    stream runs in order: the newest stamp covers the older ones.
    """

    def __init__(self, num_pages: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._after: list[StreamEvent | None] = [None] * num_pages
        self._late: LateDevice | None = None
        self._last_write: list[int] = []
        self._last_use: list[int] = []  # a read or a write

    def check_uses(self) -> None:
        """Turn on the checks of a debug run; CPU only, before any page is used."""
        assert self.device.type == "cpu", "a device has events of its own"
        self._late = LateDevice()
        self._last_write, self._last_use = [0] * len(self._after), [0] * len(self._after)

    @property
    def is_checked(self) -> bool:
        """Whether callers must report every launch to `use` and every copy to `touch`."""
        return self._late is not None

    def stamp(self, pages: Iterable[int]) -> None:
        """Make later copies of `pages` wait for all work launched on the compute stream so far."""
        event = self._record()
        if event is not None:
            for page in pages:
                self._after[page] = event

    def stamp_all(self) -> None:
        """As `stamp`, of every page."""
        self.stamp(range(len(self._after)))

    def wait(self, pages: Iterable[int], stream: torch.cuda.Stream | None = None) -> bool:
        """Make `stream` wait for the stamps of `pages`. Without a stream, the calling thread waits.

        Returns whether some of the stamped work was unfinished.
        """
        is_unfinished = False
        for event in dict.fromkeys(map(self._after.__getitem__, pages)):  # events compare by identity
            if event is None or event.query():
                continue
            is_unfinished = True
            if stream is None:
                event.synchronize()
            else:
                stream.wait_event(event)  # type: ignore[arg-type]
        return is_unfinished

    def use(self, *, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Debug runs: records launched work that reads and writes these pages."""
        assert self._late is not None, "only in a debug run"
        self._late.num_launched += 1
        for page in reads:
            self._last_use[page] = self._late.num_launched
        for page in writes:
            self._last_use[page] = self._last_write[page] = self._late.num_launched

    def touch(self, page: int, *, is_write: bool) -> None:
        """Debug runs: records a copy that reads or writes `page` now.

        Asserts that earlier writes of the page are done, and before an overwrite also earlier reads.
        """
        if self._late is not None:
            last = (self._last_use if is_write else self._last_write)[page]
            assert last <= self._late.num_done, (
                f"a copy touches page {page} before launch {last} is done, which uses it: {self._late!r}"
            )

    def behind(self, first: int) -> "PageOrderPart":
        """The events of the pages from `first` on, numbered from 0: those of another pool, in this order."""
        return PageOrderPart(self, first)

    def _record(self) -> StreamEvent | None:
        return launched(self.device) if self._late is None else LateEvent(self._late)

    def __repr__(self) -> str:
        return f"<PageOrder of {len(self._after)} pages on {self.device}{', checked' * self.is_checked}>"


class PageOrderPart:
    """The pages of a pool that shares the `PageOrder` of another one, behind whose pages they are counted."""

    def __init__(self, order: PageOrder, first: int) -> None:
        self._order = order
        self._first = first

    def stamp(self, pages: Iterable[int]) -> None:
        """As `PageOrder.stamp`."""
        self._order.stamp(self._first + page for page in pages)

    def __repr__(self) -> str:
        return f"<PageOrderPart from {self._first} of {self._order!r}>"


def launched(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all work launched for `device` so far; None on the CPU, where the work is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
