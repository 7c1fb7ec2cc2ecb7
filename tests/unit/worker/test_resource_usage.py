"""A worker's use of CPU, memory and GPU, with a fake NVML."""

import ctypes
import time

from baton.worker.resource_usage import EVERY_S, GpuReading, NvmlGpu, ResourceMeter, resident_bytes


def test_the_cpu_is_averaged_between_readings_and_read_once_a_second():
    now, cpu = [100.0], [5.0]
    meter = ResourceMeter(clock=lambda: now[0], cpu_clock=lambda: cpu[0], resident=lambda: 7)
    assert meter.read() is None
    now[0] += 2 * EVERY_S
    cpu[0] += 3.0
    usage = meter.read()
    assert (usage.cpu_cores, usage.memory_bytes, usage.gpu_busy) == (1.5, 7, None)
    assert usage.num_cores >= 1
    now[0] += EVERY_S / 2
    cpu[0] += 9.0
    assert meter.read() is usage


def test_the_gpu_is_read_in_a_thread_of_its_own_until_it_is_silent():
    readings = [GpuReading(0.5, 30, 40), None]
    meter = ResourceMeter(lambda: readings.pop(0), clock=lambda: now[0]) if (now := [0.0]) else None
    deadline = time.monotonic() + 10
    while len(readings) == 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    now[0] += EVERY_S
    usage = meter.read()
    assert (usage.gpu_busy, usage.gpu_memory_bytes, usage.gpu_memory_total) == (0.5, 30, 40)


class FakeNvml:
    """The four functions of NVML that are used."""

    def __init__(self):
        self.fails = False
        self.asked = b""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.asked = uuid
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong * 3)).contents[:] = (40, 10, 30)
        return int(self.fails)

    def nvmlDeviceGetUtilizationRates(self, handle, rates):
        ctypes.cast(rates, ctypes.POINTER(ctypes.c_uint * 2)).contents[:] = (80, 5)
        return 0


def test_nvml_is_asked_by_uuid_and_no_more_once_it_fails():
    library = FakeNvml()
    gpu = NvmlGpu(library, "1234")
    assert library.asked == b"GPU-1234"
    assert gpu.read() == GpuReading(0.8, 30, 40)
    library.fails = True
    assert gpu.read() is None
    library.fails = False
    assert gpu.read() is None


def test_a_live_process_has_memory():
    assert resident_bytes() > 1 << 20
