"""Prints name, memory (bytes) and compute capability of each visible GPU, a line each, as the CUDA driver
lists them.

Prints nothing without a driver or a GPU. Exit code 1, with the reason on stderr, when the driver fails.
"""

import ctypes
import sys

DRIVER = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NAME_BYTES = 256
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class DriverError(Exception):
    """A call of the driver failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} of {DRIVER} failed with CUresult {code}; does nvidia-smi work?")
        self.code = code


def list_gpus(driver: ctypes.CDLL) -> list[tuple[str, int, int, int]]:
    """(name, bytes of memory, both parts of its compute capability) of each visible GPU. Raises
    DriverError."""

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
        found.append((name.value.decode(errors="replace"), memory.value, major.value, minor.value))
    return found


def main() -> int:
    """Prints the list; returns the exit code."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    try:
        found = list_gpus(driver)
    except DriverError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for cells in found:
        sys.stdout.write("\t".join(str(cell) for cell in cells) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
