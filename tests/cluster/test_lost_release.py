"""A connection breaks with the last Release on it: prefill's pages are free long before its lease ends."""

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from baton.kvtransfer.transport import Complete, Released
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver
from baton.tests.cluster.test_zmq_blocks import (  # noqa: F401
    LEASE_S,
    Prefill,
    context,
    poll_until,
    receiver,
    request_for,
    start,
    wait_for,
)
from baton.tests.faults.zmtp_proxy import Proxies


def test_a_release_lost_with_its_connection_is_asked_for_over_the_next(
    start: Callable[..., Prefill],  # noqa: F811
    receiver: ZmqBlocksReceiver,  # noqa: F811
) -> None:
    prefill, room = start("tcp://127.0.0.1:0"), secrets.token_hex(16)
    with Proxies() as proxies:
        proxy = proxies.add("tcp://127.0.0.1:0", prefill.sender.endpoint)
        receiver.reach = lambda point: proxy.up.freeze() if point == "receiver:release" else None
        receiver.pull(replace(request_for(prefill, room, 16, (1,)), endpoint=proxy.endpoint))
        prefill.offer(room, 16, (2,))
        poll_until(receiver, Complete)
        assert receiver.session.num_rooms == 0
        receiver.reach = lambda point: None
        proxy.cut()
        wait_for(lambda: not proxy.num_open)
        proxy.thaw()
        began = time.monotonic()
        while not prefill.events:
            assert time.monotonic() < began + LEASE_S, "its pages wait for the lease"
            receiver.poll(0.05)
        assert prefill.events == [Released(room=room, epoch=0)]
        assert proxy.num_connections > 1
