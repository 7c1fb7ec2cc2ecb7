"""Shared memory itself: who gets it, what it allows, and that nothing is left of it."""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import socket
from pathlib import Path

import numpy as np
import pytest
from baton.kvtransfer.memory import slab as slab_module
from baton.kvtransfer.memory.slab import (
    MappedSlab,
    Slab,
    SlabDoor,
    SlabError,
    is_alive,
)
from baton.kvtransfer.memory.slab_slots import SlabSlots
from baton.tests.cluster.hostile import hostile_frames

TOKEN = "7" * 32


def maps() -> int:
    """How many slabs this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:baton-slab")


def descriptors() -> set[tuple[str, str]]:
    """Numbers and what they are of. One of an earlier test may be closed at any moment."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def anywhere(_: str) -> bool:
    return True


def is_quiet(connection: socket.socket) -> bool:
    """Whether the connection is open, without data."""
    connection.setblocking(False)
    return is_alive(connection)


@pytest.fixture
def door():
    door = SlabDoor()
    yield door
    door.close()


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = maps(), descriptors()
    yield
    assert maps() == before[0]
    assert not descriptors() - before[1]


def share(
    door: SlabDoor, num_slots: int = 3, slot_bytes: int = 4096
) -> tuple[Slab, socket.socket, MappedSlab]:
    slab = Slab(num_slots, slot_bytes)
    connection = slab.hand_over(door.address, TOKEN)
    arrived = door.take(TOKEN, anywhere)
    assert arrived is not None
    return slab, connection, MappedSlab(slab.id, num_slots, slot_bytes, *arrived)


def test_a_token_that_comes_behind_its_connection_is_awaited(door):
    slab = Slab(3, 4096)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as prefill:
        prefill.connect(f"\0baton-{door.address}")
        door.sweep(anywhere, lambda _: False)
        socket.send_fds(prefill, [TOKEN.encode()], [slab._fd])
        arrived = door.take(TOKEN, anywhere)
        assert arrived is not None
        MappedSlab(slab.id, 3, 4096, *arrived).close()
    slab.close()


def test_connections_without_a_token_are_limited(door):
    silent = []
    for _ in range(3):
        for _ in range(slab_module.BACKLOG - 1):
            silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent[-1].connect(f"\0baton-{door.address}")
        door.sweep(anywhere, lambda _: False)
    assert sum(map(is_quiet, silent)) == slab_module.BACKLOG
    for connection in silent:
        connection.close()


def test_decode_reads_what_prefill_writes_and_cannot_write_it(door):
    slab, connection, mapped = share(door)
    slab.slot(1)[:] = np.arange(4096, dtype=np.uint32).astype(np.uint8)
    assert bytes(mapped.block(1, 300)) == bytes(slab.slot(1)[:300])
    assert not mapped.block(0, 4096).any()
    with pytest.raises(ValueError, match="read-only"):
        mapped.block(1, 10)[0] = 1
    assert is_alive(connection)
    mapped.close()
    assert not is_alive(connection)
    slab.close()
    connection.close()


def test_pinned_memory_is_unregistered_once_before_it_is_unmapped(door):
    slab, connection, mapped = share(door)
    for end in (slab, mapped):
        pinned: list[np.ndarray] = []
        withdrawn: list[int] = []

        def pin(memory, pinned=pinned, withdrawn=withdrawn):
            pinned.append(memory)
            return lambda: withdrawn.append(int(pinned.pop()[-1]))  # reads the memory, which must be there

        assert not end.is_pinned
        end.pin(pin)
        assert end.is_pinned
        assert pinned[0].size == 3 * 4096
        assert not withdrawn
        end.close()
        end.close()
        assert (withdrawn, end.is_pinned) == ([0], False)
    connection.close()


def test_where_the_driver_refuses_a_slab_is_not_pinned_and_works(door):
    slab, connection, mapped = share(door)
    for end in (slab, mapped):
        end.pin(lambda memory: None)
        assert not end.is_pinned
    slab.slot(2)[:] = 7
    assert bytes(mapped.block(2, 4096)) == b"\x07" * 4096
    mapped.close()
    slab.close()
    connection.close()


def test_a_slot_that_does_not_exist_is_not_read(door):
    slab, connection, mapped = share(door)
    for slot, size in [(-1, 1), (3, 1), (2**31 - 1, 1), (0, 4097), (2, -1), (0, 2**48)]:
        assert mapped.block(slot, size) is None
    mapped.close()
    slab.close()
    connection.close()


