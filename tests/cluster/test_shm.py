"""Slabs between real processes: right bytes, and nothing left whoever is killed and whenever.

For `cuda_slab`, shared memory of the host stands for that of a device.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from baton.tests.cluster import shm_peer
from baton.tests.cluster.slab_peers import Peer, hand_over, started_peers, wait_for

GONE_S = 60.0
BLOCKS = 24


def holds(pid: int) -> int:
    """Slabs that a process has mapped or open."""
    maps = Path(f"/proc/{pid}/maps").read_text().count("baton-slab")
    return maps + sum("baton-slab" in link for link in _descriptors(pid))


def _descriptors(pid: int) -> list[str]:
    """What each is of; the process may close some meanwhile."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def sockets_of(pid: int) -> set[str]:
    """Their inodes."""
    return {link[8:-1] for link in _descriptors(pid) if link.startswith("socket:[")}


def named_sockets() -> set[str]:
    """The inodes of all sockets of this host over which slabs are passed, whosever they are."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[6] for line in lines if "@baton-" in line}


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    """Starts processes of shm_peer; behind the test nothing with a name is left of any of them."""
    before = set(os.listdir("/dev/shm"))
    with started_peers() as start:
        yield start
    wait_for(lambda: set(os.listdir("/dev/shm")) <= before)  # others have names there for a moment


@pytest.fixture(params=["shm", "cuda_slab"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/kv"


def slow(kind: str, fault: str) -> object:
    return pytest.param(kind, fault, marks=pytest.mark.slow)


def test_all_blocks_use_shared_memory_and_an_orderly_end_leaves_none(start, endpoint, kind):
    prefill = start(shm_peer.prefill, endpoint, kind)
    decode = start(shm_peer.decode, endpoint, kind)
    assert hand_over(prefill, decode, 0, 5) == [("complete", True, BLOCKS)] * 5
    assert holds(prefill.pid) >= 1
    assert holds(decode.pid) >= 1
    decode.stop()
    wait_for(lambda: holds(prefill.pid) == 0, GONE_S)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("shm", "sender:block:30"),
        slow("shm", "sender:block:1"),
        slow("shm", "sender:release:1"),
        ("cuda_slab", "sender:gather:8"),
        ("cuda_slab", "sender:block:8"),
        slow("cuda_slab", "sender:gather:1"),
        slow("cuda_slab", "sender:block:1"),
        slow("cuda_slab", "sender:release:1"),
    ],
)
def test_a_killed_prefill_leaves_no_slab_and_its_successor_shares_again(start, endpoint, kind, fault):
    prefill = start(shm_peer.prefill, endpoint, kind, fault)
    decode = start(shm_peer.decode, endpoint, kind)
    decode.pipe.send((prefill.hello, 0, 2))
    prefill.wait_dead()
    wait_for(lambda: holds(decode.pid) == 0, GONE_S)
    outcomes = [decode.hear(), decode.hear()]
    assert all(is_right is True for kind, is_right, _ in outcomes if kind == "complete")
    assert outcomes[1][0] == "lost"
    successor = start(shm_peer.prefill, endpoint, kind)
    assert hand_over(successor, decode, 10, 14)[-1] == (
        "complete",
        True,
        BLOCKS,
    )  # the first may come before the connection


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("shm", "receiver:block:30"),
        slow("shm", "receiver:block:1"),
        slow("shm", "receiver:release:1"),
        ("cuda_slab", "receiver:scatter:8"),
        ("cuda_slab", "receiver:block:8"),
        slow("cuda_slab", "receiver:scatter:1"),
        slow("cuda_slab", "receiver:block:1"),
        slow("cuda_slab", "receiver:release:1"),
    ],
)
def test_a_killed_decode_leaves_no_slab_and_its_successor_shares_again(start, endpoint, kind, fault):
    prefill = start(shm_peer.prefill, endpoint, kind)
    decode = start(shm_peer.decode, endpoint, kind, fault)
    decode.pipe.send((prefill.hello, 0, 2))
    decode.wait_dead()
    wait_for(lambda: holds(prefill.pid) == 0, GONE_S)
    successor = start(shm_peer.decode, endpoint, kind)
    assert hand_over(prefill, successor, 10, 12) == [("complete", True, BLOCKS)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("nth", range(1, 60, 3))
def test_a_kill_of_both_at_any_block_leaves_nothing_with_a_name(start, endpoint, kind, nth):
    prefill = start(shm_peer.prefill, endpoint, kind, f"sender:block:{nth}")
    decode = start(shm_peer.decode, endpoint, kind)
    decode.pipe.send((prefill.hello, 0, 12))  # a room has six runs
    prefill.wait_dead()
    decode.kill()
    assert all(not Path(f"/proc/{peer.pid}/maps").exists() for peer in (prefill, decode))


def test_a_kill_of_both_frees_the_memory(start, endpoint, kind):
    prefill = start(shm_peer.prefill, endpoint, kind)
    decode = start(shm_peer.decode, endpoint, kind)
    assert hand_over(prefill, decode, 0, 1) == [("complete", True, BLOCKS)]
    ours = named_sockets() & (sockets_of(prefill.pid) | sockets_of(decode.pid))
    assert ours
    prefill.kill()
    decode.kill()
    assert not ours & named_sockets()


def test_f39_prefill_without_permission_for_shared_memory_falls_back(start, endpoint, kind):
    prefill = start(
        shm_peer.prefill, endpoint, kind, "", 64 << 10
    )  # EFBIG stands for ENOSPC: a memfd has no tmpfs of its own
    decode = start(shm_peer.decode, endpoint, kind)
    assert hand_over(prefill, decode, 0, 3) == [("complete", True, 0)] * 3
    assert holds(prefill.pid) == holds(decode.pid) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")
def test_a_decode_worker_in_another_container_gets_messages(start, endpoint, kind):
    prefill = start(shm_peer.prefill, endpoint, kind)
    decode = start(shm_peer.decode, endpoint, kind, "", True)
    assert hand_over(prefill, decode, 0, 3) == [("complete", True, 0)] * 3
    assert holds(prefill.pid) == holds(decode.pid) == 0


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_a_stopped_worker_costs_rooms_and_no_wrong_byte(start, endpoint, kind, stopped):
    """Neither side waits for a stopped peer longer than a lease, and a late reader takes nothing wrong."""
    prefill = start(shm_peer.prefill, endpoint, kind, "", 0, 1.0)
    decode = start(shm_peer.decode, endpoint, kind)
    assert hand_over(prefill, decode, 0, 2) == [("complete", True, BLOCKS)] * 2
    decode.pipe.send((prefill.hello, 2, 30))
    assert decode.hear() == ("complete", True, BLOCKS)
    victim = prefill if stopped == "prefill" else decode
    os.kill(victim.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(victim.pid, signal.SIGCONT)
    outcomes = [decode.hear() for _ in range(3, 30)]
    assert all(is_right is True for ended, is_right, _ in outcomes if ended == "complete")
    successor = start(shm_peer.prefill, f"{endpoint}2", kind)
    decode.stop()
    fresh = start(shm_peer.decode, f"{endpoint}2", kind)
    assert hand_over(successor, fresh, 30, 32) == [("complete", True, BLOCKS)] * 2
