"""malloc limits for a process that moves KV blocks.

libzmq allocates each message that it receives and frees it after the read. By default, glibc's malloc maps a
new region for each block of this size, or returns it to the system at once, so each block costs its page
faults (measured over ipc, both processes: 1.1 s of CPU time per GB, against 0.6 s with these limits). With
these limits, freed blocks stay in the heap for the next ones.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 256 << 20  # free memory kept at the heap's end
LARGEST_IN_HEAP = 32 << 20  # the largest value that glibc accepts; larger allocations are mapped


def keep_blocks() -> bool:
    """Sets the limits for this process. Returns False if the C library has no such limits."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