def test_the_descriptor_allows_neither_another_size_nor_a_writable_mapping(door):
    slab = Slab(2, 4096)
    connection = slab.hand_over(door.address, TOKEN)
    fd, other_end = door.take(TOKEN, anywhere)
    for size in (4096, 3 * 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, slab_module.F_ADD_SEALS, 0)
    os.close(fd)
    for end in (connection, other_end):
        end.close()
    slab.close()


def handed(fd: int, door: SlabDoor, token: str = TOKEN) -> tuple[int, socket.socket] | None:
    """What decode gets when somebody gives `fd` away under `token`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0baton-{door.address}")
        socket.send_fds(stranger, [token.encode()], [fd])
        return door.take(TOKEN, TOKEN.__eq__)


@pytest.mark.parametrize("seals", [0, 0x02 | 0x04, 0x01 | 0x02 | 0x10], ids=["none", "size only", "may grow"])
def test_memory_that_is_not_sealed_is_not_mapped(door, seals):
    fd = os.memfd_create("stranger", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, slab_module.F_ADD_SEALS, seals)
    arrived = handed(fd, door)
    os.close(fd)
    with pytest.raises(SlabError, match="not sealed"):
        MappedSlab("a" * 32, 1, 4096, *arrived)


def test_a_file_is_not_mapped(door, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open() as file:
        arrived = handed(file.fileno(), door)
    with pytest.raises(SlabError, match="no sealed memory"):
        MappedSlab("a" * 32, 1, 4096, *arrived)


def test_a_slab_of_another_size_or_user_is_not_mapped(door, monkeypatch):
    for num_slots, user, fault in [
        (2, os.geteuid(), "has 4096 bytes"),
        (1, os.geteuid() + 1, "belongs to user"),
    ]:
        slab = Slab(1, 4096)
        connection = slab.hand_over(door.address, TOKEN)
        arrived = door.take(TOKEN, anywhere)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(SlabError, match=fault):
            MappedSlab(slab.id, num_slots, 4096, *arrived)
        monkeypatch.undo()
        assert not is_alive(connection)
        connection.close()
        slab.close()


def test_a_descriptor_with_an_unknown_token_is_closed(door):
    fd = os.memfd_create("baton-slab")
    assert handed(fd, door, token="8" * 32) is None
    assert handed(fd, door, token="x") is None
    os.close(fd)


def test_s2_s3_hostile_frames_and_descriptors_close_the_connection(door):
    with open("/dev/null", "rb") as null:  # more descriptors than one, or none, and any bytes beside them
        for number, frame in enumerate(hostile_frames()):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(slab_module._abstract(door.address))
                socket.send_fds(stranger, [frame[:256] or b"?"], [null.fileno()] * (number % 4))
            assert door.take(TOKEN, lambda token: token == TOKEN) is None
    slab, connection, mapped = share(door)
    assert bytes(mapped.block(0, 16)) == bytes(16)
    mapped.close()
    slab.close()
    connection.close()


def test_another_users_peer_is_refused_on_both_sides(door, monkeypatch):
    other = os.geteuid() + 1
    slab = Slab(1, 4096)
    connection = slab.hand_over(door.address, TOKEN)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert door.take(TOKEN, anywhere) is None
    fresh = Slab(1, 4096)
    with pytest.raises(SlabError, match="runs as user"):
        fresh.hand_over(door.address, TOKEN)
    for closing in (slab, fresh, connection):
        closing.close()


def test_a_peer_of_another_host_is_recognised(door):
    slab = Slab(1, 4096)
    with pytest.raises(SlabError, match="another host"):
        slab.hand_over(secrets.token_hex(16), TOKEN)
    slab.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_missing_memory_is_an_error_before_any_write(monkeypatch, error):
    def full(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SlabError, match="no 8 MiB of shared memory"):
        Slab(8, 1 << 20)


def test_a_slot_has_one_block_and_a_block_one_slot():
    table = SlabSlots(2)
    first, second = (table.take(("r", 0, block), 5.0) for block in (0, 1))
    assert {first.index, second.index} == {0, 1}
    assert table.take(("r", 0, 2), 5.0) is None
    assert table.take(("r", 0, 0), 9.0) is first, "a block that is pulled again stands where it stood"
    assert not table.free(("r", 0, 0), second.index)
    assert not table.free(("r", 1, 0), first.index)
    table.check_integrity()
    assert table.free(("r", 0, 0), first.index)
    assert not table.free(("r", 0, 0), first.index)
    table.check_integrity()
    assert table.take(("s", 0, 0), 7.0).index == first.index
    table.free_where(lambda holder, ends_at: ends_at <= 5.0)
    assert repr(table) == "SlabSlots(1/2 held)"
    table.check_integrity()
