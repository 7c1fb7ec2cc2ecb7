"""The judges of fault rows find what is planted: wrong tokens, second ends, bare ends, too many attempts."""

import socketserver
import threading

import pytest
from baton.tests.faults.history import Promise, violations
from baton.tests.faults.traffic import Ask, Call, Traffic

ASK = Ask(prompt=(5, 6, 7), max_tokens=4)
REFERENCES = {ASK.key: [10, 11, 12, 13, 14]}


def call(**fields):
    good = {
        "status": 200,
        "ids": [10, 11, 12, 13],
        "terminals": ["finished"],
        "ended": 2.0,
        "has_finish": True,
    }
    made = Call(ASK, 1.0)
    for name, value in {**good, **fields}.items():
        setattr(made, name, value)
    return made


ERROR = {"message": "lost", "type": "server_error"}


def test_an_honest_end_breaks_no_promise():
    cut_short = call(ids=[10, 11], terminals=["error"], error=ERROR)
    refused = call(ids=[], status=503, terminals=["error"], error=ERROR, headers={"retry-after": "1"})
    left = call(ids=[10], terminals=["cancelled"])
    assert violations([call(), cut_short, refused, left], REFERENCES, Promise()) == []


@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("I1: terminal events", {"terminals": ["finished", "error"], "error": ERROR}),
        ("I1: terminal events", {"terminals": []}),
        ("behind the end", {"after_end": 1}),
        ("ended as 'cut'", {"terminals": ["cut"], "ids": [10]}),
        ("ended as 'timeout'", {"terminals": ["timeout"]}),
        ("says nothing", {"terminals": ["error"], "ids": [], "error": {}}),
        ("status 500", {"terminals": ["error"], "ids": [], "error": ERROR, "status": 500}),
        ("without Retry-After", {"terminals": ["error"], "ids": [], "error": ERROR, "status": 503}),
        ("I2: token 1", {"ids": [10, 99, 12, 13]}),
        ("I2: token 4", {"ids": [10, 11, 12, 13, 14]}),
        ("finished after 3", {"ids": [10, 11, 12]}),
        ("behind a whole answer", {"terminals": ["error"], "error": ERROR}),
        ("I10", {"ended": 40.0}),
    ],
)
def test_a_broken_promise_is_named(word, fields):
    found = violations([call(**fields)], REFERENCES, Promise())
    assert any(word in line for line in found), found


def test_tokens_that_differ_from_a_run_without_faults_are_a_violation():
    assert "no reference" in violations([call()], {}, Promise())[0]


def test_attempts_beyond_the_budget_are_a_violation():
    once, thrice = {"attempts": 1}, {"attempts": 3}
    many = [call(timeline=once) for _ in range(100)]
    assert violations(many, REFERENCES, Promise()) == []
    assert "I9" in violations(many + [call(timeline=thrice) for _ in range(20)], REFERENCES, Promise())[-1]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKENS = b'data: {"choices":[{"text":"a","token_ids":[10,11,12,13],"finish_reason":%s}]}\n\n'
DONE = b"data: [DONE]\n\n"
FAILED = b'data: {"error":{"message":"m","type":"t"}}\n\n'


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        ([TOKENS % b'"length"', DONE, b""], ["finished"]),
        ([TOKENS % b"null", FAILED, b""], ["error"]),
        ([TOKENS % b"null"], ["cut"]),
        ([TOKENS % b'"length"'], ["cut"]),
        ([TOKENS % b"null", b""], ["cut"]),
        ([TOKENS % b"null", DONE, b""], ["done without a finish reason"]),
        ([TOKENS % b'"length"', DONE, FAILED, b""], ["finished", "error"]),
        ([], ["cut"]),
    ],
    ids=[
        "whole",
        "error frame",
        "bare end",
        "no done",
        "last chunk without an end",
        "done alone",
        "two ends",
        "nothing",
    ],
)
def test_a_client_records_the_end_that_it_saw(events, ends):
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    assert seen_of(b"".join([HEAD, *chunks]) if events else b"").terminals == ends


@pytest.mark.parametrize(("missing", "end"), [(0, "finished"), (1, "cut")])
def test_an_answer_with_a_length_counts_only_once_all_of_it_arrived(missing, end):
    body = TOKENS % b'"length"' + DONE
    head = HEAD.replace(b"transfer-encoding: chunked", b"content-length: %d" % len(body))
    seen = seen_of(head + body[: len(body) - missing])
    assert (seen.end, len(seen.ids)) == (end, 0 if missing else 4)


def seen_of(answer):
    """What a client saw of a server that says this and hangs up."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1 << 16)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        traffic = Traffic(server.server_address[1], "m")
        try:
            (seen,) = traffic.wait(traffic.start(ASK), 10)
        finally:
            traffic.close()
            server.shutdown()
    return seen
