"""Admission to router and prefill over real sockets: listed keys only, each for its own identity."""

import logging
import time

import pytest
import zmq
from baton.cluster.errors import ConfigError, PeerLost
from baton.cluster.net.authenticator import Authenticator
from baton.cluster.net.control_link import ControlLink
from baton.cluster.net.reconnect import FIRST_PAUSE_S, ReconnectingSocket
from baton.cluster.net.sockets import make_socket, recv_parts
from baton.cluster.protocol.codec import control_down_decoder, encode
from baton.cluster.protocol.messages import FirstToken, Gone, Heartbeat, Rejected, Welcome, WorkerStats
from baton.cluster.security.allowed_keys import ZapRules
from baton.cluster.security.keyring import load_keyring, read_key, write_key
from baton.deploy.keys.keys import remove, rotate
from baton.router.workers.control import ControlSocket, Speakers
from baton.tests.cluster.keyed_peers import (
    PATIENCE_S,
    REFUSAL_S,
    Front,
    Hosts,
    admit,
    answer,
    curve,
    dealer,
    hello,
    is_refused,
    say,
    stranger,
)
from baton.tests.cluster.serving import wait_until

ROOM = "c" * 32


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


@pytest.fixture
def new_front():
    fronts = []

    def make(*arguments, **options):
        fronts.append(Front(*arguments, **options))
        return fronts[-1]

    yield make
    for front in fronts:
        front.close()


@pytest.fixture
def front(new_front, hosts):
    return new_front(keys=hosts.router)


class NotedLink(ControlLink):
    """A worker's control link. `instance`: that of its Hello."""

    def __init__(self, context, endpoint, hello, now, *, keyring):
        self.instance = hello.instance
        super().__init__(context, endpoint, hello, now, keyring=keyring)


@pytest.fixture
def connections(monkeypatch):
    """The connections of the links that the test makes, in their order."""
    made = []

    class Noted(ReconnectingSocket):
        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr("baton.cluster.net.control_link.ReconnectingSocket", Noted)
    return made


@pytest.fixture
def new_link():
    """A worker's control link in a context of its own."""
    links = []

    def make(front, keys, role="decode"):
        context = zmq.Context()
        keyring = load_keyring(str(keys), role) if keys is not None else None
        try:
            link = NotedLink(context, front.endpoint, hello(role), time.monotonic(), keyring=keyring)
        except ConfigError:
            context.term()  # hangs if a socket was left open
            raise
        links.append((context, link))
        return link

    yield make
    for context, link in links:
        link.close()
        context.term()


def registers(front, link, seconds=PATIENCE_S, is_enough=lambda: False):
    """Runs the link until its Hello reached the router; False if not in `seconds` or before `is_enough`."""
    instance, end = link.instance, time.monotonic() + seconds
    while time.monotonic() < end and not is_enough():
        link.tick(time.monotonic())
        if instance in front.instances():
            return True
        link.socket.poll(5)
    return False


def lines(caplog, words):
    return [record for record in caplog.records if words in record.getMessage()]


# --- who may connect ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_listed_worker_sends_and_receives(new_front, hosts, tmp_path, scheme):
    front = new_front(
        "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/control", keys=hosts.router
    )
    with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as worker:
        message = hello("decode")
        assert say(worker, message)
        wait_until(lambda: front.heard, PATIENCE_S, "Hello heard")
        identity, heard = front.heard[0]
        assert heard == message
        assert front.call(front.control.transmit, identity, b"welcome")
        assert answer(worker) == b"welcome"
    assert front.control.drops["control_denied"] == front.control.drops["peers_refused"] == 0


@pytest.mark.parametrize("who", ["unlisted key", "no key", "another router's key", "listed as a router"])
def test_s31_an_unlisted_key_is_refused_with_a_log_line(front, hosts, caplog, who):
    if who == "another router's key":
        keys = curve(hosts.decode, "decode", hosts.new("router", "other"))
    elif who == "listed as a router":
        keys = curve(hosts.router, "router", hosts.router)
    else:
        keys = stranger(hosts.router) if who == "unlisted key" else None
    with caplog.at_level(logging.WARNING), dealer(front.endpoint, keys) as impostor:
        assert is_refused(impostor, hello("decode"))
        with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as worker:
            assert say(worker, hello("decode"))
            wait_until(lambda: front.heard, PATIENCE_S, "the others are served")
    assert len(front.heard) == 1

    def reasons():
        found = lines(caplog, "peer refused") + lines(caplog, "failed before it began")
        return [record.fields["reason"] for record in found]

    said = wait_until(reasons, PATIENCE_S, "somebody reads this")
    assert len(said) == len(set(said)), "a line per reason"


