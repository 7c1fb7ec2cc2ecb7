"""The separate connection for sealed blocks: its content, its admission, and its limits for strangers."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq
from baton.cluster.net.sockets import make_socket
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.codec import encode
from baton.cluster.security.ciphers import AES_128_GCM, CRC32C, CURVE
from baton.cluster.security.keyring import split_key
from baton.cluster.security.tickets import Tickets
from baton.kvtransfer.protocol.session import ReceiverState
from baton.kvtransfer.transport import Complete, Landed, Lost
from baton.kvtransfer.transports import bulk, zmq_blocks
from baton.kvtransfer.transports.bulk import BulkLink, BulkLinks, BulkPort, bulk_endpoint
from baton.tests.cluster.keyed_peers import Hosts, answer, is_refused, raw_send, say
from baton.tests.cluster.relay import Relay
from baton.tests.cluster.test_keyed_kv import Pair
from baton.tests.corpora import corpus

SOURCE, TARGET = [3, 9, 4, 20, 7], [11, 2, 17, 5, 23]


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path / "hosts")


class NotedPort(BulkPort):
    """Notes the peers that got a ticket, and how many have joined."""

    def __init__(self, *arguments):
        self.peers, self.num_joined = [], 0
        super().__init__(*arguments)

    def ticket_for(self, peer):
        self.peers.append(peer)
        return super().ticket_for(peer)

    def read(self):
        joined = super().read()
        self.num_joined += len(joined)
        return joined


class ForgedLink(BulkLink):
    """Reads the messages of `forged` before those of its socket."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.forged = []

    def read_block(self):
        if self.forged:
            return [memoryview(frame) for frame in self.forged.pop(0)]
        return super().read_block()


@pytest.fixture
def new_pair(hosts, monkeypatch):
    """Makes a `Pair` that also has both ends of its bulk connections.

    `port`: prefill's end, None without one; `tickets`: those that it issues; `links`: decode's ends.
    """
    made = {}

    def noted(name, kind):
        def make(*arguments):
            made[name] = kind(*arguments)
            return made[name]

        return make

    for name, kind in (("BulkPort", NotedPort), ("BulkLinks", BulkLinks), ("Tickets", Tickets)):
        monkeypatch.setattr(zmq_blocks, name, noted(name, kind))
    monkeypatch.setattr(bulk, "BulkLink", ForgedLink)
    with contextlib.ExitStack() as open_pairs:

        def make(endpoint="tcp://127.0.0.1:0", ciphers=(), decode_ciphers=None):
            made.clear()
            pair = Pair(endpoint, hosts.prefill, hosts.decode, ciphers=ciphers, decode_ciphers=decode_ciphers)
            open_pairs.callback(pair.close)
            pair.port, pair.links, pair.tickets = made.get("BulkPort"), made["BulkLinks"], made["Tickets"]
            return pair

        yield make


def bulk_of(pair):
    return bulk_endpoint(split_key(pair.sender.endpoint)[0], pair.port.port)


def links_of(pair):
    return [link for _, link in pair.links.items()]


def session_with(pair):
    """Decode's state of its one peer."""
    return pair.receiver.session.link_of(pair.sender.endpoint)


def has_landed(pair):
    return torch.equal(pair.target.kv[TARGET], pair.source.kv[SOURCE])


@contextlib.contextmanager
def caller(endpoint, **options):
    """A peer in a context of its own."""
    context = zmq.Context()
    socket = make_socket(context, zmq.DEALER, linger_ms=0, **options)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


@contextlib.contextmanager
def relayed(pair, change=None):
    """Decode reaches the bulk port through a relay."""
    relay = Relay(pair.port.port, change)
    pair.port.port = relay.port
    try:
        yield relay
    finally:
        relay.close()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_with_keys_blocks_are_sealed_and_take_their_own_connection(new_pair, tmp_path, scheme):
    pair = new_pair("tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/kv")
    assert isinstance(pair.hand_off(), Complete)
    assert has_landed(pair)
    assert session_with(pair).cipher == AES_128_GCM
    (link,) = links_of(pair)
    assert link.is_joined
    assert isinstance(pair.hand_off(), Complete), "a second room uses the same connection"
    assert links_of(pair) == [link]


