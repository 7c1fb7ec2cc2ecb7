"""The operator's view over HTTP: the page, recent requests, and the timeline of each."""

import base64
import hashlib
import re
import socket

import httpx
import pytest
from baton.deploy.keys.api_keys import add
from baton.router.endpoints.html_page import PAGES
from baton.router.scheduling.history import KEPT
from baton.tests.cluster.router_fakes import BODY, post, until
from baton.tests.unit.cluster.telemetry.test_metrics import samples


@pytest.fixture
def running(start):
    running, script = start()
    running.pair(script)
    return running


def requests_of(running, key="", **params):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(running.url + "/requests", params=params, headers=headers)


def ended(running, count=1, key=""):
    """The rows, once so many requests have ended."""

    def rows():
        found = requests_of(running, key).json()["requests"]
        return found if sum(row["outcome"] is not None for row in found) >= count else None

    return until(rows, f"{count} requests ended")


def test_an_answers_id_finds_its_history_and_its_row(running):
    reply = post(running).json()
    [row] = ended(running)
    story = httpx.get(f"{running.url}/requests/{reply['id']}").json()
    assert (story["id"], story["state"], story["outcome"]) == (reply["id"], "ended", "ok")
    [choice] = story["choices"]
    assert choice["room"].startswith(row["id"])
    assert row["output_tokens"] == choice["output_tokens"] == reply["usage"]["completion_tokens"]
    timeline = choice["timeline"]
    assert (timeline["handoff_bytes"], timeline["verify_steps"], timeline["attempts"]) == (4096, 10, 1)
    [attempt] = timeline["attempt_log"]
    moments = [attempt[name] for name in ("placed_ms", "reserved_ms", "first_token_ms", "ended_ms")]
    assert moments == sorted(moments)
    assert "timeline" not in reply, "not told unless asked"
    assert httpx.get(f"{running.url}/requests/{row['id']}").json() == story
    for text in (str(story), requests_of(running).text):
        assert "hi" not in re.findall(r"\w+", text), "what the client said"
        assert "wörld" not in text


def test_the_load_is_kept_and_newer_points_are_sent_on_request(running):
    assert post(running).status_code == 200
    view = until(
        lambda: (found := httpx.get(running.url + "/history").json())["router"]["ended"].count(1) and found,
        "a point with the request",
    )
    assert view["num_bytes"] == 4 * 450 * (9 + 2 * 8)
    assert [len(worker["series"]["requests"]) for worker in view["workers"]] == [
        len(view["router"]["running"])
    ] * 2
    assert 38 <= 2 * sum(view["router"]["output_tokens_per_s"]) <= 42  # points of two seconds are rounded
    later = httpx.get(running.url + "/history", params={"since": view["last"]}).json()
    assert len(later["router"]["running"]) == later["last"] - view["last"]
    for since in ("-1", "x", "9" * 5000):
        refused = httpx.get(running.url + "/history", params={"since": since})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "since")


def test_a_reply_with_a_timeline_lists_its_attempts(running):
    headers = {"x-baton-timeline": "1"}
    reply = httpx.post(running.url + "/v1/chat/completions", json=BODY, headers=headers).json()
    [attempt] = reply["timeline"]["attempt_log"]
    assert (attempt["outcome"], attempt["tokens"]) == ("ok", reply["usage"]["completion_tokens"])


def test_unknown_ids_and_invalid_limits_are_errors(running):
    missing = httpx.get(running.url + "/requests/00000000")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
    for limit in ("0", "-1", "x", str(KEPT + 1), "9" * 5000):
        refused = requests_of(running, limit=limit)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")
    assert requests_of(running, limit=KEPT).json()["requests"] == []


def test_a_key_sees_its_own_requests_and_an_operator_s_all(start, tmp_path):
    path = tmp_path / "api.json"
    alice, bob = (add(path, {"name": name})[0] for name in ("alice", "bob"))
    operator = add(path, {"name": "eve", "operator": True})[0]
    running, script = start(api_keys=str(path))
    running.pair(script)
    for key in (alice, bob):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.post(running.url + "/v1/chat/completions", json=BODY, headers=headers).status_code == 200
    rows = ended(running, 2, operator)
    assert len(rows) == 2
    [mine] = ended(running, 1, alice)
    [other] = [row for row in rows if row["id"] != mine["id"]]
    story = httpx.get(f"{running.url}/requests/{other['id']}", headers={"authorization": f"Bearer {alice}"})
    assert story.status_code == 404
    assert requests_of(running).status_code == 401


def test_every_answer_is_counted_by_status_even_without_a_valid_request(running):
    assert post(running).status_code == 200
    for path in ("/health", "/nowhere", "/requests?limit=0"):
        httpx.get(running.url + path)
    with socket.create_connection(("127.0.0.1", running.router.port), timeout=10) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    found = samples(httpx.get(running.url + "/metrics").content)
    counts = {
        dict(labels)["status"]: n
        for (name, labels), n in found.items()
        if name == "baton_http_responses_total" and n
    }
    assert counts == {"200": 2, "404": 1, "400": 2}


def test_the_page_is_one_document_and_its_policy_admits_only_its_parts(running):
    reply = httpx.get(running.url + "/")
    policy = reply.headers["content-security-policy"]
    parts = re.findall(r"<(?:style|script type=\"module\")>(.*?)</(?:style|script)>", reply.text, re.DOTALL)
    assert len(parts) == 2
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", reply.text), "loads nothing"
    assert not re.search(r"\son\w+=|style=|innerHTML|document\.write|eval\(", reply.text)
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_a_key_is_sent_in_a_header_and_no_script_puts_it_into_a_store():
    for path in PAGES.glob("*.js"):
        script = path.read_text()
        assert not re.findall(r"sessionStorage|document\.cookie|indexedDB", script), path
        stored = set(re.findall(r"localStorage\.\w+\((.*?)[,)]", script))
        assert stored <= {'"theme"', '"single-keys"'}, path
        for address in re.findall(r"(?:ask|request)\((.*?)\)", script):
            assert "key" not in address, path