def test_a_key_past_its_end_is_refused(new_front, hosts):
    key = read_key(hosts.decode, "decode")
    rotate(hosts.decode, ["decode"], 0, time.time())
    time.sleep(0.01)
    remove(hosts.router, key.public)
    front = new_front(keys=hosts.router)
    with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as worker:
        assert is_refused(worker, hello("decode")), "its new key was not added"
    admit(hosts.router, hosts.decode, "decode")
    with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as worker:
        assert say(worker, hello("decode"))


def test_a_revoked_key_gets_no_new_connection_and_its_old_one_lives(front, hosts):
    keys = curve(hosts.decode, "decode", hosts.router)
    with dealer(front.endpoint, keys) as worker:
        message = hello("decode")
        assert say(worker, message)
        wait_until(lambda: front.heard, PATIENCE_S, "Hello heard")
        remove(hosts.router, read_key(hosts.decode, "decode").public)
        with dealer(front.endpoint, keys) as again:
            assert is_refused(again, hello("decode"))
        assert say(worker, Gone(room=ROOM, epoch=0, instance=message.instance))
        wait_until(lambda: len(front.heard) == 2, PATIENCE_S, "the old connection is heard")


def test_s33_an_unreadable_list_admits_no_peer(front, hosts):
    (hosts.router / "peers.json").write_text("{")
    with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as worker:
        assert is_refused(worker, hello("decode"))
    assert front.control.authenticator.num_failures == 0, "and the thread lives on"


@pytest.mark.parametrize("enforced", [True, False])
def test_s33_a_dead_zap_thread_admits_no_new_peer(front, hosts, monkeypatch, caplog, enforced):
    keys = curve(hosts.decode, "decode", hosts.router)
    if not enforced:  # libzmq's default, to show that the law can fail
        front.close()
        monkeypatch.setattr(zmq.Socket, "setsockopt", without_enforcement)
        front = Front(keys=hosts.router)
    try:
        with dealer(front.endpoint, keys) as worker:
            message = hello("decode")
            assert say(worker, message)
            wait_until(lambda: front.heard, PATIENCE_S, "Hello heard")

            def die(*_):
                raise RuntimeError("planted")

            monkeypatch.setattr(ZapRules, "answer", die)
            with caplog.at_level(logging.ERROR):
                with dealer(front.endpoint, stranger(hosts.router)) as first:
                    say(first, hello("decode"), seconds=REFUSAL_S)
                    wait_until(lambda: lines(caplog, "authentication died"), PATIENCE_S, "the thread is dead")
                with dealer(front.endpoint, stranger(hosts.router)) as second:
                    got_in = say(second, hello("decode"), seconds=REFUSAL_S if enforced else PATIENCE_S)
            assert got_in is not enforced
            assert front.control.drops["authentication_failures"] == 1
            assert len(lines(caplog, "authentication died")) == 1
            num_heard = len(front.heard)
            assert say(worker, Gone(room=ROOM, epoch=0, instance=message.instance))
            wait_until(lambda: len(front.heard) > num_heard, PATIENCE_S, "the old connection is heard")
    finally:
        if not enforced:
            front.close()


PLAIN_SETSOCKOPT = zmq.Socket.setsockopt


def without_enforcement(socket, option, value):
    if option != zmq.ZAP_ENFORCE_DOMAIN:
        PLAIN_SETSOCKOPT(socket, option, value)


# --- who one is ---------------------------------------------------------------------------------------------


def test_s31_a_listed_key_that_claims_another_routing_id_gets_nothing(front, hosts):
    other = hosts.new("decode", "d1")
    admit(hosts.router, other, "decode")
    admit(other, hosts.router, "router")
    with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router), b"victim") as victim:
        assert say(victim, hello("decode"))
        wait_until(lambda: front.heard, PATIENCE_S, "Hello heard")
        with dealer(front.endpoint, curve(other, "decode", hosts.router), b"victim") as impostor:
            say(impostor, hello("decode"), seconds=REFUSAL_S)
            assert front.call(front.control.transmit, b"victim", b"secret")
            assert answer(victim) == b"secret"
            assert answer(impostor, 0.3) is None
            assert len(front.heard) == 1


