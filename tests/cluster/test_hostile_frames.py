"""Hostile bytes against every port of every role, with and without keys: each role serves on and stays small.

The ports are those of real processes, so memory is the server's alone.
"""

import contextlib
import gc
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from baton.cluster.errors import RemoteProtocolError
from baton.cluster.protocol.codec import (
    control_down_decoder,
    control_up_decoder,
    encode,
    kv_down_decoder,
    kv_up_decoder,
)
from baton.tests.cluster.conftest import SMALL
from baton.tests.cluster.hostile import CANARY, MIB, hostile_frames, listeners, ports, send_all
from baton.tests.cluster.keyed_peers import answer, dealer, hello, raw_send, say
from baton.tests.cluster.serving import complete, serving, wait_until
from baton.tests.cluster.test_prefix_pulls import assert_turns_are_pulled, conversation, pulled
from baton.tests.corpora import corpus

FRAMES = corpus.load("msgpack_frames")
RAW = corpus.load("zmtp_raw")
PROMPT = [7, 80, 33, 150, 9, 212, 41, 5, 18, 99, 120, 61, 3, 77, 240, 14, 15, 16, 200, 31]
KINDS_OF_FAULT = 20  # at most so many different reasons for which a frame is no message


@pytest.fixture(params=["plain", "keys"])
def cluster_ports(request):
    """plane -> Port of one of the shared clusters, whose answer is the same afterwards."""
    is_keyed = request.param == "keys"
    cluster = request.getfixturevalue("keyed_cluster" if is_keyed else "plain_cluster")
    keys = request.getfixturevalue("shared_keys") if is_keyed else None
    before, pids = complete(cluster, PROMPT, max_tokens=8)[0], [child.pid for child in cluster.children]
    yield {port.plane: port for port in ports(cluster, keys)}
    assert complete(cluster, PROMPT, max_tokens=8)[0] == before
    assert [child.pid for child in cluster.children] == pids, "no process ended"
    assert not (cluster._directory / CANARY).exists(), "nobody loaded a pickle"


@pytest.fixture(params=["control", "kv", "prefixes"])
def port(request, cluster_ports):
    return cluster_ports[request.param]


def test_s28_only_required_ports_listen_and_only_on_loopback(plain_cluster, keyed_cluster):
    for cluster in (plain_cluster, keyed_cluster):
        found = {child.name: listeners(child.pid) for child in cluster.children}
        assert found == {
            "router": {("tcp", "127.0.0.1")},
            "prefill-0": {("tcp", "127.0.0.1")},
            "decode-0": {("tcp", "127.0.0.1")},
        }
        planes = sorted((port.child, port.plane) for port in ports(cluster))
        expected = [("decode-0", "prefixes"), ("prefill-0", "kv"), ("router", "control"), ("router", "http")]
        bulk = [("decode-0", "prefix-bulk"), ("prefill-0", "bulk")]
        assert planes == sorted(expected + bulk * (cluster is keyed_cluster))


def test_s2_s28_s29_by_default_only_http_listens_on_the_network(served_dir):
    with serving(served_dir, kv_memory_mb=8, threads=1) as cluster:
        directory = cluster._directory
        found = {child.name: listeners(child.pid) for child in cluster.children}
        assert found == {
            "router": {("tcp", "127.0.0.1"), ("unix", f"{directory}/control")},
            "prefill-0": {("unix", f"{directory}/kv-0")},
            "decode-0": {("unix", f"{directory}/prefix-0")},
        }
        assert directory.stat().st_mode & 0o777 == 0o700
        before = complete(cluster, PROMPT, max_tokens=8)[0]
        pids = [child.pid for child in cluster.children]
        for path in (f"{directory}/control", f"{directory}/kv-0", f"{directory}/prefix-0"):
            s2_s29_hostile_bytes_at_a_unix_socket(path)
        assert complete(cluster, PROMPT, max_tokens=8)[0] == before
        assert [child.pid for child in cluster.children] == pids, "no process ended"
        assert not (directory / CANARY).exists(), "nobody loaded a pickle"


def s2_s29_hostile_bytes_at_a_unix_socket(path):
    """As at a port: messages of a peer that may connect, and bytes that are not ZeroMQ's."""
    with dealer(f"ipc://{path}") as hostile:
        assert send_all(hostile, hostile_frames())
    for case in RAW:
        with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
            stranger.settimeout(30)
            stranger.connect(path)
            stranger.sendall(corpus.data(case))


def test_s2_a_thousand_hostile_frames_of_a_peer_that_may_connect(port):
    frames = hostile_frames()
    assert len(frames) >= 1000
    large = [data for case in FRAMES if len(data := corpus.data(case)) > port.max_frame]
    assert 2 <= len(large) <= 3
    num_before, since, resident = port.num_malformed(), len(port.cluster.output.getvalue()), port.resident()
    with dealer(port.endpoint, port.curve()) as hostile:
        assert send_all(hostile, frames)
        wait_until(
            lambda: port.num_malformed() - num_before == len(frames), 60, "each is dropped and counted"
        )
    for data in large:
        with dealer(port.endpoint, port.curve()) as hostile:
            say(hostile, data)
            assert answer(hostile, 0.3) is None
    assert port.num_malformed() - num_before == len(frames), "the large ones are cut off on the wire"
    assert port.resident() - resident <= 20 * MIB
    lines = [line for line in port.warnings(since) if "essage dropped" in line]
    assert 1 <= len(lines) <= KINDS_OF_FAULT, "a line per kind of fault"


