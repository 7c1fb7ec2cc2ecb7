"""The choice of a pair's transport: what the setting may say, and what two workers make of it."""

import pytest
from baton.cluster.errors import ConfigError, HandshakeRefused
from baton.cluster.net import transport_names as transports
from baton.cluster.net.transport_names import (
    common_transports,
    path_rates,
    transports_fault,
    transports_of,
)
from baton.cluster.protocol import messages as m
from baton.kvtransfer.protocol.sender import SenderSession
from baton.kvtransfer.protocol.session import SendMessage
from baton.router.rooms.attempt_log import AttemptTrace
from baton.router.rooms.room import Room
from baton.router.rooms.timeline import account_of

LAYOUT = m.Layout(
    fingerprint="f", dtype="float32", page_size=4, num_layers=1, num_kv_heads=1, head_dim=2, block_bytes=4096
)


@pytest.mark.parametrize(
    ("text", "names", "has_gpu"),
    [
        ("auto", ("shm", "zmq_blocks"), False),
        ("auto", ("cuda_slab", "shm", "zmq_blocks"), True),
        ("zmq_blocks,shm", ("shm", "zmq_blocks"), True),
        ("zmq_blocks,cuda_slab", ("cuda_slab", "zmq_blocks"), True),
        ("zmq_blocks", ("zmq_blocks",), False),
    ],
)
def test_a_list_of_transports_is_read_best_first(text, names, has_gpu):
    assert transports_fault(text) == ""
    assert transports_of(text, has_gpu=has_gpu) == names


def test_device_memory_without_a_gpu_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match="cuda_slab, which needs a GPU: write shm,zmq_blocks"):
        transports_of("shm,cuda_slab,zmq_blocks", has_gpu=False)


@pytest.mark.parametrize(
    "text", ["", "shm", "rdma,zmq_blocks", "shm, zmq_blocks", "zmq_blocks,zmq_blocks", "auto,shm"]
)
def test_a_wrong_list_is_refused_with_a_valid_example(text):
    assert "write" in transports_fault(text)


def test_a_platform_without_memfd_has_no_shared_memory(monkeypatch):
    monkeypatch.setattr(transports, "has_shm", lambda: False)
    assert transports_of("auto", has_gpu=True) == ("zmq_blocks",)
    assert "Linux" in transports_fault("shm,zmq_blocks")


def test_a_pair_uses_its_best_common_transport_and_old_peers_get_messages():
    ours, theirs = ("shm", "zmq_blocks"), ("zmq_blocks", "later", "shm")
    assert common_transports(ours, theirs, is_near=True) == ("shm", "zmq_blocks")
    assert common_transports(ours, ("zmq_blocks",), is_near=True) == ("zmq_blocks",)
    assert common_transports(ours, (), is_near=True) == ("zmq_blocks",)
    with pytest.raises(HandshakeRefused, match=r"shm.*later"):
        common_transports(ours, ("later",), is_near=True)


def test_device_memory_is_for_workers_that_are_known_to_share_a_host():
    both = ("cuda_slab", "shm", "zmq_blocks")
    assert common_transports(both, both, is_near=True) == both
    assert common_transports(both, both, is_near=False) == ("shm", "zmq_blocks")


def test_prefill_answers_a_hello_with_its_choice_and_remembers_it():
    session = SenderSession("1" * 32, LAYOUT, transports=("shm", "zmq_blocks"))
    hello = m.KVHello(
        instance="2" * 32, protocol=m.PROTOCOL_MAJOR, layout=LAYOUT, transports=("shm", "zmq_blocks")
    )
    assert session.receive("d", hello, 0.0) == [
        SendMessage("d", m.KVWelcome(instance="1" * 32, layout=LAYOUT, transport="shm", num_ranks=1))
    ]
    assert session.speaks("d", "2" * 32, "shm")
    assert not session.speaks("d", "3" * 32, "shm")
    assert not session.speaks("e", "2" * 32, "shm")


@pytest.mark.parametrize(
    ("blocks", "shared", "on_device", "by_nixl", "name"),
    [
        (0, 0, 0, 0, None),
        (3, 0, 0, 0, "zmq_blocks"),
        (3, 3, 0, 0, "shm"),
        (3, 2, 0, 0, "shm+zmq_blocks"),
        (3, 0, 3, 0, "cuda_slab"),
        (3, 1, 1, 0, "cuda_slab+shm+zmq_blocks"),
        (3, 0, 0, 3, "nixl"),
        (3, 0, 0, 2, "nixl+zmq_blocks"),
    ],
)
def test_the_timeline_names_the_transport_of_the_blocks(blocks, shared, on_device, by_nixl, name):
    decode = m.DecodeTimeline(
        handoff_blocks=blocks,
        handoff_shm_blocks=shared,
        handoff_device_blocks=on_device,
        handoff_nixl_blocks=by_nixl,
    )
    room = Room(room="a" * 32, prompt_ids=[1], sampling=m.Sampling(), created=0.0, decode_timeline=decode)
    account = account_of(room, arrived=0.0, tokenize_s=0.0, queued_s=0.0, now=1.0, trace=AttemptTrace())
    assert account.timeline().handoff_transport == name


def test_the_rates_of_paths_are_bytes_by_seconds_and_no_other_counter():
    counters = {"path_bytes_shm": 6e9, "path_s_shm": 2.0, "path_bytes_cuda_slab+shm": 1e9, "bytes": 5.0}
    assert path_rates(counters) == {"shm": 3.0, "cuda_slab+shm": 0.0}
