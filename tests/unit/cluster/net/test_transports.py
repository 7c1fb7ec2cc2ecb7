"""The choice of a pair's transport: what the setting may say, and what two workers make of it."""

import pytest
from baton.cluster.errors import HandshakeRefused
from baton.cluster.net import transport_names as transports
from baton.cluster.net.transport_names import best_common, transports_fault, transports_of
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
    ("text", "names"),
    [
        ("auto", ("shm", "zmq_blocks")),
        ("zmq_blocks,shm", ("shm", "zmq_blocks")),
        ("zmq_blocks", ("zmq_blocks",)),
    ],
)
def test_a_list_of_transports_is_read_best_first(text, names):
    assert transports_fault(text) == ""
    assert transports_of(text) == names


@pytest.mark.parametrize(
    "text", ["", "shm", "rdma,zmq_blocks", "shm, zmq_blocks", "zmq_blocks,zmq_blocks", "auto,shm"]
)
def test_a_wrong_list_is_refused_with_a_valid_example(text):
    assert "write" in transports_fault(text)


def test_a_platform_without_memfd_has_no_shared_memory(monkeypatch):
    monkeypatch.setattr(transports, "has_shm", lambda: False)
    assert transports_of("auto") == ("zmq_blocks",)
    assert "Linux" in transports_fault("shm,zmq_blocks")


def test_a_pair_uses_its_best_common_transport_and_old_peers_get_messages():
    assert best_common(("shm", "zmq_blocks"), ("zmq_blocks", "later", "shm")) == "shm"
    assert best_common(("shm", "zmq_blocks"), ("zmq_blocks",)) == "zmq_blocks"
    assert best_common(("shm", "zmq_blocks"), ()) == "zmq_blocks"
    with pytest.raises(HandshakeRefused, match=r"shm.*later"):
        best_common(("shm", "zmq_blocks"), ("later",))


def test_prefill_answers_a_hello_with_its_choice_and_remembers_it():
    session = SenderSession("1" * 32, LAYOUT, transports=("shm", "zmq_blocks"))
    hello = m.KVHello(
        instance="2" * 32, protocol=m.PROTOCOL_MAJOR, layout=LAYOUT, transports=("shm", "zmq_blocks")
    )
    assert session.receive("d", hello, 0.0) == [
        SendMessage("d", m.KVWelcome(instance="1" * 32, layout=LAYOUT, transport="shm"))
    ]
    assert session.speaks("d", "2" * 32, "shm")
    assert not session.speaks("d", "3" * 32, "shm")
    assert not session.speaks("e", "2" * 32, "shm")


@pytest.mark.parametrize(
    ("blocks", "shared", "name"),
    [(0, 0, None), (3, 0, "zmq_blocks"), (3, 3, "shm"), (3, 2, "shm+zmq_blocks")],
)
def test_the_timeline_names_the_transport_of_the_blocks(blocks, shared, name):
    decode = m.DecodeTimeline(handoff_blocks=blocks, handoff_shm_blocks=shared)
    room = Room(room="a" * 32, prompt_ids=[1], sampling=m.Sampling(), created=0.0, decode_timeline=decode)
    account = account_of(room, arrived=0.0, tokenize_s=0.0, queued_s=0.0, now=1.0, trace=AttemptTrace())
    assert account.timeline().handoff_transport == name
