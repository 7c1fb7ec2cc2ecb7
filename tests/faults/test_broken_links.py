"""Bytes that are not ZMTP on a connection that stood: the end that gets them drops it and comes back."""

import time

import pytest
import torch
import zmq
from baton.cluster.net.control_link import ControlLink
from baton.kvtransfer.transport import Complete
from baton.tests.cluster.keyed_peers import Front, hello
from baton.tests.cluster.test_keyed_kv import Pair
from baton.tests.faults.zmtp_proxy import Proxies
from baton.tests.faults.zmtp_rules import cut, verb
from baton.tests.patience import patience_with_peers

__all__ = ["patience_with_peers"]
pytestmark = pytest.mark.usefixtures("patience_with_peers")
GARBAGE = b"\xff" * 200
TOO_LONG = b"\x02" + (1 << 40).to_bytes(8, "big")  # the header of a frame of a tebibyte
JUNK = [("down", GARBAGE), ("down", TOO_LONG), ("up", GARBAGE)]


@pytest.fixture
def proxies():
    with Proxies() as running:
        yield running


@pytest.mark.parametrize(("way", "junk"), JUNK, ids=["garbage down", "a frame too long down", "garbage up"])
def test_a_worker_registers_anew_after_junk(proxies, way, junk):
    front, context = Front(), zmq.Context()
    proxy = proxies.add("tcp://127.0.0.1:0", front.endpoint)
    link = ControlLink(context, proxy.endpoint, hello("decode"), time.monotonic())

    def until_heard(count):
        end = time.monotonic() + 30
        while len({identity for identity, _ in list(front.heard)}) < count:
            assert time.monotonic() < end, f"{front.heard}, {link}"
            link.receive()
            link.tick(time.monotonic())
            link.socket.poll(2)

    try:
        until_heard(1)
        for count in (2, 3):
            getattr(proxy, way).inject(junk)
            until_heard(count)
    finally:
        link.close()
        context.term()
        front.close()


@pytest.mark.parametrize(("way", "junk"), JUNK, ids=["garbage down", "a frame too long down", "garbage up"])
def test_blocks_flow_again_after_junk_and_after_a_cut_in_a_block(proxies, way, junk):
    pair = Pair("tcp://127.0.0.1:0", None, None)
    proxy = proxies.add("tcp://127.0.0.1:0", pair.sender.endpoint)
    try:
        assert isinstance(pair.hand_off(proxy.endpoint), Complete)
        proxy.down.rule(verb("Block", block=0), cut(1000), times=1)
        assert isinstance(pair.hand_off(proxy.endpoint), Complete)
        getattr(proxy, way).inject(junk)
        assert isinstance(pair.hand_off(proxy.endpoint), Complete)
        assert torch.equal(pair.target.kv[[11, 2, 17, 5, 23]], pair.source.kv[[3, 9, 4, 20, 7]])
    finally:
        pair.close()