def test_s31_a_listed_key_that_claims_another_worker_is_ignored(front, hosts, caplog):
    other = hosts.new("decode", "d1")
    admit(hosts.router, other, "decode")
    victim = hello("decode")
    with (
        dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as worker,
        dealer(front.endpoint, curve(other, "decode", hosts.router)) as impostor,
    ):
        assert say(worker, victim)
        wait_until(lambda: front.heard, PATIENCE_S, "Hello heard")
        with caplog.at_level(logging.WARNING):
            beat = Heartbeat(instance=victim.instance, stats=WorkerStats(pages_free=1))
            assert say(impostor, victim, beat, beat, Gone(room=ROOM, epoch=0, instance=victim.instance))
            wait_until(lambda: front.control.num_denied == 4, PATIENCE_S, "all are denied")
        assert len(front.heard) == 1
        assert len(lines(caplog, "message denied")) == 3, "a line each of Hello, Heartbeat and Gone"


def test_without_role_checks_a_decode_key_could_act_as_prefill(front, hosts, monkeypatch):
    """What the next law forbids can be seen to happen."""
    monkeypatch.setattr(Speakers, "fault", lambda *_: "")
    with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as worker:
        lie = hello("prefill")
        assert say(worker, lie, FirstToken(room=ROOM, epoch=0, instance=lie.instance, token=1))
        wait_until(lambda: len(front.heard) == 2, PATIENCE_S, "both are heard")


def test_s31_a_decode_key_cannot_register_as_prefill_or_speak_its_verbs(front, hosts):
    with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as worker:
        mine = hello("decode")
        token = FirstToken(room=ROOM, epoch=0, instance=mine.instance, token=1)
        lie = hello("prefill")
        assert say(worker, lie, mine, token, Gone(room=ROOM, epoch=0, instance=mine.instance))
        wait_until(lambda: len(front.heard) == 2, PATIENCE_S, "the two that it may say are heard")
        rejected = control_down_decoder().decode(answer(worker))
        assert (type(rejected), rejected.instance) == (Rejected, lie.instance)
        assert "may not register" in rejected.reason
        assert answer(worker, 0.1) is None, "a denied verb has no answer"
    assert [type(message).__name__ for _, message in front.heard] == ["Hello", "Gone"]
    assert front.control.drops["control_denied"] == 2


# --- a worker's link ----------------------------------------------------------------------------------------


def test_a_link_joins_a_keyed_router_and_hears_it(front, hosts, new_link):
    link = new_link(front, hosts.decode)
    assert registers(front, link)
    identity, message = front.heard[0]
    welcome = Welcome(instance=message.instance, router="a" * 32)
    front.call(front.control.transmit, identity, encode(welcome))
    wait_until(
        lambda: link.tick(time.monotonic()) or link.receive() == [welcome], PATIENCE_S, "Welcome heard"
    )


@pytest.mark.parametrize(
    "who", ["unlisted worker", "router without keys", "worker with another router's key"]
)
def test_a_worker_that_cannot_join_logs_why_and_joins_when_admitted(
    new_front, hosts, connections, new_link, caplog, who
):
    front = new_front(keys=None if who == "router without keys" else hosts.router)
    keys, reason = hosts.new("decode", "d1"), "refused our key"
    if who == "router without keys":
        keys, reason = hosts.decode, ""  # either end may be the first to see that only one uses keys
    elif who == "unlisted worker":
        admit(keys, hosts.router, "router")
    else:
        admit(hosts.router, keys, "decode")
        admit(keys, hosts.new("router", "other"), "router")
        reason = "broke off"
    link = new_link(front, keys)
    with caplog.at_level(logging.WARNING):
        assert not registers(front, link, 1.8)
        (connection,) = connections
        assert connection.num_failures <= 4, "it backs off"
        assert not registers(front, link, is_enough=lambda: connection.num_failures >= 2)
        assert connection.num_failures >= 2, "it tries again"
    said = [record.fields for record in lines(caplog, "no connection to the router")]
    assert reason in " ".join(line["reason"] for line in said)
    assert 1 <= len(said) == len({line["reason"] for line in said}), "a line per reason"
    assert all("baton keys" in line["remedy"] for line in said)
    if who == "unlisted worker":
        admit(hosts.router, keys, "decode")
        assert registers(front, link), "without a restart"
    elif who == "worker with another router's key":
        admit(keys, hosts.router, "router")
        assert registers(front, link), "without a restart"


