"""The terminal client says what the server says, keeps only whole turns, and a failure costs one turn."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from baton.cluster.errors import ConfigError, StartupError
from baton.deploy.cli import demo
from baton.deploy.cli.chat import ChatConfig, Conversation, converse, describe, main
from baton.deploy.cli.client import SILENCE_S, ChatClient, RequestFailed, StreamedAnswer
from baton.deploy.cli.demo import curl_line, timeline_rows
from baton.deploy.up.launcher import ChildInfo

TIMELINE = {
    "tokenize_ms": 0.4, "queue_ms": 0.1, "prefill_queue_ms": 0.2, "prefill_ms": 41.0, "cached_tokens": 32,
    "ttft_ms": 55.5, "handoff_ms": 12.0, "handoff_bytes": 3 * 2**20, "handoff_blocks": 3, "tpot_ms": 20.5,
    "verify_steps": 2, "accept_length": 2.5, "accepted": 3, "drafted": 6, "e2e_ms": 120.0,
}  # fmt: skip
USAGE = {"prompt_tokens": 40, "completion_tokens": 5}


def chunk(text="", finish=None, **more):
    return {
        "choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}],
        **more,
    }


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


WHOLE = [
    event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    b": keep-alive\n\n",
    event(chunk("Grüße, ")),
    event(chunk("Welt")),
    event(chunk(finish="stop")),
    event({"choices": [], "usage": USAGE, "timeline": TIMELINE}),
    event(b"[DONE]"),
]


class Server(ThreadingHTTPServer):
    """Answers the n-th chat completion with the n-th script: bytes pieces, or (status, body)."""

    daemon_threads = True

    def __init__(self, scripts):
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts, self.bodies, self.headers_seen = list(scripts), [], []
        self.client_gone = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.headers_seen.append(self.headers)
        script = self.server.scripts.pop(0)
        if isinstance(script, tuple):
            return self.reply(*script)
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        try:
            for piece in script:
                self.wfile.write(piece)
        except OSError:
            self.server.client_gone.set()


@pytest.fixture
def serve():
    """Start a server with these scripts; all are stopped after the test."""
    running = []

    def start(*scripts):
        server = Server(scripts)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join(10)


def conversation(server, **settings):
    return Conversation(ChatClient(server.url), ChatConfig(url=server.url, **settings), "tiny")


def test_pieces_come_in_order_with_usage_and_timeline(serve):
    server, pieces = serve(WHOLE), []
    answer = ChatClient(server.url).stream({"model": "tiny", "messages": []}, pieces.append)
    assert pieces == ["Grüße, ", "Welt"]
    assert (answer.text, answer.finish_reason, answer.num_tokens) == ("Grüße, Welt", "stop", 5)
    assert answer.accept_length == 2.5
    assert 0 < answer.first_text_s <= answer.last_text_s
    assert server.headers_seen[0]["x-baton-timeline"] == "1"
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_whole_turn_enters_the_history(serve):
    server = serve(WHOLE, WHOLE)
    talk = conversation(server, system="Be brief.", max_tokens=7, temperature=0.5)
    talk.ask("one", lambda _: None)
    talk.ask("two", lambda _: None)
    roles = [message["role"] for message in server.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert server.bodies[1]["messages"][2]["content"] == "Grüße, Welt"
    assert (server.bodies[1]["max_tokens"], server.bodies[1]["temperature"]) == (7, 0.5)
    assert repr(talk) == "<Conversation 5 messages with tiny>"


BROKEN = {
    "error object": (
        (400, b'{"error": {"message": "prompt is too long"}}'),
        "answered 400: prompt is too long",
    ),
    "not an error object": ((502, b"<html>bad gateway</html>"), "answered 502: <html>bad gateway</html>"),
    "error frame": (
        [WHOLE[2], event({"error": {"message": "decode worker lost"}})],
        "broke the answer off: decode",
    ),
    "early end": (WHOLE[:4], r"ended without \[DONE\]"),
    "no JSON": ([b"data: {oops\n\n"], "sent no JSON"),
    "no object": ([b"data: 3\n\n"], "sent int, not an object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_failed_turn_prints_one_line_and_does_not_enter_the_history(serve, name):
    script, message = BROKEN[name]
    talk = conversation(serve(script))
    with pytest.raises(RequestFailed, match=message) as failure:
        talk.ask("hello", lambda _: None)
    assert "\n" not in str(failure.value)
    assert talk.messages == []


def test_without_a_server_the_error_says_how_to_start_one(serve):
    server = serve()
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(RequestFailed, match=r"nothing listens at .*baton up"):
        ChatClient(url).model()


def test_an_interrupt_closes_the_connection_and_the_talk_goes_on(serve, capsys, tmp_path):
    endless = (event(chunk("x" * 4096)) for _ in range(10_000))
    server = serve(endless, WHOLE)
    talk, seen = conversation(server), []

    class Out:
        def write(self, text):
            seen.append(text)
            if len(seen) == 3:
                raise KeyboardInterrupt

        def flush(self):
            pass

    converse(talk, iter(["first", "second"]), Out())
    assert server.client_gone.wait(10)
    assert seen[3] == "\n(interrupted)\n"
    assert [message["content"] for message in talk.messages] == ["second", "Grüße, Welt"]


def test_a_failed_answer_ends_its_turn_only(serve):
    server = serve((503, b'{"error": {"message": "no pair"}}'), WHOLE)
    talk, seen = conversation(server), []
    out = type("Out", (), {"write": lambda _, text: seen.append(text), "flush": lambda _: None})()
    converse(talk, iter(["first", "second"]), out)
    assert "answered 503: no pair" in seen[0]
    assert len(talk.messages) == 2


def test_once_prints_the_answer_alone_on_stdout(serve, capsys):
    server = serve(WHOLE)
    assert main(["--url", server.url, "--once", "hi", "--system", "s"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Grüße, Welt\n"
    assert printed.err.startswith("[5 tokens, first after ")
    assert "accept length 2.50" in printed.err
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["--url", "ftp://x"],
        ["--url", "http://x:99999"],
        ["--temperature", "hot"],
        ["--max-tokens", "0"],
        ["--onse"],
    ],
)
def test_bad_usage_is_one_line(argv, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("baton chat: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "http://", "http://host:port"])
def test_urls_without_scheme_host_or_port_are_refused(url):
    with pytest.raises(ConfigError, match="write http://HOST:PORT"):
        ChatClient(url)


def test_a_silent_server_is_given_up_in_bounded_time(serve):
    assert f"sent nothing for {SILENCE_S:g} s" in str(ChatClient("http://h")._lost(httpx.ReadTimeout("")))


def test_speed_counts_the_tokens_after_the_first():
    answer = StreamedAnswer(usage=USAGE, first_text_s=1.0, last_text_s=3.0, finish_reason="length")
    assert answer.tokens_per_second == 2.0
    assert describe(answer) == "[5 tokens, first after 1000 ms, 2.0 tok/s, cut at --max-tokens]"
    assert describe(StreamedAnswer()) == "[0 tokens]"


# --- what the demo shows ------------------------------------------------------------------------------------


def test_the_timeline_shows_the_phases_in_order():
    rows = timeline_rows(StreamedAnswer(usage=USAGE, timeline=TIMELINE, finish_reason="stop"))
    figures = {row[0]: row[1:] for row in rows}
    assert figures["hand-off"] == ("12.0 ms", "3.00 MiB in 3 blocks")
    assert figures["verify steps"] == ("2", "3 of 6 drafted tokens accepted")
    assert figures["accept length"][0] == "2.50"
    assert [row[0] for row in rows][:2] == ["tokenize", "queue"]


def test_steps_that_did_not_happen_are_left_out():
    rows = timeline_rows(
        StreamedAnswer(usage=USAGE, timeline={"ttft_ms": 10.0, "verify_steps": 0, "accept_length": None})
    )
    assert [row[0] for row in rows] == ["first token (TTFT)"]


def test_the_curl_line_survives_the_shell():
    body = {"model": "tiny", "messages": [{"role": "user", "content": 'Isn\'t `this` $HOME "fun"?'}]}
    words = shlex.split(curl_line("http://h:1", body))
    assert words[:3] == ["curl", "-N", "http://h:1/v1/chat/completions"]
    assert json.loads(words[-1]) == {**body, "stream": True}


class FakeCluster:
    """Stands where a cluster would; its router is the scripted server."""

    def __init__(self, url, ready=None, failure=""):
        self.url, self.failure, self.calls, self._ready = url, failure, [], ready
        self.drain_s = 33.0
        self.on_stop = lambda: None
        self.children = [ChildInfo(name="router", role="router", pid=7, num_starts=1)]

    def start(self):
        self.calls.append("start")

    def wait_ready(self, timeout):
        self.calls.append("wait_ready")
        if self._ready is not None:
            raise self._ready

    def stop(self, hurry, *, drain_s):
        assert drain_s == self.drain_s
        self.calls.append("stop")
        self.on_stop()
        self.was_hurried = hurry.is_set()


@pytest.fixture
def run_demo(monkeypatch, tmp_path):
    """`baton demo` with a fake cluster; signals are handled as before afterwards."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def run(cluster, *argv):
        monkeypatch.setattr(demo, "ensure_demo_model", lambda: tmp_path)
        monkeypatch.setattr(demo, "Cluster", lambda config: setattr(cluster, "config", config) or cluster)
        return demo.main(list(argv))

    yield run
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_the_demo_shows_an_answer_and_its_timeline_and_stops(serve, run_demo, capsys, tmp_path):
    cluster = FakeCluster(serve(WHOLE).url)
    assert run_demo(cluster, "--once", "--prompt", "Why [not]?", "--port", "0") == 0
    out = capsys.readouterr().out
    parts = ["router (pid 7)", "Why [not]?", "Grüße, Welt", "accept length"]
    assert [part for part in parts if part not in out] == []
    assert [out.index(part) for part in parts] == sorted(out.index(part) for part in parts)
    assert cluster.url not in out, "nothing answers there when the demo has ended"
    assert cluster.calls == ["start", "wait_ready", "stop"]
    assert (cluster.config.model, cluster.config.port) == (str(tmp_path), 0)
    assert cluster.config.draft.endswith("assets/smollm2-135m-eagle3")


