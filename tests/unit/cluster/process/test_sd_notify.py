"""Notifications to a service manager: paced datagrams that never fail the process that sends them."""

import socket
import threading
import time

import pytest
from baton.cluster.errors import ConfigError
from baton.cluster.process.process import Shutdown
from baton.cluster.process.sd_notify import (
    PINGS_PER_LIMIT,
    WAIT_PACE_S,
    Notifier,
    notifier_of,
    waiting,
    without_manager,
)
from baton.cluster.process.watchdog import Watchdog
from baton.cluster.protocol.messages import Welcome
from baton.tests.unit.worker.test_main_loop import FakeLink, FakeWorker
from baton.worker.link import WorkerLink
from baton.worker.main_loop import WorkerLoop


class Heard:
    def __init__(self):
        self.data = []

    def send(self, data, patience_s):
        self.data.append(data.decode())


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        yield listening


def test_without_a_manager_nothing_is_sent_and_nothing_fails():
    notifier = notifier_of({})
    notifier.ready("x")
    notifier.ping(1.0)
    notifier.stopping("x")
    assert notifier.limit_s == 0


def test_each_notification_is_sent_once_per_kind(manager):
    notifier = notifier_of({"NOTIFY_SOCKET": manager.getsockname()})
    for _ in range(2):
        notifier.ready("serving")
    for _ in range(2):
        notifier.stopping("draining")
    assert [manager.recv(4096) for _ in range(2)] == [
        b"READY=1\nSTATUS=serving",
        b"STOPPING=1\nSTATUS=draining",
    ]
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)


def test_an_abstract_address_is_reached():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(b"")  # the kernel chooses an abstract name
        name = listening.getsockname()[1:].decode()
        notifier_of({"NOTIFY_SOCKET": f"@{name}"}).ready("serving")
        listening.settimeout(30)
        assert listening.recv(4096).startswith(b"READY=1")


def test_a_missing_manager_does_not_stop_the_process(manager, tmp_path, caplog):
    notifier = notifier_of({"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "8000000"})
    for now in (0.0, 10.0, 20.0):
        notifier.ping(now)
    assert len(caplog.records) == 1  # of a row of failures


def test_a_slow_manager_still_gets_one_time_messages(manager, monkeypatch):
    monkeypatch.setattr(
        "baton.cluster.process.sd_notify.PATIENCE_S", 60.0
    )  # this thread, which reads, may get no core for a while
    notifier = notifier_of({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "8000000"})
    for now in range(2000):  # more than its queue holds
        notifier.ping(now)
    telling = threading.Thread(target=notifier.ready, args=("serving",))
    telling.start()
    while (said := manager.recv(4096)) == b"WATCHDOG=1":
        pass
    telling.join()
    assert said == b"READY=1\nSTATUS=serving"


def test_pings_keep_a_pace_well_inside_the_limit():
    heard = Heard()
    notifier = Notifier(heard, limit_s=8.0)
    for tenth in range(81):
        notifier.ping(tenth / 10)
    assert heard.data == ["WATCHDOG=1"] * (PINGS_PER_LIMIT + 1)


@pytest.mark.parametrize(
    ("env", "limit"), [({}, 2.0), ({"WATCHDOG_PID": "7"}, 2.0), ({"WATCHDOG_PID": "8"}, 0.0)]
)
def test_only_the_watched_process_pings(manager, env, limit):
    env = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "2000000", **env}
    assert notifier_of(env, pid=7).limit_s == limit


@pytest.mark.parametrize("env", [{"NOTIFY_SOCKET": "here"}, {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}])
def test_a_wrong_variable_is_named(env):
    with pytest.raises(ConfigError, match=str(list(env.values())[-1])):
        notifier_of(env)


def test_children_inherit_no_manager_variables():
    told = without_manager({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "PATH": "/bin"})
    assert told == {"PATH": "/bin"}


def test_each_feed_reaches_the_manager_even_without_our_own_watchdog():
    heard = Heard()
    dog = Watchdog(0.0, notifier=Notifier(heard, limit_s=8.0))
    link = WorkerLink(lambda context: None)
    link.feeder(dog)(0.0)
    link.close()
    assert heard.data == ["WATCHDOG=1"]
    assert dog.shortest_s == 8.0


def test_a_link_thread_that_hangs_stops_the_pings():
    heard = Heard()
    link = WorkerLink(lambda context: None)
    feed = link.feeder(Watchdog(0.0, notifier=Notifier(heard, limit_s=8.0)))
    feed(link._turned_at + 3.9)
    feed(link._turned_at + 4.1)
    feed(link._turned_at + 5.5)
    link.close()
    assert heard.data == ["WATCHDOG=1"]


class TalkingLink(FakeLink):
    def __init__(self, events):
        super().__init__()
        self._events = events

    def receive(self, timeout):
        taken = list(self._events)
        self._events.clear()
        return taken


def worker_loop(events):
    clock, heard, shutdown = [100.0], Heard(), Shutdown()
    notifier = Notifier(heard)
    loop = WorkerLoop(
        FakeWorker(clock),
        TalkingLink(events),
        shutdown,
        drain_timeout_s=5.0,
        clock=lambda: clock[0],
        notifier=notifier,
    )
    return loop, heard, shutdown


def test_a_worker_extends_its_start_time_until_a_router_welcomes_it():
    events = []
    loop, heard, shutdown = worker_loop(events)
    for _ in range(int(2 * WAIT_PACE_S / 0.1)):
        loop.turn()
    assert [data.partition("=")[0] for data in heard.data] == ["EXTEND_TIMEOUT_USEC"] * 2
    heard.data.clear()
    events.append(Welcome(instance="1" * 32, router="2" * 32))
    for _ in range(200):
        loop.turn()
    assert heard.data == ["READY=1\nSTATUS=serving"]
    shutdown.drain.set()
    loop.run()
    assert heard.data[1:] == ["STOPPING=1\nSTATUS=draining"]


def test_a_body_that_blocks_extends_its_start_time_until_it_ends(monkeypatch):
    monkeypatch.setattr("baton.cluster.process.sd_notify.WAIT_PACE_S", 0.01)
    heard, enough = Heard(), threading.Event()

    class Ears:
        def send(self, data, patience_s):
            heard.send(data, patience_s)
            if len(heard.data) > 2:
                enough.set()

    with waiting(Notifier(Ears()), "fetching checkpoints"):
        assert enough.wait(60)
    count = len(heard.data)
    assert set(heard.data) == {"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=fetching checkpoints"}
    time.sleep(0.05)
    assert len(heard.data) == count
