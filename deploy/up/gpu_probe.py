"""Prints each visible GPU of the CUDA driver, a line each: name, memory, free memory, compute capability.

Memory is in bytes. Free memory comes from NVML, which needs no context on the GPU. Without NVML, and for a
part of a GPU (MIG), whose free memory NVML does not tell, all memory counts as free. Prints nothing without a
driver or a GPU. Exit code 1, with the reason on stderr, when the driver fails.
"""

import ctypes
import sys

DRIVER, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NAME_BYTES, BUS_ID_BYTES = 256, 32
PART_OF_GPU = 0.9  # a CUDA device with less than this share of the memory that NVML shows is a part of a GPU
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class DriverError(Exception):
    """A call of the driver failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} of {DRIVER} failed with CUresult {code}; does nvidia-smi work?")
        self.code = code


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def list_gpus(driver: ctypes.CDLL, nvml: ctypes.CDLL | None = None) -> list[tuple[str, int, int, int, int]]:
    """(name, bytes of memory, bytes that are free, both parts of its compute capability) of each visible GPU.

    Raises DriverError.
    """

    def call(function: str, *arguments: object) -> None:
        code = getattr(driver, function)(*arguments)
        if code:
            raise DriverError(function, code)

    try:
        call("cuInit", 0)
    except DriverError as error:
        if error.code == NO_DEVICE:
            return []
        raise
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    found = []
    for ordinal in range(count.value):
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        name = ctypes.create_string_buffer(NAME_BYTES)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDeviceGetName", name, NAME_BYTES, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        major, minor = ctypes.c_int(), ctypes.c_int()
        for part, attribute in ((major, MAJOR), (minor, MINOR)):
            call("cuDeviceGetAttribute", ctypes.byref(part), attribute, device)
        bus = ctypes.create_string_buffer(BUS_ID_BYTES)
        call("cuDeviceGetPCIBusId", bus, BUS_ID_BYTES, device)
        free = memory.value if nvml is None else free_bytes(nvml, bus.value, memory.value)
        found.append((name.value.decode(errors="replace"), memory.value, free, major.value, minor.value))
    return found


def free_bytes(nvml: ctypes.CDLL, bus_id: bytes, memory: int) -> int:
    """Free bytes of the GPU at `bus_id`, whose CUDA device has `memory` bytes; `memory` if NVML does not
    tell.
    """
    handle, told = ctypes.c_void_p(), _Memory()
    try:
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle)):
            return memory
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(told)) or memory < PART_OF_GPU * told.total:
            return memory
    except AttributeError:  # a library without one of these functions
        return memory
    return min(memory, int(told.free))


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def main() -> int:
    """Prints the list; returns the exit code."""
    driver = _library(DRIVER)
    if driver is None:
        return 0
    try:
        found = list_gpus(driver, _library(NVML))
    except DriverError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for cells in found:
        sys.stdout.write("\t".join(str(cell) for cell in cells) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
