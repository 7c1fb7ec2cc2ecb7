"""The conditions and actions of a proxy's rules for messages, `Way.rule`."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.tests.faults.zmtp_wire import Message

When = Callable[[Message], bool]


@dataclass(frozen=True)
class Emit:
    """Bytes to pass on, `after_s` later than they would have been; `ends` the connection behind them."""

    data: bytes
    after_s: float = 0.0
    ends: bool = False


class Holder(Protocol):
    """Where messages wait: a direction of a proxy."""

    held: list[Message]
    parked: list[Message]


Act = Callable[[Holder, Message], Sequence[Emit]]


# --- which messages -----------------------------------------------------------------------------------------


def verb(*names: str, **wanted: object) -> When:
    """Messages of these types whose fields have these values."""

    def matches(message: Message) -> bool:
        found = message.fields()
        return found.get("type") in names and all(found.get(key) == value for key, value in wanted.items())

    return matches


def nth(first: int, when: When, every: int = 0) -> When:
    """Of the messages that match, number `first` (from 0), and each `every`-th after it."""
    count = itertools.count(-first)

    def matches(message: Message) -> bool:
        if not when(message):
            return False
        i = next(count)
        return i == 0 or (every > 0 and i > 0 and i % every == 0)

    return matches


def anything(message: Message) -> bool:
    """Every data message."""
    return True


def share(rate: float, rng: random.Random, when: When = anything) -> When:
    """Each matching message with probability `rate`."""
    return lambda message: when(message) and rng.random() < rate


# --- what happens to them -----------------------------------------------------------------------------------


def passed(way: Holder, message: Message) -> list[Emit]:
    return [Emit(message.wire())]


def drop(way: Holder, message: Message) -> list[Emit]:
    return []


def duplicate(after_s: float = 0.0, times: int = 1) -> Act:
    return lambda way, message: [Emit(message.wire()), *(Emit(message.wire(), after_s) for _ in range(times))]


def late(seconds: float) -> Act:
    """Later messages overtake it."""
    return lambda way, message: [Emit(message.wire(), seconds)]


def hold(way: Holder, message: Message) -> list[Emit]:
    """Kept until `way.release()`."""
    way.held.append(message)
    return []


def overtaken(way: Holder, message: Message) -> list[Emit]:
    """Goes out behind the next message."""
    way.parked.append(message)
    return []


def flip(frame: int, bit: int) -> Act:
    """One bit of one frame is another; negative bits count from the end of the frame."""

    def act(way: Holder, message: Message) -> list[Emit]:
        data = bytearray(message.frames[frame])
        at = bit % (8 * len(data))
        data[at // 8] ^= 1 << at % 8
        return [Emit(message.with_frame(frame, bytes(data)).wire())]

    return act


def truncate(frame: int, size: int) -> Act:
    """A frame loses what is beyond `size` bytes; the framing stays right."""
    return lambda way, message: [Emit(message.with_frame(frame, message.frames[frame][:size]).wire())]


def change(function: Callable[[Message], Sequence[Message]]) -> Act:
    """Other messages go in its place."""
    return lambda way, message: [Emit(other.wire()) for other in function(message)]


def cut(num_bytes: int = 0) -> Act:
    """The connection ends after `num_bytes` bytes of the message."""
    return lambda way, message: [Emit(message.wire()[:num_bytes], ends=True)]


@dataclass(eq=False)
class Rule:
    """`do` happens to the first `times` messages that match; None: to all. `num_done` counts."""

    when: When
    do: Act
    times: int | None = None
    num_done: int = 0

    def wait(self, count: int = 1, timeout: float = 30.0) -> None:
        """Until `count` messages have matched."""
        end = time.monotonic() + timeout
        while self.num_done < count:
            assert time.monotonic() < end, f"{self.num_done} of {count} messages came within {timeout} s"
            time.sleep(0.005)
