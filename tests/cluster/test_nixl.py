"""Blocks through NIXL between real processes, over UCX on tcp: right bytes, whoever dies and whenever."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from baton.cluster.net.transport_names import has_nixl
from baton.deploy.cli.findings import check_paths
from baton.kvtransfer.transports.shm import ASK_AGAIN_S
from baton.tests.cluster import shm_peer
from baton.tests.cluster.serving import complete, random_ids, serving, status, wait_until
from baton.tests.cluster.slab_peers import Peer, hand_over, started_peers, wait_for
from baton.tests.parity.toy_models import reference_greedy, reference_model

pytestmark = pytest.mark.skipif(not has_nixl(), reason="needs the extra nixl")

BLOCKS = 24
GOOD = ("complete", True, BLOCKS)


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    with started_peers() as start:
        yield start


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/kv"


def connect(prefill: Peer, decode: Peer, room: int = 0) -> int:
    """Hands rooms over until all blocks of one were read through NIXL. Returns the next room.

    A pair whose first connection is late, on a busy machine, tries again after ASK_AGAIN_S.
    """
    until = time.monotonic() + ASK_AGAIN_S + 15
    while time.monotonic() < until:
        (outcome,) = hand_over(prefill, decode, room, room + 1)
        room += 1
        if outcome == GOOD:
            return room
        assert outcome[0] == "lost" or outcome[1] is True, outcome
        time.sleep(0.5)
    raise AssertionError("the pair does not connect")


def hand_over_slowly(prefill: Peer, decode: Peer, first: int, last: int) -> list[object]:
    """As `hand_over`, with time for the pair to connect; ends when decode dies."""
    outcomes = []
    for room in range(first, last):
        try:
            outcomes += hand_over(prefill, decode, room, room + 1)
        except (EOFError, OSError):
            break
        time.sleep(0.3)
    return outcomes


def slow(fault: str) -> object:
    return pytest.param(fault, marks=pytest.mark.slow)


def test_all_blocks_are_read_through_nixl_and_an_orderly_end_frees_all(start, endpoint):
    prefill, decode = (start(role, endpoint, "nixl") for role in (shm_peer.prefill, shm_peer.decode))
    room = connect(prefill, decode)
    assert hand_over(prefill, decode, room, room + 5) == [GOOD] * 5
    assert prefill.counters()["nixl_slabs"] == 1
    decode.stop()
    wait_for(lambda: prefill.counters()["nixl_slabs"] == 0)


@pytest.mark.parametrize("fault", ["sender:block:80", slow("sender:block:50"), slow("sender:release:4")])
def test_a_killed_prefill_costs_its_rooms_and_its_successor_is_read(start, endpoint, fault):
    prefill = start(shm_peer.prefill, endpoint, "nixl", fault)
    decode = start(shm_peer.decode, endpoint, "nixl")
    outcomes = hand_over_slowly(prefill, decode, 0, 12)
    prefill.wait_dead()
    assert all(is_right is True for kind, is_right, _ in outcomes if kind == "complete")
    assert outcomes[-1][0] == "lost"
    successor = start(shm_peer.prefill, endpoint, "nixl")
    room = connect(successor, decode, 14)
    assert hand_over(successor, decode, room, room + 2) == [GOOD] * 2


@pytest.mark.parametrize(
    "fault",
    [
        "receiver:read:8",
        slow("receiver:read:1"),
        slow("receiver:block:60"),
        slow("receiver:release:3"),
    ],
)
def test_a_killed_decode_frees_its_slab_and_its_successor_reads(start, endpoint, fault):
    prefill = start(shm_peer.prefill, endpoint, "nixl")
    decode = start(shm_peer.decode, endpoint, "nixl", fault)
    assert all(outcome[:2] == ("complete", True) for outcome in hand_over_slowly(prefill, decode, 0, 25))
    decode.wait_dead()
    wait_for(lambda: prefill.counters()["nixl_slabs"] == 0)
    successor = start(shm_peer.decode, endpoint, "nixl")
    room = connect(prefill, successor, 25)
    assert hand_over(prefill, successor, room, room + 2) == [GOOD] * 2


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_a_stopped_worker_costs_rooms_and_no_wrong_byte(start, endpoint, stopped):
    prefill = start(shm_peer.prefill, endpoint, "nixl", "", 0, 15.0)
    decode = start(shm_peer.decode, endpoint, "nixl")
    room = connect(prefill, decode)
    decode.pipe.send((prefill.hello, room, 34))
    assert decode.hear() == GOOD
    victim = prefill if stopped == "prefill" else decode
    os.kill(victim.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(victim.pid, signal.SIGCONT)
    outcomes = [decode.hear() for _ in range(room + 1, 34)]
    assert all(is_right is True for ended, is_right, _ in outcomes if ended == "complete")
    successor = start(shm_peer.prefill, f"{endpoint}2", "nixl")
    decode.stop()
    fresh = start(shm_peer.decode, f"{endpoint}2", "nixl")
    connect(successor, fresh, 20)


def test_a_changed_byte_in_registered_memory_is_pulled_again(start, endpoint):
    prefill = start(shm_peer.prefill, endpoint, "nixl", "flip:90:1")
    decode = start(shm_peer.decode, endpoint, "nixl")
    outcomes = hand_over_slowly(prefill, decode, 0, 12)
    assert all(outcome[:2] == ("complete", True) for outcome in outcomes)


def test_bytes_that_stay_wrong_end_the_room_and_are_never_taken(start, endpoint):
    prefill = start(shm_peer.prefill, endpoint, "nixl", "flip:90:100000")
    decode = start(shm_peer.decode, endpoint, "nixl")
    outcomes = hand_over_slowly(prefill, decode, 0, 12)
    assert ("lost", "DigestMismatch", 0) in outcomes
    assert all(outcome[1] is True for outcome in outcomes if outcome[0] == "complete")


def test_prefill_without_slab_memory_sends_messages(start, endpoint):
    prefill = start(shm_peer.prefill, endpoint, "nixl", "", 0, 60.0, 64 << 10)
    decode = start(shm_peer.decode, endpoint, "nixl")
    for room in range(3):
        assert hand_over(prefill, decode, room, room + 1) == [("complete", True, 0)]
        time.sleep(0.5)
    assert prefill.counters()["shm_fallbacks"] == 1


@pytest.mark.parametrize("refused", ["prefill", "decode"])
def test_an_agent_that_cannot_start_means_messages(start, endpoint, refused):
    broken = {**shm_peer.UCX, "UCX_NET_DEVICES": "nosuchdevice", "UCX_TLS": "tcp"}
    settings = {role: broken if role == refused else shm_peer.UCX for role in ("prefill", "decode")}
    prefill = start(shm_peer.prefill, endpoint, "nixl", "", 0, 60.0, 64 << 20, settings["prefill"])
    decode = start(shm_peer.decode, endpoint, "nixl", "", False, settings["decode"])
    for room in range(3):
        assert hand_over(prefill, decode, room, room + 1) == [("complete", True, 0)]
        time.sleep(0.7)


@pytest.mark.parametrize("without", ["prefill", "decode"])
def test_a_peer_without_nixl_gets_messages(start, endpoint, without):
    kinds = {role: "zmq_blocks" if role == without else "nixl" for role in ("prefill", "decode")}
    prefill = start(shm_peer.prefill, endpoint, kinds["prefill"])
    decode = start(shm_peer.decode, endpoint, kinds["decode"])
    assert hand_over(prefill, decode, 0, 3) == [("complete", True, 0)] * 3


def test_the_agents_of_killed_workers_leave_no_open_port(start, endpoint):
    prefill, decode = (start(role, endpoint, "nixl") for role in (shm_peer.prefill, shm_peer.decode))
    connect(prefill, decode)
    ours = sockets_of(prefill.pid) | sockets_of(decode.pid)
    listening = ours & listeners()
    assert len(listening) == 2
    prefill.kill()
    decode.kill()
    assert not listening & listeners()


def sockets_of(pid: int) -> set[str]:
    """Their inodes."""
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listeners() -> set[str]:
    """The inodes of all tcp sockets of this host that listen on 127.0.0.1, as "lo" has it."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {line[9] for line in lines if line[3] == "0A" and line[1].startswith("0100007F")}


def test_a_cluster_over_nixl_answers_with_the_model_s_tokens_and_names_it(served_dir):
    model, prompts = reference_model(served_dir), [random_ids(20, 256, seed) for seed in range(40)]
    options = {"transport": "tcp", "trusted_network": True, "transports": "nixl,zmq_blocks", "threads": 1}
    with serving(served_dir, env=shm_peer.UCX, kv_memory_mb=8, **options) as cluster:
        ways = []
        for ids in prompts:
            tokens, document = complete(cluster, ids, max_tokens=8)
            assert tokens == reference_greedy(model, ids, 8)
            ways.append(document["timeline"]["handoff_transport"])
            if ways[-3:] == ["nixl"] * 3:
                break
            time.sleep(0.3)
        assert ways[-3:] == ["nixl"] * 3, ways

        def rates():
            workers = status(cluster)["workers"]
            return next(worker["paths"] for worker in workers if worker["role"] == "decode").get("nixl")

        wait_until(rates, 30, "decode's heartbeat names the way with its rate")
        (finding,) = check_paths(status(cluster))
        assert "nixl at " in finding.text
