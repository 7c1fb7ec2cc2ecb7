"""Hostile bytes against every ZeroMQ port that listens, with and without keys: it lives, stays small, and serves others."""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import zmq
from baton.cluster.codec import (
    KV_MAX_BYTES,
    control_down_decoder,
    control_up_decoder,
    encode,
    kv_down_decoder,
    kv_up_decoder,
)
from baton.cluster.errors import RemoteProtocolError
from baton.cluster.keyring import load_keyring, split_key
from baton.cluster.messages import PROTOCOL_MAJOR, KVHello
from baton.cluster.sockets import CONTROL_MAX_FRAME
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksSender
from baton.tests.cluster.keyed_peers import Front, Hosts, answer, curve, dealer, hello, raw_send, say
from baton.tests.cluster.serving import wait_until
from baton.tests.cluster.test_keyed_kv import LAYOUT, planes
from baton.tests.corpora import corpus

MIB = 1 << 20
FRAMES = corpus.load("msgpack_frames")
RAW = corpus.load("zmtp_raw")


class ControlPort:
    """A router's control socket."""

    max_frame = CONTROL_MAX_FRAME

    def __init__(self, hosts):
        self.front = Front(keys=hosts.router if hosts else None)
        self.endpoint = self.front.endpoint
        self.keys = curve(hosts.decode, "decode", hosts.router) if hosts else None
        self.close = self.front.close

    def is_served(self, peer):
        """Whether an honest peer is heard and answered."""
        message = hello("decode")
        if not say(peer, message):
            return False
        wait_until(lambda: message.instance in self.front.instances(), 5, "the honest peer is heard")
        identity = next(identity for identity, heard in self.front.heard if heard == message)
        self.front.call(self.front.control.transmit, identity, b"welcome")
        return answer(peer, 5) == b"welcome"

    def num_heard(self):
        return len(self.front.heard)

    def num_malformed(self):
        return self.front.control.num_malformed


class KVPort:
    """A prefill worker's KV socket and the thread that polls it."""

    max_frame = KV_MAX_BYTES

    def __init__(self, hosts):
        self._context = zmq.Context()
        keyring = load_keyring(str(hosts.prefill), "prefill") if hosts else None
        self.sender = ZmqBlocksSender(
            "tcp://127.0.0.1:0", "a" * 32, LAYOUT, planes(1), context=self._context, keyring=keyring
        )
        self.endpoint, _ = split_key(self.sender.endpoint)
        self.keys = curve(hosts.decode, "decode", hosts.prefill) if hosts else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            self.sender.poll(0.01)
        self.sender.close()
        self._context.term()

    def close(self):
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the transport did not close"

    def is_served(self, peer):
        greeting = KVHello(instance="b" * 32, protocol=PROTOCOL_MAJOR, layout=LAYOUT)
        return say(peer, greeting) and type(kv_down_decoder().decode(answer(peer, 5))).__name__ == "KVWelcome"

    def num_malformed(self):
        return self.sender.session.counters.malformed


@pytest.fixture(params=["plain", "keys"])
def hosts(request, tmp_path):
    return Hosts(tmp_path) if request.param == "keys" else None


@pytest.fixture(params=[ControlPort, KVPort], ids=["control", "kv"])
def port(request, hosts):
    made = request.param(hosts)
    yield made
    made.close()


def resident():
    return psutil.Process(os.getpid()).memory_info().rss


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def one_round(port, pool):
    """Bytes by which this process grows in one round. The senders live in it too and take arenas and stacks when they
    please, so only what every round adds is the port's.
    """
    before = resident()
    list(pool.map(lambda case: raw_send(port.endpoint, corpus.steps(case)), RAW))
    return resident() - before


def test_raw_bytes_before_and_around_the_handshake(port, hosts, caplog):
    with dealer(port.endpoint, port.keys) as honest:
        assert port.is_served(honest)
        num_malformed = port.num_malformed()
        with caplog.at_level(logging.WARNING), ThreadPoolExecutor(len(RAW)) as pool:
            grown = min(one_round(port, pool) for _ in range(4))
            assert port.is_served(honest), "who was connected is served"
            with dealer(port.endpoint, port.keys) as another:
                assert port.is_served(another), "and so is who comes later"
    if isinstance(port, ControlPort):
        assert port.num_heard() == 3
    if hosts:
        assert port.num_malformed() == num_malformed, "nothing reaches the decoder"
        assert grown <= 2 * MIB * len(RAW)
    else:  # a peer needs no key to send a million empty parts, which libzmq keeps until the message is whole
        assert grown <= 150 * MIB
    said = warnings(caplog)
    assert 1 <= len(said) <= len(RAW)
    assert len([line for line in said if "before it began" in line]) <= 4, "a line per reason"


def test_hostile_frames_of_a_peer_that_may_connect(port, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a pickle that were loaded would leave BATON_CANARY here
    small = [case for case in FRAMES if len(corpus.data(case)) <= port.max_frame]
    large = [case for case in FRAMES if case not in small]
    assert 2 <= len(large) <= 3
    with dealer(port.endpoint, port.keys) as honest:
        assert port.is_served(honest)
        before = resident()
        with caplog.at_level(logging.WARNING):
            with dealer(port.endpoint, port.keys) as hostile:
                assert say(hostile, *(corpus.data(case) for case in small))
                wait_until(lambda: port.num_malformed() == len(small), 10, "each is dropped")
            for case in large:
                with dealer(port.endpoint, port.keys) as hostile:
                    say(hostile, corpus.data(case))
                    assert answer(hostile, 0.3) is None
            assert port.is_served(honest)
        assert port.num_malformed() == len(small), "the large ones are cut off on the wire"
        assert resident() - before <= 64 * MIB
    if isinstance(port, ControlPort):
        assert port.num_heard() == 2
    assert 1 <= len([line for line in warnings(caplog) if "essage dropped" in line]) <= 6, "a line per kind of fault"
    assert not Path("BATON_CANARY").exists()


@pytest.mark.parametrize("decoder", [control_up_decoder, control_down_decoder, kv_up_decoder, kv_down_decoder])
def test_every_decoder_refuses_every_hostile_frame_at_once(decoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    decode = decoder().decode
    for case in FRAMES:
        data = corpus.data(case)
        started = time.perf_counter()
        with pytest.raises(RemoteProtocolError):
            decode(data)
        assert time.perf_counter() - started < (0.5 if len(data) > MIB else 0.05), case.name
    assert not Path("BATON_CANARY").exists()


def test_a_message_of_many_parts_is_dropped_whole_and_others_are_served(port):
    with dealer(port.endpoint, port.keys) as honest, dealer(port.endpoint, port.keys) as hostile:
        assert port.is_served(honest)
        assert say(hostile, b"\xc1")
        hostile.send_multipart([encode(hello("decode"))] * 1000)
        hostile.send_multipart([bytes(port.max_frame)] * 30)
        assert port.is_served(honest)
        if isinstance(port, ControlPort):
            wait_until(lambda: port.front.control.drops["control_oversized"] == 2, 5, "both are dropped")
            assert port.num_heard() == 2
        else:
            wait_until(lambda: port.num_malformed() == 3, 5, "all are dropped")
