"""Both ends of the KV plane in each of two workers: prompts go one way and prefixes the other."""

import secrets
import time

import pytest
import torch
import zmq
from baton.cluster.errors import ConfigError
from baton.cluster.security.keyring import load_keyring
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice
from baton.kvtransfer.transport import Complete, Lost, Offer, PullRequest, Released
from baton.kvtransfer.transports import receiver_endpoint, sender_endpoint
from baton.kvtransfer.transports.registry import ReceiverSetup, SenderSetup, open_receiver, open_sender
from baton.kvtransfer.transports.two_way import PREFIX, TwoWayTransport
from baton.tests.cluster.keyed_peers import Hosts
from baton.tests.cluster.test_keyed_kv import LAYOUT, planes

DEADLINE_S = 60.0
THERE, HERE = (3, 9, 4, 20, 7), (11, 2, 17, 5, 23)


class Worker:
    """A worker's transport over pages of its own; `role`: that of its main end."""

    def __init__(self, role, where, names, keys=None):
        self.instance, self.planes, self.events = secrets.token_hex(16), planes(len(role)), []
        self._context = zmq.Context()
        peer = {"prefill": "decode", "decode": "prefill"}[role]
        common = {
            "instance": self.instance, "layout": LAYOUT, "planes": self.planes, "context": self._context,
            "keyring": load_keyring(str(keys), role) if keys else None, "peer_role": peer, "lease_s": 30.0,
        }  # fmt: skip
        sender = open_sender(names, SenderSetup(bind=where, **common))
        receiver = open_receiver(names, ReceiverSetup(**common))
        main = sender if role == "prefill" else receiver
        self.endpoint = sender.endpoint
        self.transport = TwoWayTransport(sender=sender, receiver=receiver, main=main)

    def offer(self, room):
        self.transport.offer(Offer(room=room, epoch=0, num_tokens=70, pages=THERE))
        self.transport.advance(room, 0, 70, 42)

    def pull(self, room, other):
        self.transport.pull(
            PullRequest(
                room=room, epoch=0, num_tokens=70, have=0, pages=HERE, features=None, endpoint=other.endpoint,
                peer_instance=other.instance,
            )
        )  # fmt: skip

    def close(self):
        self.transport.close()
        self._context.term()


@pytest.fixture
def workers(tmp_path):
    made = []

    def start(scheme, names, *, keyed):
        hosts = Hosts(tmp_path / "hosts") if keyed else None
        for role in ("prefill", "decode"):
            where = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/{role}"
            made.append(Worker(role, where, names, getattr(hosts, role) if keyed else None))
        return made

    yield start
    for worker in made:  # a sender frees its slabs when nobody has them mapped
        worker.transport._receiver.close()
    for worker in made:
        worker.transport._sender.close()
        worker.close()


@pytest.fixture
def host_device(monkeypatch):
    """Shared memory of the host stands for that of a device."""
    for module in (sender_endpoint, receiver_endpoint):
        monkeypatch.setattr(module, "device_of", lambda planes, layout: HostDevice(PageOrder(len(planes.kv))))


def turned(workers, is_done):
    end = time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < end, [worker.events for worker in workers]
        for worker in workers:
            worker.events += worker.transport.poll(0.002)


@pytest.mark.parametrize(
    ("scheme", "names", "keyed"),
    [
        ("tcp", ("zmq_blocks",), False),
        ("tcp", ("zmq_blocks",), True),
        ("ipc", ("shm", "zmq_blocks"), False),
        ("ipc", ("shm", "zmq_blocks"), True),
        ("ipc", ("cuda_slab", "shm", "zmq_blocks"), False),
        ("ipc", ("cuda_slab", "shm", "zmq_blocks"), True),
    ],
)
@pytest.mark.usefixtures("host_device")
def test_rooms_cross_both_ways_at_once_and_share_nothing(workers, scheme, names, keyed):
    prefill, decode = pair = workers(scheme, names, keyed=keyed)
    sent = [worker.planes.kv[list(THERE)].clone() for worker in pair]
    prompt, prefix = secrets.token_hex(16), secrets.token_hex(16)
    prefill.offer(prompt)
    decode.offer(prefix)
    decode.pull(prompt, prefill)
    prefill.pull(prefix, decode)
    turned(pair, lambda: all(len(worker.events) >= 2 and _ends(worker) == 2 for worker in pair))
    for worker, data, rooms in ((decode, sent[0], (prompt, prefix)), (prefill, sent[1], (prefix, prompt))):
        assert torch.equal(worker.planes.kv[list(HERE)], data)
        done = {type(event): event.room for event in worker.events if not hasattr(event, "tokens")}
        assert done == {Complete: rooms[0], Released: rooms[1]}
    blocks = [worker.transport.counters for worker in pair]
    assert blocks[0]["blocks"] == blocks[0][PREFIX + "blocks"] == blocks[1][PREFIX + "blocks"] > 0

    # the first rooms began before both ends had a slab
    prompt, prefix = secrets.token_hex(16), secrets.token_hex(16)
    prefill.offer(prompt)
    decode.offer(prefix)
    decode.pull(prompt, prefill)
    prefill.pull(prefix, decode)
    turned(pair, lambda: all(_ends(worker) == 4 for worker in pair))
    way = {"cuda_slab": "device_blocks", "shm": "shm_blocks"}.get(names[0])
    counters = [worker.transport.counters for worker in pair]
    assert way is None or all(each[kind + way] > 0 for each in counters for kind in ("", PREFIX))


def _ends(worker):
    return sum(isinstance(event, Complete | Released | Lost) for event in worker.events)


def test_a_room_that_is_given_up_ends_at_whichever_end_knows_it(workers):
    prefill, decode = pair = workers("tcp", ("zmq_blocks",), keyed=False)
    prefix = secrets.token_hex(16)
    prefill.pull(prefix, decode)
    turned(pair, lambda: decode.transport._sender.session._early)
    decode.transport.release(prefix, 0, "it is not cached here")
    turned(pair, lambda: _ends(prefill))
    (lost,) = prefill.events
    assert (lost.kind, lost.reason) == ("HandoffAborted", "it is not cached here")


def test_a_key_of_the_same_role_opens_no_port_for_prefixes(workers, tmp_path):
    _, decode = workers("tcp", ("zmq_blocks",), keyed=True)
    other = Worker("decode", "tcp://127.0.0.1:0", ("zmq_blocks",), tmp_path / "hosts" / "decode-d0")
    try:
        other.pull(secrets.token_hex(16), decode)
        turned([other, decode], lambda: other.events)
        assert "prefill at" in other.events[0].reason, "a decode worker calls prefill workers only"
    finally:
        other.close()


def test_an_open_address_for_prefixes_needs_keys_and_names_its_flag():
    context = zmq.Context()
    setup = SenderSetup(
        instance="1" * 32, layout=LAYOUT, planes=planes(1), context=context, bind="tcp://0.0.0.0:0",
        flag="--prefix-bind",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"--prefix-bind tcp://0\.0\.0\.0:0"):
        open_sender(("zmq_blocks",), setup)
    context.term()
