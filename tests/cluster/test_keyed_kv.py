"""The KV plane with keys: the same bytes, from listed prefill workers to listed decode workers only."""

import logging
import secrets
import time

import msgspec
import pytest
import torch
import zmq
from baton.cluster.errors import ConfigError
from baton.cluster.protocol.messages import Layout
from baton.cluster.security.keyring import load_keyring, read_key, split_key, with_key
from baton.deploy.keys.keys import remove
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.transport import Complete, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender
from baton.tests.cluster.keyed_peers import Hosts, admit, curve, dealer, is_refused

DEADLINE_S = 60.0
LEASE_S = 30.0  # of decode's rooms; a thread that gets no core for a while does not end one
PAGES = 24
LAYOUT = Layout(
    fingerprint="f",
    dtype="float32",
    page_size=16,
    num_layers=8,
    num_kv_heads=2,
    head_dim=64,
    block_bytes=200_000,
)


def planes(seed):
    noise = torch.Generator().manual_seed(seed)
    kv = torch.randint(0, 256, (PAGES, KVLayout(LAYOUT).kv_page_bytes), dtype=torch.uint8, generator=noise)
    return Planes(kv=kv, features=None)


class Pair:
    """A prefill and a decode transport in contexts of their own, polled in turn."""

    def __init__(self, endpoint, prefill, decode, ciphers=(), decode_ciphers=None, window=6, **options):
        """`options` are of both transports."""
        self.ahead = 0.0  # seconds that decode's clock is ahead
        self.source, self.target = planes(1), planes(2)
        self.instances = [secrets.token_hex(16) for _ in range(2)]
        self.events = []
        self._contexts = [zmq.Context(), zmq.Context()]
        keys = load_keyring(str(prefill), "prefill") if prefill else None
        self.sender = ZmqBlocksSender(
            endpoint, self.instances[0], LAYOUT, self.source, context=self._contexts[0], keyring=keys,
            ciphers=ciphers,
            lease_s=2 * LEASE_S, **options,
        )  # fmt: skip
        keys = load_keyring(str(decode), "decode") if decode else None
        self.receiver = ZmqBlocksReceiver(
            self.instances[1], LAYOUT, self.target, context=self._contexts[1], keyring=keys, lease_s=LEASE_S,
            ciphers=ciphers if decode_ciphers is None else decode_ciphers, window=window,
            clock=lambda: time.monotonic() + self.ahead, **options,
        )  # fmt: skip

    def hand_off(self, endpoint=None):
        """Offers and pulls a room of 70 tokens; returns the terminal event of decode."""
        return self.end_of(self.begin(endpoint))

    def begin(self, endpoint=None):
        """The room."""
        room = secrets.token_hex(16)
        self.sender.offer(Offer(room=room, epoch=0, num_tokens=70, pages=(3, 9, 4, 20, 7)))
        self.sender.advance(room, 0, 70, 42)
        self.receiver.pull(
            PullRequest(
                room=room, epoch=0, num_tokens=70, have=0, pages=(11, 2, 17, 5, 23), features=None,
                endpoint=endpoint or self.sender.endpoint, peer_instance=self.instances[0],
            )
        )  # fmt: skip
        return room

    def end_of(self, room):
        return self.turn(
            lambda events: [e for e in events if isinstance(e, Complete | Lost) and e.room == room]
        )

    def end_without_progress(self, room):
        """The same, after as long a time as a room may be without any."""
        self.ahead += LEASE_S
        return self.end_of(room)

    def turn(self, is_done):
        end = time.monotonic() + DEADLINE_S
        while not (found := is_done(self.events)):
            assert time.monotonic() < end, self.events
            self.events += [*self.sender.poll(0.002), *self.receiver.poll(0.002)]
        return found[-1]

    def close(self):
        self.receiver.close()
        self.sender.close()
        for context in self._contexts:
            context.term()


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path / "hosts")


