"""The order between forwards and copies: after which launched work a page may be read or written by another stream.

Forwards run on the device's compute stream, block copies on a stream of their own. A page therefore carries the event
behind the newest work that may use it. The allocator stamps pages that it hands out (work of their owners before may
still run), the writer of a page stamps it after each write, and copies wait for the stamps of the pages that they touch.

Debug runs (`check_uses`, on the CPU) play a device whose work is never done before somebody waits for it, and assert on
every page that a copy touches too early.
"""

from collections.abc import Iterable
from typing import Protocol

import torch


class Event(Protocol):
    """A point on the compute stream; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether all work before it is done."""

    def synchronize(self) -> None:
        """Return when all work before it is done."""


class LateDevice:
    """A compute stream for debug runs: launched work stays undone until an event behind it is waited for."""

    def __init__(self) -> None:
        self.num_launched = 0
        self.num_done = 0

    def __repr__(self) -> str:
        return f"<LateDevice {self.num_done} of {self.num_launched} done>"


class LateEvent:
    """An event of a `LateDevice`, behind all that is launched now."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._at = device.num_launched

    def query(self) -> bool:
        return self._at <= self._device.num_done

    def synchronize(self) -> None:
        self._device.num_done = max(self._device.num_done, self._at)


class PageOrder:
    """The events of `num_pages` pages of a pool on `device`. On the CPU work is done when it returns: no event exists.

    The scheduler thread stamps, the link thread waits. A page has one stamp, the newest: the compute stream runs in order,
    so that stamp covers the older ones.
    """

    def __init__(self, num_pages: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._after: list[Event | None] = [None] * num_pages
        self._late: LateDevice | None = None
        self._last_write: list[int] = []
        self._last_use: list[int] = []  # a read or a write

    def check_uses(self) -> None:
        """Turn the checks of a debug run on; CPU only, before any page is used."""
        assert self.device.type == "cpu", "a device has events of its own"
        self._late = LateDevice()
        self._last_write, self._last_use = [0] * len(self._after), [0] * len(self._after)

    @property
    def is_checked(self) -> bool:
        """Whether `use` must be told of every launch and `touch` of every copy."""
        return self._late is not None

    def stamp(self, pages: Iterable[int]) -> None:
        """Copies that touch `pages` from now on wait for all that was launched on the compute stream so far."""
        event = self._record()
        if event is not None:
            for page in pages:
                self._after[page] = event

    def wait(self, pages: Iterable[int], stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` wait for the stamps of `pages`; without a stream the calling thread waits."""
        events = [self._after[page] for page in pages]
        for event in {id(event): event for event in events if event is not None}.values():
            if event.query():
                continue
            if stream is None:
                event.synchronize()
            else:
                stream.wait_event(event)  # type: ignore[arg-type]

    def finish(self, pages: Iterable[int]) -> None:
        """Return when the stamped work of `pages` is done, so that no copy of them has to wait for it.

        For pace only. A debug run skips it, to see whether the copies wait themselves.
        """
        if not self.is_checked:
            self.wait(pages)

    def use(self, *, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Debug runs: work that reads and writes these pages was launched."""
        assert self._late is not None, "only in a debug run"
        self._late.num_launched += 1
        for page in reads:
            self._last_use[page] = self._late.num_launched
        for page in writes:
            self._last_use[page] = self._last_write[page] = self._late.num_launched

    def touch(self, page: int, *, is_write: bool) -> None:
        """Debug runs: a copy reads or writes `page` now. Asserts that the work is done which writes the page or, before it
        is overwritten, reads it.
        """
        if self._late is not None:
            last = (self._last_use if is_write else self._last_write)[page]
            assert last <= self._late.num_done, (
                f"a copy touches page {page} before launch {last} is done, which uses it: {self._late!r}"
            )

    def _record(self) -> Event | None:
        return launched(self.device) if self._late is None else LateEvent(self._late)

    def __repr__(self) -> str:
        return f"<PageOrder of {len(self._after)} pages on {self.device}{', checked' * self.is_checked}>"


def launched(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that was launched for `device` so far; None on the CPU, where it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
