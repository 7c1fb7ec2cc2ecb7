"""Times a repeated piece of work by the host's clock, and splits the time into device and host work by a
profiler.

The clock's times are taken without the profiler. A few more repeats run under the profiler, which records
CUDA activities and no operators of torch. It shows how long kernels and copies kept the device busy, and how
long the host waited for the device in a CUDA call. The rest of the host's time is its own work, including the
profiler's cost.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# Calls of the CUDA runtime and driver in which a host thread may wait. A long copy of pageable memory waits,
# too.
WAITS = ("Synchronize", "Memcpy")
SUBMIT_US = 10.0
# Rounds of steps in turn. The steps of a round are a multiple of those after which a drafter catches up.
ROUNDS, ROUND_STEPS, PROFILED_STEPS = 7, 16, 8
STEPS_IN_TURN = ROUNDS * (ROUND_STEPS + 1) + PROFILED_STEPS


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per repeat: `wall` is the median, `device` the busy time, `host` the host's own work.

    `device` and `host` are None without a GPU.

    `kernels`: (name, ms, launches) per repeat, the longest first.
    """

    wall: float
    device: float | None = None
    host: float | None = None
    kernels: list[tuple[str, float, float]] = field(default_factory=list)


class Steps(Protocol):
    """Steps of one batch, of which one may be launched and not read."""

    def step(self) -> None: ...

    def drain(self) -> None:
        """Reads the step under way."""


def measure_in_turn(batches: Sequence[Steps], device: torch.device) -> list[Timing]:
    """Times the steps of several batches in rounds, so that a clock that changes meets all alike.

    `wall` is the median over the rounds of the mean step, which counts rare long steps, too. Each batch takes
    STEPS_IN_TURN steps.
    """
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(ROUNDS):
        for batch, mine in zip(batches, times, strict=True):
            batch.step()  # whose end the first timed step waits for
            began = time.perf_counter()
            for _ in range(ROUND_STEPS):
                batch.step()
            mine.append((time.perf_counter() - began) * 1e3 / ROUND_STEPS)
            batch.drain()
    walls = [statistics.median(mine) for mine in times]
    if device.type != "cuda":
        return [Timing(wall=wall) for wall in walls]
    return [_profiled(batch.step, wall, PROFILED_STEPS) for batch, wall in zip(batches, walls, strict=True)]


def measure(run: Callable[[], object], device: torch.device, repeats: int, *, warm_ups: int = 3) -> Timing:
    """Times `repeats` calls of `run`. Each call must leave no work in flight on the device."""
    for _ in range(warm_ups):
        run()
    _settle(device)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    wall = statistics.median(times)
    if device.type != "cuda":
        return Timing(wall=wall)
    return _profiled(run, wall, max(repeats // 3, 3))


def _profiled(run: Callable[[], object], wall: float, repeats: int) -> Timing:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()  # counts as a wait
        host = (time.perf_counter() - began) * 1e3
    events = profiler.events() or []
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    calls = [
        event
        for event in events
        if event.device_type.name == "CPU" and any(call in event.name for call in WAITS)
    ]
    waited = sum(max(0.0, _microseconds(event) - SUBMIT_US) for event in calls) / 1e3
    return Timing(
        wall=wall,
        device=_busy_ms(on_device) / repeats,
        host=(host - waited) / repeats,
        kernels=_by_kernel(on_device, repeats),
    )


def _busy_ms(events: Iterable[FunctionEvent]) -> float:
    """Milliseconds covered by at least one of the events."""
    busy, end = 0.0, 0.0
    for first, last in sorted((event.time_range.start, event.time_range.end) for event in events):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / 1e3


def _by_kernel(events: Iterable[FunctionEvent], repeats: int) -> list[tuple[str, float, float]]:
    totals: dict[str, list[float]] = {}
    for event in events:
        total = totals.setdefault(event.name, [0.0, 0.0])
        total[0] += _microseconds(event) / 1e3 / repeats
        total[1] += 1 / repeats
    return sorted(((name, ms, count) for name, (ms, count) in totals.items()), key=lambda row: -row[1])


def _microseconds(event: FunctionEvent) -> float:
    return float(event.time_range.end - event.time_range.start)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