@pytest.fixture
def new_pair():
    pairs = []

    def make(*arguments, **options):
        pairs.append(Pair(*arguments, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_every_byte_lands_through_curve(new_pair, hosts, tmp_path, scheme):
    endpoint = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/kv"
    pair = new_pair(endpoint, hosts.prefill, hosts.decode)
    address, key = split_key(pair.sender.endpoint)
    assert key == read_key(hosts.prefill, "prefill").public
    assert address.startswith(scheme)
    assert isinstance(pair.hand_off(), Complete)
    assert torch.equal(pair.target.kv[[11, 2, 17, 5, 23]], pair.source.kv[[3, 9, 4, 20, 7]])
    assert isinstance(pair.turn(lambda events: [e for e in events if isinstance(e, Released)]), Released)
    counters = pair.sender.counters
    assert (
        counters["peers_refused"],
        counters["handshakes_failed"],
        counters["authentication_failures"],
    ) == (0, 0, 0)


@pytest.mark.parametrize("endpoint", ["no key", "unlisted key", "a decode worker's key"])
def test_s31_decode_calls_listed_prefill_keys_only(new_pair, hosts, endpoint):
    pair = new_pair("tcp://127.0.0.1:0", hosts.prefill, hosts.decode)
    address, _ = split_key(pair.sender.endpoint)
    unlisted = read_key(hosts.new("prefill", "p1"), "prefill").public
    key = unlisted if endpoint == "unlisted key" else read_key(hosts.decode, "decode").public
    lost = pair.hand_off(address if endpoint == "no key" else with_key(address, key))
    assert isinstance(lost, Lost)
    assert ("--keys" if endpoint == "no key" else "baton keys add") in lost.reason
    assert "\n" not in lost.reason
    assert pair.receiver.pollables() == [], "nobody was called"
    assert isinstance(pair.hand_off(), Complete), "others are served"


@pytest.mark.parametrize("who", ["unlisted", "no keys", "prefill's own role"])
def test_s31_prefill_answers_listed_decode_keys_only(new_pair, hosts, caplog, who):
    decode = hosts.new("decode", "d1")
    admit(decode, hosts.prefill, "prefill")
    with caplog.at_level(logging.WARNING):
        pair = new_pair("tcp://127.0.0.1:0", hosts.prefill, None if who == "no keys" else decode)
        if who == "prefill's own role":
            other = hosts.new("prefill", "p1")
            admit(hosts.prefill, other, "prefill")
            with dealer(
                split_key(pair.sender.endpoint)[0], curve(other, "prefill", hosts.prefill)
            ) as impostor:
                assert is_refused(impostor, b"x")
        else:
            room = pair.begin(split_key(pair.sender.endpoint)[0] if who == "no keys" else None)
            pair.turn(
                lambda _: [
                    r.fields["reason"] for r in caplog.records if "no link to prefill" in r.getMessage()
                ]
            )
            assert isinstance(pair.end_without_progress(room), Lost)
    counter = "handshakes_failed" if who == "no keys" else "peers_refused"
    pair.turn(lambda _: [pair.sender.counters[counter]] if pair.sender.counters[counter] else [])
    assert pair.sender.counters["bytes"] == 0
    if who == "unlisted":
        admit(hosts.prefill, decode, "decode")
        assert isinstance(pair.hand_off(), Complete), "admitted without a restart of either"


def test_a_prefill_key_that_was_revoked_gets_no_new_link(new_pair, hosts):
    pair = new_pair("tcp://127.0.0.1:0", hosts.prefill, hosts.decode)
    remove(hosts.decode, read_key(hosts.prefill, "prefill").public)
    assert isinstance(pair.hand_off(), Lost)


def test_a_public_kv_address_is_bound_with_keys_only(hosts):
    context = zmq.Context()
    keyring = load_keyring(str(hosts.prefill), "prefill")
    sender = ZmqBlocksSender("tcp://0.0.0.0:0", "a" * 32, LAYOUT, planes(1), context=context, keyring=keyring)
    sender.close()
    with pytest.raises(ConfigError, match="--keys"):
        ZmqBlocksSender("tcp://0.0.0.0:0", "a" * 32, LAYOUT, planes(1), context=context)
    context.term()


def test_the_biggest_blocks_pass_the_frame_limit_of_a_curve_link(new_pair, hosts, monkeypatch):
    layout = msgspec.structs.replace(LAYOUT, block_bytes=KVLayout(LAYOUT).kv_page_bytes * 5)
    monkeypatch.setitem(globals(), "LAYOUT", layout)
    pair = new_pair("tcp://127.0.0.1:0", hosts.prefill, hosts.decode)
    done = pair.hand_off()
    assert isinstance(done, Complete)
    assert done.num_blocks == 1
