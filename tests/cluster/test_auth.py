"""Access over HTTP: API keys, their limits, tenants that do not share prefixes, and TLS."""

import itertools
import socket

import httpx
import pytest
from baton.cluster.protocol.messages import Prefill, Reserve
from baton.deploy.keys.api_keys import add, revoke
from baton.tests.cluster.router_fakes import BODY, assert_nothing_left, in_thread, until
from baton.tests.cluster.serving import random_ids, served_model, serving

ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/tiny", "/status", "/metrics",
    "/requests", "/history",
    "/requests/00000000", "/nowhere",
)  # fmt: skip
OPEN = ("/health", "/ready", "/", "/docs", "/openapi.json")
WATCHERS = (("bob", {}), ("eve", {"operator": True}), ("scraper", {"observer": True}))


@pytest.fixture
def keyed(tmp_path, start):
    """(router with API keys and a pair, key file, secret of a key without limits)"""
    path = tmp_path / "api.json"
    secret, _ = add(path, {"name": "alice"})
    running, script = start(api_keys=str(path))
    running.pair(script)
    return running, path, secret


def ask(running, secret, **more):
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    return httpx.post(running.url + "/v1/chat/completions", json=BODY | more, headers=headers, timeout=60)


def raw(running, *lines):
    """The status line of a request that no client library would write."""
    with socket.create_connection(("127.0.0.1", running.router.port), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return connection.recv(65536).split(b"\r\n")[0].decode()


def test_s26_every_spelling_of_a_path_needs_a_key_but_the_public_ones(keyed):
    running, _, secret = keyed
    wrong = [[], ["Authorization: Bearer nonsense"], [f"Authorization: Basic {secret}"],
        [f"X-Api-Key: {secret}", f"X-Api-Key: {secret}"], ["X-Api-Key: nonsense"],
             [f"X-Api-Key: {secret}", "Authorization: Bearer nonsense"],
             [f"Authorization: Bearer {secret}", f"Authorization: Bearer {secret}"]]  # fmt: skip
    spelled = [
        "{}",
        "/{}",
        "/v1/..{}",
        "/health/..{}",
        "{}/",
        "{}?key=" + secret,
        "/%2e{}",
        "http://health{}",
    ]
    for route, spelling in itertools.product(ROUTES, spelled):
        assert raw(running, f"GET {spelling.format(route)} HTTP/1.1", "Host: a").startswith("HTTP/1.1 401"), (
            spelling
        )
    for route, method, headers in itertools.product(
        ROUTES, ("GET", "POST", "OPTIONS", "HEAD", "DELETE"), wrong
    ):
        head = [f"{method} {route} HTTP/1.1", "Host: a", "Content-Length: 0", *headers]
        assert "401" in raw(running, *head), (route, headers)
    for upper in ("/HEALTH", "/health/", "//health", "/health%20", "/ready/x", "/docs/", "/docs/../status"):
        assert "401" in raw(running, f"GET {upper} HTTP/1.1", "Host: a"), upper
    assert "401" in raw(running, "GET /v1/models HTTP/1.1", "Host: a/health")
    assert [httpx.get(running.url + path).status_code for path in OPEN] == [200] * len(OPEN)
    assert ask(running, secret).status_code == 200
    reply = ask(running, "bk-00000000-x")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"


def test_the_document_marks_exactly_the_paths_that_need_a_key(keyed):
    running, _, secret = keyed
    assert httpx.get(running.url + "/docs").text.count("Needs an API key.") > 5
    document = httpx.get(running.url + "/openapi.json").json()
    [scheme] = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert secret not in str(document)
    for path, ways in document["paths"].items():
        for method, made in ways.items():
            status = httpx.request(
                method, running.url + path, content=b"{}" if method == "post" else None
            ).status_code
            assert (status == 401) is bool(made["security"]), path


def test_only_operators_and_observers_see_the_cluster_and_all_requests(keyed):
    running, path, alice = keyed
    bob, eve, scraper = (add(path, {"name": name, **role})[0] for name, role in WATCHERS)
    until(lambda: ask(running, bob).status_code == 200, "the new keys work")
    answered = ask(running, alice).json()["id"]

    def get(address, secret, method="GET"):
        return httpx.request(method, running.url + address, headers={"authorization": f"Bearer {secret}"})

    closed = ("/status", "/metrics", "/status?", "/metrics?x=1")
    for secret, method, address in itertools.product((alice, bob), ("GET", "HEAD"), closed):
        assert get(address, secret, method).status_code == 403, address
    for address in (
        "//status",
        "/status/",
        "/v1/../status",
        "/%73tatus",
        "/STATUS",
        "/metrics%20",
        "http://a/metrics",
    ):
        line = raw(running, f"GET {address} HTTP/1.1", "Host: a", f"Authorization: Bearer {bob}")
        assert line.split()[1] in ("403", "404"), (address, line)
    refused = get("/status", bob).json()["error"]
    assert (refused["type"], refused["code"]) == ("permission_error", "operator_key_required")
    assert get(f"/requests/{answered}", bob).status_code == 404
    assert answered not in get("/requests", bob).text
    shown = get("/", bob).text
    assert all(worker.instance[:8] not in shown for worker in running.workers)
    for secret in (eve, scraper):
        assert len(get("/status", secret).json()["workers"]) == 2
        assert "baton_requests_total" in get("/metrics", secret).text
        assert get(f"/requests/{answered}", secret).json()["id"] == answered
    assert ask(running, eve).status_code == 200
    for address in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        reply = httpx.post(running.url + address, json=BODY, headers={"authorization": f"Bearer {scraper}"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "observer_key"), address
    order = {"instance": "9" * 32, "order": "8" * 32, "action": "swap", "path": "/heads/new"}
    codes = {bob: 403, scraper: 403, eve: 404, "nobody": 401}  # an operator's order finds no such worker
    for secret, code in codes.items():
        headers = {"authorization": f"Bearer {secret}"}
        assert httpx.post(f"{running.url}/drafts", json=order, headers=headers).status_code == code


def test_keys_come_and_go_without_a_restart(keyed):
    running, path, secret = keyed
    other, entry = add(path, {"name": "bob"})
    until(lambda: ask(running, other).status_code == 200, "the new key works")
    revoke(path, entry.id)
    until(lambda: ask(running, other).status_code == 401, "the revoked key does not")
    assert ask(running, secret).status_code == 200


def test_limits_of_a_key_give_429_and_bind_no_other_key(keyed):
    running, path, secret = keyed
    few, _ = add(path, {"name": "bob", "requests_per_minute": 2})
    until(lambda: ask(running, few).status_code == 200, "the new key works")
    assert ask(running, few).status_code == 200
    reply = ask(running, few)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(reply.headers["retry-after"]) <= 30
    assert ask(running, secret).status_code == 200
    assert_nothing_left(running)


def test_a_keys_concurrent_requests_are_bounded_and_each_end_frees_one(tmp_path, start):
    path = tmp_path / "api.json"
    secret, _ = add(path, {"name": "alice", "max_requests": 1})
    running, script = start(api_keys=str(path))
    _, decode = running.pair(script)
    script.holds.set()
    thread, answers = in_thread(lambda: ask(running, secret))
    reserve = until(lambda: decode.of(Reserve), "the first request runs")[0]
    assert ask(running, secret).status_code == 429
    script.holds.clear()
    script.stream(decode, reserve)
    thread.join(60)
    assert answers[0].status_code == 200
    for n in (1, 3):  # several choices are one request
        assert ask(running, secret, n=n).status_code == 200
    assert ask(running, secret, max_tokens=0).status_code == 400
    assert ask(running, secret).status_code == 200, "what was refused runs no longer"


def test_a_tenants_salt_reaches_both_workers_and_no_request_chooses_it(keyed):
    running, path, secret = keyed
    shared, entry = add(path, {"name": "bob", "tenant": "alice"})
    other, _ = add(path, {"name": "carol"})
    until(lambda: ask(running, other).status_code == 200, "the new keys work")
    prefill, decode = running.workers
    salts = []
    for who in (secret, shared, other):
        assert ask(running, who).status_code == 200
        pair = prefill.of(Prefill)[-1].salt, decode.of(Reserve)[-1].salt
        assert pair[0] == pair[1] != ""
        salts.append(pair[0])
    assert salts[0] == salts[1] == entry.salt != salts[2]
    assert ask(running, secret, salt="x").json()["error"]["param"] == "salt"
    for who, own in ((other, salts[0]), (other, "x"), (secret, "x")):
        assert ask(running, who, cache_salt=own).status_code == 200
        salts.append(decode.of(Reserve)[-1].salt)
    assert len(set(salts[1:])) == len(salts[1:]), "a salt of the client's stays within its tenant"


def test_an_idempotency_key_is_its_clients_own(keyed):
    running, path, secret = keyed
    other, _ = add(path, {"name": "bob"})
    until(lambda: ask(running, other).status_code == 200, "the new key works")
    replies = []
    for who, content in ((secret, "one"), (secret, "one"), (other, "two")):
        headers = {"authorization": f"Bearer {who}", "idempotency-key": "same"}
        body = BODY | {"messages": [{"role": "user", "content": content}]}
        replies.append(
            httpx.post(running.url + "/v1/chat/completions", json=body, headers=headers, timeout=60)
        )
    assert [reply.status_code for reply in replies] == [200] * 3
    assert replies[0].content == replies[1].content != replies[2].content


def test_urgent_requests_are_served_first_and_the_lowest_rank_is_refused(tmp_path, start):
    path = tmp_path / "api.json"
    ranks = {"low": 5, "mid": 0, "top": -5}
    secrets = [add(path, {"name": name, "priority": priority})[0] for name, priority in ranks.items()]
    running, script = start(api_keys=str(path), max_queue=2)
    _, decode = running.pair(script, max_running=1)
    script.holds.set()

    def wait(secret, marker, **more):
        return in_thread(lambda: ask(running, secret, max_tokens=marker, **more))

    def queued():
        return running.call(lambda: running.router.dispatcher.num_queued)

    first = wait(secrets[1], 11)
    held = until(lambda: decode.of(Reserve), "the place is taken")[0]
    low = wait(secrets[0], 12, priority=-100)  # a key's own priority is the best that it gets
    until(lambda: queued() == 1, "one waits")
    mid = wait(secrets[1], 13)
    until(lambda: queued() == 2, "two wait")
    top = wait(secrets[2], 14)
    low[0].join(60)
    assert (low[1][0].status_code, low[1][0].json()["error"]["code"]) == (429, "overloaded")
    assert int(low[1][0].headers["retry-after"]) >= 1
    script.holds.clear()
    script.stream(decode, held)
    for thread, answers in (first, mid, top):
        thread.join(60)
        assert answers[0].status_code == 200
    assert [reserve.sampling.max_new_tokens for reserve in decode.of(Reserve)] == [11, 14, 13]
    assert_nothing_left(running)


def test_cached_prefixes_of_real_workers_do_not_cross_tenants(served_dir, tmp_path):
    path = tmp_path / "api.json"
    alice, bob = (add(path, {"name": name})[0] for name in ("alice", "bob"))
    prompt = random_ids(64, 330, seed=5)
    with serving(served_dir, prefill=1, decode=1, kv_memory_mb=8, threads=1, api_keys=str(path)) as cluster:

        def cached(secret):
            body = {
                "model": served_model(cluster),
                "prompt": prompt,
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
            }
            headers = {"authorization": f"Bearer {secret}", "x-baton-timeline": "1"}
            reply = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60).json()
            return (
                reply["timeline"]["cached_tokens"],
                reply["timeline"]["have_tokens"],
                reply["choices"][0]["text"],
            )

        found = [cached(secret) for secret in (alice, alice, bob, bob)]
    assert [tokens[:2] for tokens in found] == [(0, 0), (48, 48), (0, 0), (48, 48)]
    assert len({text for _, _, text in found}) == 1
