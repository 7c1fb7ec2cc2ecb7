"""Patience with peers that live in this process: their threads may get no core for a while, and are not dead.

pytestmark = pytest.mark.usefixtures("patience_with_peers")      with the fixture imported, or from a conftest
"""

import contextlib

import pytest

LONG_S = 60.0


@contextlib.contextmanager
def patient_with_peers():
    """Sockets, links and transports made in this process wait long for an answer; other processes do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.cluster.net.sockets.HANDSHAKE_MS", int(LONG_S * 1000))
        patch.setattr("baton.cluster.net.control_link.LOST_AFTER_S", LONG_S)
        for name in (
            "protocol.peer_link.ANSWER_S",
            "protocol.peer_link.GREETING_S",
            "transports.bulk.JOIN_S",
        ):
            patch.setattr(f"baton.kvtransfer.{name}", LONG_S)
        yield


@pytest.fixture(scope="module")
def patience_with_peers():
    with patient_with_peers():
        yield