@pytest.mark.parametrize(
    ("ciphers", "decode_ciphers", "has_bulk", "is_readable"),
    [
        ((), (), True, False),
        ((CRC32C,), (CRC32C,), True, True),
        ((), (CURVE,), False, False),
        ((CURVE,), (), False, False),
    ],
    ids=["sealed", "trusted", "decode wants curve", "prefill wants curve"],
)
def test_a_wire_tap_reads_blocks_exactly_when_unencrypted(
    new_pair, ciphers, decode_ciphers, has_bulk, is_readable
):
    pair = new_pair(ciphers=ciphers, decode_ciphers=decode_ciphers)
    tap = relayed(pair) if pair.port is not None else contextlib.nullcontext()
    with tap as relay:
        assert isinstance(pair.hand_off(), Complete)
        assert has_landed(pair)
        assert bool(relay is not None and relay.heard) == has_bulk
        if has_bulk:
            pieces = [bytes(pair.source.kv[page, 1000:1032].numpy()) for page in SOURCE]
            assert all(piece in relay.heard for piece in pieces) == is_readable
            assert any(piece in relay.heard for piece in pieces) == is_readable


def test_a_bit_that_flips_on_the_wire_is_seen_and_the_block_pulled_again(new_pair):
    done = []

    def change(offset, data):
        if offset < 100_000 <= offset + len(data) and not done:
            done.append(offset)
            data = bytearray(data)
            data[100_000 - offset - 1] ^= 0x10
        return data

    pair = new_pair()
    with relayed(pair, change):
        assert isinstance(pair.hand_off(), Complete)
    assert done
    assert has_landed(pair)
    assert pair.receiver.counters["digest_mismatches"] == 1
    assert pair.receiver.counters["repulls"] >= 1, "a block that is only late is pulled again too"


def test_a_connection_that_breaks_comes_back_with_another_ticket(new_pair):
    pair = new_pair()
    with relayed(pair) as relay:
        assert isinstance(pair.hand_off(), Complete)
        relay.cut()
        (old,) = links_of(pair)
        pair.turn(lambda _: [link for link in links_of(pair) if link is not old and link.is_joined])
        assert relay.num_connections == 2
        assert isinstance(pair.hand_off(), Complete)
    assert has_landed(pair)


def test_without_a_bulk_path_prefill_announces_until_the_lease_ends(new_pair):
    pair = new_pair()
    pair.port.port = 1  # nobody listens there
    room = pair.begin()
    pair.turn(lambda _: [True] if session_with(pair).rooms[room].state is ReceiverState.PULLING else [])
    lost = pair.end_without_progress(room)
    assert isinstance(lost, Lost)
    assert lost.kind == "TransferTimeout"
    assert "pulling" in lost.reason, "announcements got through"
    assert not [event for event in pair.events if isinstance(event, Landed)]


def test_blocks_take_the_curve_link_when_the_bulk_port_does_not_answer(new_pair, monkeypatch):
    monkeypatch.setattr(bulk, "JOIN_S", 0.3)
    pair = new_pair()
    pair.port.port = 1  # nobody listens there
    assert isinstance(pair.hand_off(), Complete)
    assert has_landed(pair)
    assert session_with(pair).cipher == CURVE
    assert links_of(pair) == []
    assert isinstance(pair.hand_off(), Complete), "the next room comes that way at once"
    assert pair.receiver.counters["digest_mismatches"] == 0


def test_rooms_end_with_a_reason_when_sealed_blocks_have_no_connection(new_pair, monkeypatch):
    monkeypatch.setattr(bulk, "JOIN_S", 0.3)
    pair = new_pair(ciphers=(AES_128_GCM,), decode_ciphers=(AES_128_GCM,))
    pair.port.port = 1
    lost = pair.hand_off()
    assert isinstance(lost, Lost)
    assert lost.kind == "HandshakeRefused"
    assert "port for blocks does not answer, and --kv-cipher aes-128-gcm" in lost.reason
    assert not has_landed(pair)


def test_a_port_for_blocks_that_answers_stays_in_use(new_pair):
    """A link that joined in time is kept when the time is over."""
    pair = new_pair()
    assert isinstance(pair.hand_off(), Complete)
    (link,) = links_of(pair)
    pair.ahead += 2 * bulk.JOIN_S
    pair.turn(lambda _: [True] if pair.links.join_by is None else [])
    assert isinstance(pair.hand_off(), Complete)
    assert links_of(pair) == [link]
    assert pair.links.join_by is None


# --- who gets in --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["no ticket", "a wrong ticket", "a used ticket"])
def test_a_peer_without_a_valid_ticket_is_ignored(new_pair, who):
    pair = new_pair()
    used = pair.tickets.issue("somebody")
    assert pair.tickets.redeem(used) == "somebody"
    ticket = {"no ticket": None, "a wrong ticket": "f" * 32, "a used ticket": used}[who]
    with caller(bulk_of(pair), ticket=ticket) as stranger:
        assert is_refused(stranger, b"")
        counter = "handshakes_failed" if ticket is None else "peers_refused"
        pair.turn(lambda _: [True] if pair.sender.counters[counter] else [])
        assert isinstance(pair.hand_off(), Complete)
        assert answer(stranger, 0.0) is None
    assert pair.sender.counters["malformed"] == 0, "nothing that it said was read"


