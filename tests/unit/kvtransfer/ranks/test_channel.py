"""The channel between two ranks: whole messages in order, and the end of the other process."""

import socket

import pytest
from baton.kvtransfer.ranks.channel import MAX_MESSAGE, RankLost, SocketChannel

KINDS = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET]


@pytest.fixture(params=KINDS, ids=["stream", "packets"])
def pair(request):
    ends = [SocketChannel(end) for end in socket.socketpair(socket.AF_UNIX, request.param)]
    yield ends
    for end in ends:
        end.close()


def test_messages_of_any_size_arrive_whole_and_in_order(pair) -> None:
    one, other = pair
    sent = [b"", b"x", bytes(1 << 20), b"last"]
    for message in sent:
        one.send(message)
    assert one.is_full, "more than the connection takes"
    got: list[bytes] = []
    for _ in range(200):
        got += other.receive()
        one.receive()
    assert got == sent
    assert not one.is_full


def test_the_end_of_a_process_is_told_behind_its_last_message(pair) -> None:
    one, other = pair
    one.send(b"last")
    one.close()
    assert other.receive() == [b"last"]
    with pytest.raises(RankLost):
        other.receive()
    with pytest.raises(RankLost):
        other.send(b"late")
    assert other.fds == []


def test_bytes_that_are_no_message_end_the_channel(pair) -> None:
    one, other = pair
    one._connection.send((MAX_MESSAGE + 1).to_bytes(4, "big"))
    with pytest.raises(RankLost, match="is none"):
        other.receive()
