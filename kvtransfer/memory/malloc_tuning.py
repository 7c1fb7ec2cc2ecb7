"""malloc limits for a process that moves KV blocks.

libzmq allocates each message that it receives and frees it after it was read. By default glibc's malloc maps a block of
this size anew each time, or returns it to the system at once, so each block costs its page faults (measured over ipc, both
processes: 1.1 s of CPU time per GB, 0.6 without). With these limits freed blocks stay in the heap for the next ones.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 256 << 20  # free memory at the heap's end that is not given back
LARGEST_IN_HEAP = 32 << 20  # the most that glibc takes; larger allocations are mapped


def keep_blocks() -> bool:
    """Sets the limits for this process; False where the C library has no such limits."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
