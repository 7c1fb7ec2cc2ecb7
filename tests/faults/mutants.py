"""Nodes with one defence off, or with one fault that no message can make: functions for a node's `prepare`.

A row whose defence is off must fail; one that does not proves nothing.
"""

import os

import zmq
from baton.cluster.net import authenticator
from baton.cluster.protocol import codec
from baton.kvtransfer.transports import prepared_blocks, receiver_endpoint, zmq_blocks
from baton.prefill.queues import PrefillState
from baton.prefill.worker import PrefillWorker
from baton.router.rooms.quarantine import DeathRecord
from baton.router.workers.breaker import Breaker

ZAP_DIES_AT = "ZAP_DIES_AT"  # environment: the ZAP thread dies at the first question after this file is there


def no_tracker() -> None:
    """Memory of a zero-copy send is taken as free at once, so that the next block is written over it."""
    transmit = zmq_blocks.ZmqBlocksSender._transmit

    def untracked(self, peer, header, payload):
        return None if transmit(self, peer, header, payload) is None else zmq_blocks.Delivered()

    zmq_blocks.ZmqBlocksSender._transmit = untracked


def no_digest() -> None:
    """Every block has the right digest."""
    receiver_endpoint.block_digest = prepared_blocks.block_digest = lambda *_: 0


def no_breaker() -> None:
    """A router places requests with a worker that fails them all as with any other."""
    Breaker.is_avoided = lambda self, now: False


def no_third_chance() -> None:
    """A router takes the deaths of two workers for the doing of the request that both had."""
    DeathRecord.is_proven = property(lambda self: len(self.died_with) >= 2)


def no_checksum() -> None:
    """Messages are taken as they come."""
    codec.is_damaged = lambda data: False


def no_cancel() -> None:
    """Prefill keeps what a client gave up until decode speaks, or the lease ends."""
    cancel = PrefillWorker._cancel

    def deaf(self, room_id, epoch):
        if not any(room.state is PrefillState.HANDED for room in self.queues.attempts(room_id)):
            cancel(self, room_id, epoch)

    PrefillWorker._cancel = deaf


def _ignore_option(ignored: int) -> None:
    setsockopt = zmq.Socket.setsockopt

    def partial(self, option, value):
        if option != ignored:
            setsockopt(self, option, value)

    zmq.Socket.setsockopt = partial


def no_frame_limit() -> None:
    """Sockets take frames of any size."""
    _ignore_option(zmq.MAXMSGSIZE)


def no_zap_enforcement() -> None:
    """Without an answer from ZAP everybody is admitted, as by libzmq's default."""
    _ignore_option(zmq.ZAP_ENFORCE_DOMAIN)


def zap_dies() -> None:
    """The thread that admits peers raises, once the file named by ZAP_DIES_AT is there."""
    answer = authenticator.Authenticator._answer

    def dying(self, parts):
        if os.path.exists(os.environ[ZAP_DIES_AT]):
            raise RuntimeError("the ZAP thread dies")
        return answer(self, parts)

    authenticator.Authenticator._answer = dying