def test_a_demo_that_stays_up_tells_its_addresses(serve, run_demo, capsys):
    run_demo(FakeCluster(serve(WHOLE).url, failure="prefill keeps crashing"))
    out = capsys.readouterr().out
    parts = ["accept length", "curl -N", "/status", "/metrics", "running until Ctrl-C"]
    assert [part for part in parts if part not in out] == []
    assert [out.index(part) for part in parts] == sorted(out.index(part) for part in parts)


def test_without_drafts_the_demo_needs_no_head(serve, run_demo):
    cluster = FakeCluster(serve(WHOLE).url)
    assert run_demo(cluster, "--once", "--no-draft") == 0
    assert (cluster.config.draft, cluster.config.no_draft) == ("", True)


@pytest.mark.parametrize("case", ["not ready", "refused", "gave up"])
def test_a_failed_demo_is_one_line_and_stops_everything(serve, run_demo, capsys, case):
    scripts = [(503, b'{"error": {"message": "no pair"}}')] if case == "refused" else [WHOLE]
    url = serve(*scripts).url
    ready = StartupError("decode cannot start") if case == "not ready" else None
    cluster = FakeCluster(url, ready=ready, failure="prefill keeps crashing" if case == "gave up" else "")
    assert run_demo(cluster) == 1
    err = capsys.readouterr().err
    assert err.startswith("baton demo: ")
    assert err.count("\n") == 1
    assert cluster.calls[-1] == "stop"