@pytest.mark.parametrize("is_keyed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_s2_prefixes_are_pulled_after_a_thousand_hostile_frames(served_dir, shared_keys, is_keyed):
    keys = shared_keys if is_keyed else None
    settings = {**SMALL, "prefix_pulls": "always", **({"keys": str(keys)} if is_keyed else {})}
    with serving(served_dir, **settings) as cluster:
        said, pids = conversation(cluster, PROMPT), [child.pid for child in cluster.children]
        assert_turns_are_pulled(said)
        port = next(port for port in ports(cluster, keys) if port.plane == "prefixes")
        frames, (before, _, _) = hostile_frames(), pulled(cluster)
        with dealer(port.endpoint, port.curve()) as hostile:
            assert send_all(hostile, frames)
            wait_until(lambda: port.num_malformed() == len(frames), 60, "each is dropped and counted")
        metric = rf'^baton_worker_events_total{{.*event="prefix_malformed".*role="decode".*}} {len(frames)}\b'
        assert re.search(metric, httpx.get(f"{cluster.url}/metrics", timeout=60).text, re.MULTILINE)
        other = PROMPT[::-1]
        assert_turns_are_pulled(conversation(cluster, other))
        assert conversation(cluster, PROMPT)[0][0] == said[0][0]
        wait_until(lambda: pulled(cluster)[0] > before, 60, "prefill has pulled since")
        assert pulled(cluster)[2] == 0, "no pull was missed"
        assert [child.pid for child in cluster.children] == pids, "no process ended"


def test_s2_hostile_frames_at_the_http_port_are_refused(cluster_ports):
    port = cluster_ports["http"]
    resident = port.resident()
    with ThreadPoolExecutor(16) as pool:
        ends = list(
            pool.map(lambda frame: raw_send(port.endpoint, [frame or b"\x00"], 0.05), hostile_frames())
        )
    assert len(ends) >= 1000
    assert port.resident() - resident <= 20 * MIB


@pytest.mark.parametrize("plane", ["control", "kv", "prefixes", "bulk", "prefix-bulk", "http"])
def test_s29_raw_bytes_before_and_around_the_handshake(cluster_ports, plane):
    if plane not in cluster_ports:
        pytest.skip("only with keys do blocks have a port of their own")
    port = cluster_ports[plane]
    is_closed = port.keys is not None
    num_before = None if plane == "http" else port.num_malformed()
    since, resident = len(port.cluster.output.getvalue()), port.resident()
    with ThreadPoolExecutor(len(RAW)) as pool:
        list(pool.map(lambda case: raw_send(port.endpoint, corpus.steps(case)), RAW))
    grown = port.resident() - resident
    if is_closed:
        assert plane == "http" or port.num_malformed() == num_before, "nothing reaches the decoder"
        assert grown <= 2 * MIB * len(RAW)
    else:  # a peer needs no key to send a million empty parts, which libzmq keeps until the message is whole
        assert grown <= 100 * MIB
    assert len(port.warnings(since)) <= len(RAW)
    lines = [line for line in port.warnings(since) if "before it began" in line]
    assert len(lines) <= 4, "a line per reason"


def test_s29_an_unauthenticated_peer_puts_no_megabyte_into_a_keyed_port(keyed_cluster, shared_keys):
    greeting = next(corpus.steps(case) for case in RAW if len(corpus.steps(case)) > 1)[0]
    for port in ports(keyed_cluster, shared_keys):
        resident = port.resident()
        flood = [greeting, *([b"\x02" + (10 * MIB).to_bytes(8, "big") + bytes(MIB)] * 25)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _, port=port, flood=flood: raw_send(port.endpoint, flood, 0.05), range(4)))
        assert port.resident() - resident <= 8 * MIB, port


@pytest.mark.parametrize(
    "decoder", [control_up_decoder, control_down_decoder, kv_up_decoder, kv_down_decoder]
)
def test_s4_every_decoder_refuses_every_hostile_frame_at_once(decoder, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    decode = decoder().decode
    frames = [*(corpus.data(case) for case in FRAMES), *hostile_frames()]
    gc.disable()  # a look at all that this process has takes longer
    request.addfinalizer(gc.enable)
    for data in frames:
        started = time.thread_time()
        with pytest.raises(RemoteProtocolError):
            decode(data)
        assert time.thread_time() - started < (0.5 if len(data) > MIB else 0.05), data[:40]
    assert not Path(CANARY).exists()


def test_a_message_of_many_parts_is_dropped_whole_and_others_are_served(port):
    num_before = port.num_malformed()
    with dealer(port.endpoint, port.curve()) as hostile:
        assert say(hostile, b"\xc1")
        hostile.send_multipart([encode(hello("decode"))] * 1000)
        hostile.send_multipart([bytes(port.max_frame)] * 30)
        wait_until(lambda: port.num_malformed() - num_before == 3, 60, "all are dropped")


def test_a_peer_that_floods_and_never_reads_is_cut_and_others_are_served(port):
    since, resident = len(port.cluster.output.getvalue()), port.resident()

    def is_cut():
        return any("sends faster than it is read" in line for line in port.warnings(since))

    until = time.monotonic() + 60
    with dealer(port.endpoint, port.curve(), high_water=0) as hostile:
        assert say(hostile, encode(hello("decode")))
        while not is_cut():
            assert time.monotonic() < until, "its messages are read for ever"
            send_all(hostile, [b"\xc1"] * 20_000)
    assert complete(port.cluster, PROMPT, max_tokens=8)
    assert port.resident() - resident <= 200 * MIB
