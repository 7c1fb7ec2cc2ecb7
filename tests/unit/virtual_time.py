"""An event loop whose clock moves only when all tasks wait: tests of seconds take no time and are exact."""

import asyncio
import selectors
from dataclasses import dataclass


@dataclass
class Clock:
    """A clock that stands still until a test moves `now` (seconds)."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    """Waits for nothing: the time that would pass passes on the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = None

    def select(self, timeout=None):
        found = super().select(0)
        if not found and timeout:
            self.loop.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now` is its time; whoever adds to it within a callback has kept the loop busy for so long."""

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop, self.now = self, 0.0

    def time(self) -> float:
        return self.now


def run(main):
    """The result of a coroutine in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