def test_a_worker_without_keys_logs_that_the_router_may_require_them(front, new_link, caplog):
    link = new_link(front, None)
    with caplog.at_level(logging.WARNING):
        assert not registers(front, link, 3 * FIRST_PAUSE_S)
        assert not registers(front, link, is_enough=lambda: lines(caplog, "no connection to the router"))
    assert {"--keys" in line.fields["remedy"] for line in lines(caplog, "no connection to the router")} == {
        True
    }


def test_a_worker_that_lists_no_router_does_not_start(front, hosts, new_link):
    with pytest.raises(ConfigError, match="lists no router"):
        new_link(front, hosts.new("decode", "d1"))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_s32_while_the_router_key_is_replaced_workers_reach_old_and_new(
    new_front, hosts, connections, new_link, is_restarted
):
    before = read_key(hosts.router, "router")
    rotate(hosts.router, ["router"], 3600, time.time())
    admit(hosts.decode, hosts.router, "router")
    if not is_restarted:  # the process still has the old pair
        write_key(hosts.router, before)
    front = new_front(keys=hosts.router)
    link = new_link(front, hosts.decode)
    assert registers(front, link)
    assert connections[0].num_failures == (0 if is_restarted else 1)


def test_s32_while_a_worker_key_is_replaced_old_and_new_get_through(front, hosts):
    old = curve(hosts.decode, "decode", hosts.router)
    rotate(hosts.decode, ["decode"], 3600, time.time())
    with dealer(front.endpoint, curve(hosts.decode, "decode", hosts.router)) as early:
        assert is_refused(early, hello("decode")), "the router has not been told"
    admit(hosts.router, hosts.decode, "decode")
    for keys in (old, curve(hosts.decode, "decode", hosts.router)):
        with dealer(front.endpoint, keys) as worker:
            assert say(worker, hello("decode"))
    wait_until(lambda: len(front.heard) == 2, PATIENCE_S, "both are heard")


# --- sockets ------------------------------------------------------------------------------------------------


def test_s28_a_public_address_is_bound_with_keys_only(hosts):
    keyring = load_keyring(str(hosts.router), "router")
    ControlSocket("tcp://0.0.0.0:0", trusted_network=False, keyring=keyring).close()
    ControlSocket("tcp://0.0.0.0:0", trusted_network=True).close()
    with pytest.raises(ConfigError, match="--keys"):
        ControlSocket("tcp://0.0.0.0:0", trusted_network=False)


def test_a_curve_link_passes_the_largest_frame_and_no_larger_one(hosts):
    context, keyring = zmq.Context(), load_keyring(str(hosts.router), "router")
    authenticator = Authenticator(context, keyring.peers, ("decode",))
    router = make_socket(context, zmq.ROUTER, max_frame=5000, curve=keyring.called())
    router.bind("tcp://127.0.0.1:0")
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    with dealer(endpoint, curve(hosts.decode, "decode", hosts.router)) as peer:
        assert say(peer, bytes(5000))
        assert router.poll(20_000)
        assert len(recv_parts(router, 2, 6000)[1]) == 5000
        say(peer, bytes(6000))
        assert not router.poll(300)
    assert repr(authenticator) == "Authenticator(answers, roles=decode, refused=0)"
    router.close()
    context.term()
    wait_until(lambda: "stopped" in repr(authenticator), PATIENCE_S, "the thread ends with its context")


def test_nothing_is_left_when_the_control_socket_cannot_be_bound(front, hosts):
    with pytest.raises(Exception, match="in use"):
        ControlSocket(
            front.endpoint, trusted_network=False, keyring=load_keyring(str(hosts.router), "router")
        )


def test_an_unknown_peer_and_a_full_peer_are_distinct_errors(front):
    with pytest.raises(PeerLost):
        front.call(front.control.transmit, b"nobody", b"x")
