"""Freed blocks stay in the heap: the next one costs no page faults."""

import subprocess
import sys

PROGRAM = """
import ctypes, resource, sys
from baton.kvtransfer.memory.malloc_tuning import keep_blocks
if sys.argv[1] == "kept":
    assert keep_blocks()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    block = libc.malloc(40 << 18)  # ten MiB
    ctypes.memset(block, 1, 40 << 18)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
libc.malloc(1 << 26)  # glibc learns from what is freed; a program that frees and keeps many sizes does not stay there
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""  # noqa: E501


def faults(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


def test_the_next_block_costs_no_page_faults():
    assert faults("kept") < 200 < faults("default")