def test_sigterm_while_it_stays_up_stops_everything(serve, run_demo, monkeypatch):
    cluster = FakeCluster(serve(WHOLE).url)
    monkeypatch.setattr(demo.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    assert run_demo(cluster) == 0
    assert cluster.calls == ["start", "wait_ready", "stop"]


@pytest.mark.parametrize("is_once", [False, True])
def test_signals_while_the_demo_stops_hurry_it_and_interrupt_nothing(serve, run_demo, monkeypatch, is_once):
    cluster = FakeCluster(serve(WHOLE).url)
    finished = []
    monkeypatch.setattr(demo.time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))

    def more_signals():
        for _ in range(2 if is_once else 1):  # without --once the first one ended the stay
            signal.raise_signal(signal.SIGINT)
        finished.append(True)

    cluster.on_stop = more_signals
    assert run_demo(cluster, *(["--once"] if is_once else [])) == 0
    assert finished == [True]
    assert cluster.was_hurried


def test_the_demo_runs_on_the_cpu_even_beside_a_gpu(serve, run_demo):
    cluster = FakeCluster(serve(WHOLE).url)
    run_demo(cluster, "--once")
    assert cluster.config.device == "cpu"


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://[::1",
            "http://h:port",
            "http://h:99999",
            "http://a b",
            "http://h/ü",
            "http://h\n:1",
            "h:1",
            "http://",
        ),
        "http://" + "a" * 70,
    ],
)
def test_a_malformed_url_is_one_line(capsys, url):
    assert main(["--url", url, "--once", "hi"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("baton chat: --url ")
    assert err.count("\n") == 1


def test_a_closed_output_prints_one_line_and_does_not_blame_the_server(serve):
    command = [sys.executable, "-m", "baton", "chat", "--url", serve(WHOLE).url, "--once", "hi"]
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        done = subprocess.run(
            command, cwd="/", stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "baton chat: the output was closed before its end\n"
