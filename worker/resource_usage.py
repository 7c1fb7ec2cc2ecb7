"""The CPU, memory and GPU that a worker process uses, for its heartbeats.

CPU time and memory are the process's own. The GPU's figures come from NVML and are those of the whole GPU,
with every process on it. A thread asks NVML, because one call may take milliseconds and the scheduler's loop
sends the heartbeats.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ..cluster.protocol.messages import ResourceUsage

EVERY_S = 1.0
NVML = "libnvidia-ml.so.1"
STATM = Path("/proc/self/statm")


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuReading(NamedTuple):
    """One reading of a GPU: the share of the last second with a kernel on it, and bytes of memory."""

    busy: float
    used: int
    total: int


class NvmlGpu:
    """One GPU through NVML. `read` returns None once NVML does not answer, as for a part of a GPU (MIG)."""

    def __init__(self, library: ctypes.CDLL, uuid: str) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle))
        self._is_there = not failed

    def read(self) -> GpuReading | None:
        if not self._is_there:
            return None
        memory, busy = _Memory(), _Utilization()
        library, handle = self._library, self._handle
        self._is_there = not (
            library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            or library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy))
        )
        return GpuReading(busy.gpu / 100, memory.used, memory.total) if self._is_there else None


class ResourceMeter:
    """Reads the use of resources at most once in EVERY_S. `gpu` reads the GPU; without it there is none."""

    def __init__(
        self,
        gpu: Callable[[], GpuReading | None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        resident: Callable[[], int] | None = None,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._resident = resident or resident_bytes
        self._at, self._cpu_s = clock(), cpu_clock()
        self._last: ResourceUsage | None = None
        self._gpu: GpuReading | None = None
        if gpu is not None:
            threading.Thread(target=self._watch, args=(gpu,), name="gpu-usage", daemon=True).start()

    def read(self) -> ResourceUsage | None:
        """The use since the reading before; None before the first second is over."""
        now = self._clock()
        if now - self._at < EVERY_S:
            return self._last
        cpu_s, gpu = self._cpu_clock(), self._gpu
        self._last = ResourceUsage(
            cpu_cores=round((cpu_s - self._cpu_s) / (now - self._at), 3),
            num_cores=num_cores(),
            memory_bytes=self._resident(),
            gpu_busy=None if gpu is None else gpu.busy,
            gpu_memory_bytes=0 if gpu is None else gpu.used,
            gpu_memory_total=0 if gpu is None else gpu.total,
        )
        self._at, self._cpu_s = now, cpu_s
        return self._last

    def _watch(self, gpu: Callable[[], GpuReading | None]) -> None:
        while (found := gpu()) is not None:
            self._gpu = found
            time.sleep(EVERY_S)
        self._gpu = None


def meter_of(device: torch.device) -> ResourceMeter:
    """The meter of a worker on `device`."""
    if device.type != "cuda":
        return ResourceMeter()
    try:
        gpu = NvmlGpu(ctypes.CDLL(NVML), str(torch.cuda.get_device_properties(device).uuid))
    except (OSError, AttributeError):  # no NVML, or one without these functions
        return ResourceMeter()
    return ResourceMeter(gpu.read)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def resident_bytes() -> int:
    """The memory of this process that is in RAM, in bytes; 0 where /proc is not there."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
