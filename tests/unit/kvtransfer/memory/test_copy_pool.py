"""Copies and checksums by several threads are those of one, whatever the lengths, and the threads end."""

import random
import threading

import numpy as np
import pytest
from baton.kvtransfer.memory.copy_pool import (
    PART_BYTES,
    CopyPool,
    SplitCrc,
    copy_pool_of_host,
    cut,
)
from crc32c import crc32c

SIZES = (0, 1, 4095, 4096, 8191, 8192, 8193, 3 * 4096, 20_000, 100_001)


def num_threads():
    """Threads of this process that work for some `CopyPool`."""
    return sum(thread.name.startswith("copy-") for thread in threading.enumerate())


@pytest.fixture
def pool():
    before = num_threads()
    pool = CopyPool(4)
    assert num_threads() == before + 3
    yield pool
    pool.close()
    pool.close()
    assert num_threads() == before


@pytest.mark.parametrize("most", [1, 2, 4])
def test_parts_cover_everything_once_and_in_order(most):
    for size in SIZES:
        parts = cut(size, most, 4096)
        assert [at for part in parts for at in range(part.start, part.stop)] == list(range(size))
        assert len(parts) == max(1, min(most, size // 4096))
        assert {part.stop - part.start for part in parts[1:]} <= {4096}
        assert parts[0].stop >= min(size, 4096)


def test_the_checksum_of_parts_is_that_of_the_whole(pool):
    rng = random.Random(1)
    split = SplitCrc(pool, part_bytes=4096)
    for size in SIZES:
        data = rng.randbytes(size)
        for seed in (0, 1, 0xFFFFFFFF, rng.getrandbits(32)):
            assert split(memoryview(data), seed) == crc32c(data, seed), (size, seed)


def test_a_changed_byte_or_two_swapped_parts_change_the_checksum(pool):
    split = SplitCrc(pool, part_bytes=4096)
    data = bytearray(random.Random(1).randbytes(4 * 4096))
    whole = split(memoryview(data), 5)
    for at in (0, 4095, 4096, 8192, 3 * 4096, 4 * 4096 - 1):
        data[at] ^= 1
        assert split(memoryview(data), 5) != whole
        data[at] ^= 1
    assert split(memoryview(data), 5) == whole
    assert split(memoryview(data[4096:8192] + data[:4096] + data[8192:]), 5) != whole


def test_a_copy_of_parts_is_whole_and_touches_nothing_behind_it(pool):
    source = np.random.default_rng(1).integers(0, 256, 3 * PART_BYTES + 7, dtype=np.uint8)
    target = np.zeros(source.size + 100, dtype=np.uint8)
    pool.copy(target, source)
    assert np.array_equal(target[: source.size], source)
    assert not target[source.size :].any()


def test_an_error_in_any_thread_is_raised_to_the_caller(pool):
    for bad in range(3):
        with pytest.raises(ZeroDivisionError):
            pool.each(lambda part, bad=bad: 1 // (part - bad), [0, 1, 2])
    assert pool.each(lambda part: -part, list(range(20))) == [-part for part in range(20)]


def test_a_digest_keeps_no_reference_to_its_buffer(pool):
    split, data = SplitCrc(pool, part_bytes=4096), bytearray(5 * 4096)
    with memoryview(data) as view:
        digest = split(view, 9)
    pool.close()
    data.clear()  # refused while anybody has a view
    assert split(memoryview(bytes(5 * 4096)), 9) == digest == crc32c(bytes(5 * 4096), 9)


def test_a_small_host_works_with_the_callers_thread_alone(monkeypatch):
    before = num_threads()
    for cores, wanted in ((1, 1), (7, 1), (8, 2), (16, 4), (128, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        pool = copy_pool_of_host()
        assert pool.num_threads == wanted
        assert (pool.crc is crc32c) is (wanted == 1)
        pool.close()
    assert num_threads() == before