def test_a_stolen_ticket_reveals_nothing_readable(new_pair, monkeypatch):
    """It takes the place of the peer, who comes back with another ticket."""
    pair = new_pair()
    issue, stolen = pair.port.ticket_for, []

    def ticket_for(peer):
        ticket = issue(peer)
        if stolen:
            return ticket
        stolen.append(ticket)
        return "0" * 32  # decode comes too late: its ticket is used

    monkeypatch.setattr(pair.port, "ticket_for", ticket_for)
    poll = pair.sender.poll
    with contextlib.ExitStack() as thieves:

        def poll_beside_a_thief(timeout):
            if len(stolen) == 1:
                stolen.append(
                    thieves.enter_context(caller(bulk_of(pair), ticket=stolen[0], max_frame=1 << 20))
                )
                assert say(stolen[1], b"")
            return poll(timeout)

        monkeypatch.setattr(pair.sender, "poll", poll_beside_a_thief)
        assert isinstance(pair.hand_off(), Complete)
        assert has_landed(pair)
        pieces = [bytes(pair.source.kv[page, 1000:1032].numpy()) for page in SOURCE]
        loot = []
        while max(map(len, loot), default=0) <= 100_000:  # they may be on their way still
            assert stolen[1].poll(60_000), "no block was sent to it"
            loot += stolen[1].recv_multipart()
        while stolen[1].poll(0):
            loot += stolen[1].recv_multipart()
        assert not any(piece in frame for frame in loot for piece in pieces)


def test_a_failed_ticket_check_admits_no_peer(new_pair, monkeypatch):
    pair = new_pair()
    monkeypatch.setattr(pair.tickets, "redeem", None)  # the thread of the checks dies of it
    with caller(bulk_of(pair), ticket=pair.tickets.issue("x")) as peer:
        assert is_refused(peer, b"")
        pair.turn(lambda _: [True] if pair.sender.counters["authentication_failures"] else [])
    assert pair.sender.counters["authentication_failures"] == 1


def test_hostile_frames_of_an_admitted_peer_are_counted_and_harmless(new_pair):
    pair = new_pair()
    frames = [corpus.data(case) for case in corpus.load("msgpack_frames")]
    small = [data for data in frames if 0 < len(data) <= 1024]
    assert isinstance(pair.hand_off(), Complete)
    (peer,) = pair.port.peers
    with caller(bulk_of(pair), ticket=pair.tickets.issue(peer)) as hostile:
        assert say(hostile, *small)
        hostile.send_multipart([b""] * 1000)
        expected = len(small) + 1
        pair.turn(lambda _: [True] if pair.sender.counters["malformed"] == expected else [])
        assert say(hostile, max(frames, key=len)[:100_000]), "too long for this socket: the connection is cut"
        assert isinstance(pair.hand_off(), Complete)
        assert pair.port.num_joined == 1, "none of its messages made it the peer"
    assert pair.sender.counters["malformed"] == expected
    assert has_landed(pair)


def test_raw_bytes_are_cut_off_and_others_are_served(new_pair):
    pair = new_pair()
    raw = [corpus.steps(case) for case in corpus.load("zmtp_raw")]
    with ThreadPoolExecutor(len(raw)) as pool:
        sent = [pool.submit(raw_send, bulk_of(pair), steps) for steps in raw]
        assert isinstance(pair.hand_off(), Complete)
        pair.turn(lambda _: [True] if all(future.done() for future in sent) else [])
        assert all(future.exception() is None for future in sent)
        assert isinstance(pair.hand_off(), Complete)
    assert pair.sender.counters["malformed"] == 0
    assert has_landed(pair)


# --- what decode takes from there ---------------------------------------------------------------------------


def test_decode_takes_only_blocks_from_an_unauthenticated_connection(new_pair):
    pair = new_pair()
    assert isinstance(pair.hand_off(), Complete)
    (link,) = links_of(pair)
    name = {"room": "a" * 32, "epoch": 0, "instance": pair.instances[0]}
    messages = [
        m.Abort(**name),
        m.Announce(**name, tokens_ready=70),
        m.KVRefused(instance="c" * 32, reason="no"),
    ]
    block = m.Block(**name, block=0, size=1, digest=0)
    link.forged = [frames for each in messages for frames in ([encode(each)], [encode(each), b"x"])]
    link.forged += [[], [encode(block), bytes(17)]]
    num_malformed = len(link.forged) - 1
    assert isinstance(pair.hand_off(), Complete)
    assert link.forged == []
    assert pair.receiver.counters["malformed"] == num_malformed
    assert pair.receiver.counters["unknown_room"] == 1
    assert isinstance(pair.hand_off(), Complete)
