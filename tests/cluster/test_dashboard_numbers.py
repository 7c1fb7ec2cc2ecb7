"""Every query of the Grafana dashboard, asked of a real Prometheus, returns the true number: that of /status,
of the answers that clients got, or of the processes themselves, each counted once."""

import json
import math
import re
import shutil
import socket
import time
from collections import Counter
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from baton.cluster.telemetry import metric_names as names
from baton.tests.cluster.prometheus import needs, prometheus
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import (
    GreedyStream,
    at_once,
    random_ids,
    serving,
    status,
    wait_free,
    wait_until,
)
from baton.tests.ports import free_port
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/packaging/grafana/baton.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NUM_STREAMS, NUM_LATE = 3, 2
# `rate` extrapolates by up to a scrape interval at both ends of a window, which TOLERANCE allows for
WINDOW_S, TOLERANCE = 20, 0.15
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "slowest tenth": 0.1}
# routers, whether workers have ports, --worker-metrics
ONE, EVERYWHERE = (1, False, "auto"), (3, True, "all")
OF_UP, OF_WORKERS = (3, False, "auto"), (3, True, "auto")
TOPOLOGIES = [
    pytest.param(*ONE, id="one router"),
    pytest.param(*EVERYWHERE, id="three routers and the workers export the same series"),
    pytest.param(*OF_UP, id="the first of three routers exports the workers", marks=pytest.mark.slow),
    pytest.param(*OF_WORKERS, id="only workers export themselves", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def long_model(toy_checkpoint, tmp_path_factory):
    """A toy model whose streams last for seconds."""
    source = toy_checkpoint("llama", vocab_size=330, max_position_embeddings=16384)
    return save_tokenizer(Path(shutil.copytree(source, tmp_path_factory.mktemp("long"), dirs_exist_ok=True)))


def free_pair():
    """A port P so that P + 1 is free, too."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port + 1)):
                return port


class Truth:
    """What the processes say of themselves, and the `answers` that clients got."""

    def __init__(self, urls, before, workers, answers):
        self.routers = [Scrape(url, one) for url, one in zip(urls, before, strict=True)]
        self.workers, self.answers = workers, answers

    def total(self, series, **labels):
        """Over all routers."""
        return sum(value for router in self.routers for value in router.of(series, **labels))

    def by(self, series, *labels):
        """Over all routers, by labels; without those that are 0."""
        found = Counter()
        for router in self.routers:
            found.update(router.by(series, *labels))
        return {key: value for key, value in found.items() if value}

    def event(self, *events, role=""):
        """Counters of workers, as in /status."""
        chosen = [worker for worker in self.workers if role in ("", worker["role"])]
        return {event: sum(worker["counters"].get(event, 0) for worker in chosen) for event in events}

    def quantile(self, name, q, **labels):
        """As histogram_quantile has it, of the sum over all routers."""
        bounds = [*name.buckets, float("inf")]
        counts = [
            sum(
                value
                for router in self.routers
                for value in router.of(f"{name.name}_bucket", le=bound, **labels)
            )
            for bound in bounds
        ]
        rank = q * counts[-1]
        at = next(i for i, count in enumerate(counts) if count >= rank)
        if bounds[at] == float("inf"):
            return bounds[-2]
        low, below = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
        return low + (bounds[at] - low) * (rank - below) / (counts[at] - below)

    def mean(self, name):
        return self.total(f"{name.name}_sum") / self.total(f"{name.name}_count")


class Scrape:
    """The samples of a process: their increase since the scrape `before`."""

    def __init__(self, url, before=None):
        families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        known = before.values if before else {}
        self._found = []
        for sample in (sample for family in families for sample in family.samples):
            key = (sample.name, frozenset(sample.labels.items()))
            self._found.append(sample._replace(value=sample.value - known.get(key, 0)))

    @property
    def values(self):
        return {(each.name, frozenset(each.labels.items())): each.value for each in self._found}

    def of(self, series, **labels):
        def fits(sample):
            shown = sample.labels
            return all(
                float(shown[key]) == value if key == "le" else shown.get(key) == value
                for key, value in labels.items()
            )

        return [sample.value for sample in self._found if sample.name == series and fits(sample)]

    def by(self, series, *labels):
        found = Counter()
        for sample in self._found:
            if sample.name == series:
                found[tuple(sample.labels[label] for label in labels)] += sample.value
        return found


def rates(truth, seconds):
    """What each panel of rates and times must show, by title: labels of its legend -> value."""
    t, s = truth, seconds
    timelines = [answer["timeline"] for answer in t.answers]

    def each(values, scale=s):
        return {key if isinstance(key, tuple) else (key,): value / scale for key, value in values.items()}

    def quantiles(name, *shown, **labels):
        return {(text,): t.quantile(name, QUANTILES[text], **labels) for text in shown}

    num_ok, num_late = len(t.answers), NUM_LATE
    accepted, verifies = (sum(line[key] for line in timelines) for key in ("accepted", "verify_steps"))
    return {
        "Requests per second": {(): (num_ok + num_late) / s},
        "Output tokens per second": {(): t.total("baton_output_tokens_total") / s},
        "Errors": {(): num_late / (num_ok + num_late)},
        "Accept length": {(): 1 + accepted / verifies},
        "Accept length by worker": {(w["instance"],): w["accept_length"] or 0 for w in t.workers},
        "Draft steps": {(w["instance"],): w["spec_steps"] or 0 for w in t.workers},
        "Hand-off speed": {
            (): sum(line["handoff_bytes"] for line in timelines)
            / sum(line["handoff_ms"] / 1000 for line in timelines)
        },
        "Requests by outcome": each({"ok": num_ok, "timeout": num_late}),
        "Time to first token": quantiles(names.TTFT, "p50", "p90", "p99"),
        "Inter-token gap": quantiles(names.GAP, "p50", "p90", "p99"),
        "Where the first token waits (mean)": {
            ("router's queue",): t.mean(names.QUEUE_WAIT),
            ("prefill's queue",): t.mean(names.PREFILL_QUEUE),
            ("prefill",): t.mean(names.PREFILL),
        },
        "Request time": quantiles(names.REQUEST_SECONDS, "p50", "p99"),
        "Requests by class": each(t.by("baton_request_seconds_count", "route", "priority")),
        "Time to first token by class (p90)": {
            (route, "normal"): t.quantile(names.TTFT, 0.9, route=route) for route in ("chat", "completions")
        },
        "Prompt length": quantiles(names.PROMPT_LENGTH, "p50", "p95"),
        "Output length": quantiles(names.OUTPUT_LENGTH, "p50", "p95"),
        "Bytes per second": {("all hand-offs",): sum(line["handoff_bytes"] for line in timelines) / s},
        "Time of a hand-off": quantiles(names.HANDOFF_SECONDS, "p50", "p99"),
        "Speed of one hand-off": quantiles(names.HANDOFF_RATE, "p50", "slowest tenth"),
        "Blocks asked for again": each(t.event("repulls", "digest_mismatches", "duplicate_blocks")),
        "Hand-offs that ended early": {
            (role, event): value / s
            for role in ("prefill", "decode")
            for event, value in t.event("dropped", "handoffs_aborted", "failed", role=role).items()
        },
        "Prompt tokens": {
            ("all",): t.total("baton_prompt_tokens_total") / s,
            ("cached",): t.total("baton_cached_prompt_tokens_total") / s,
        },
        "Deaths, ejections, retries": {("deaths",): 0, ("ejections",): 0, ("retries",): 0},
        "Graph replays": {},
        "Graph fallbacks": {},
        "Router events": each(t.by("baton_router_events_total", "event")),
        "Answers over HTTP": each(t.by("baton_http_responses_total", "status")),
    }


def gauges(document, documents):
    """What each panel of gauges but that of used pages must show; `documents` are the /status of all
    routers.
    """
    workers = document["workers"]
    serving_by_role = Counter(worker["role"] for worker in workers if worker["state"] == "serving")
    requests = {
        (role, kind): sum(worker[kind] for worker in workers if worker["role"] == role)
        for role in ("prefill", "decode")
        for kind in ("running", "queued", "transferring")
    }
    return {
        "Serving workers": {(role,): count for role, count in serving_by_role.items()},
        "Queued and running": {
            (kind,): sum(each["router"][kind] for each in documents) for kind in ("queued", "running")
        },
        "Requests at workers": requests,
    }


def asked(server, panel, window_s):
    """What the panel shows: the labels of its legend -> value, without series that are 0 or not a number."""
    found = {}
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", f"{window_s}s")
        for name in ("$job", "$model"):
            expr = expr.replace(name, ".*")
        assert "$" not in expr, expr
        legend = target["legendFormat"]
        labels = re.findall(r"\{\{(\w+)\}\}", legend)
        for metric, value in server.query(expr).items():
            shown = dict(metric)
            key = tuple(shown[label] for label in labels) if labels else ((legend,) if legend else ())
            assert key not in found, f"{panel['title']}: {key} twice"
            found[key] = value
    return found


def same(found, true, tolerance):
    """Whether the series that are not 0 are the same, with about the same values."""
    found, true = ({key: value for key, value in side.items() if value > 0} for side in (found, true))
    return found == pytest.approx(true, rel=tolerance)


def load(urls, config):
    """The answers of requests to all routers in turn, on two routes; some more get no answer in time."""
    url, ending = cycle(urls), {"model": Path(config.model).name, "ignore_eos": True}
    prompts = [random_ids(10, 330, seed=i) * (2 + 4 * i) for i in range(12)]  # which the drafter can look up
    jobs = [
        ("completions", {"prompt": ids, "max_tokens": 100 + i, "temperature": 0})
        for i, ids in enumerate(prompts)
    ]
    jobs += [
        ("chat/completions", {"messages": [{"role": "user", "content": "ab" * i}], "max_tokens": 40})
        for i in range(1, 7)
    ]
    with httpx.Client(timeout=60, headers={"x-baton-timeline": "1"}) as client:

        def post(route, body, **headers):
            return client.post(f"{next(url)}/v1/{route}", json=body | ending, headers=headers)

        late = {"prompt": [5] * 8000, "max_tokens": 16}
        for _ in range(NUM_LATE):
            assert post("completions", late, **{"x-baton-timeout-ms": "5"}).status_code == 504
        answers = at_once([lambda job=job: post(*job) for job in jobs], 4)
    assert [answer.status_code for answer in answers] == [200] * len(jobs)
    return [answer.json() for answer in answers]


def compare(server, true, window_s, tolerance):
    """Compares the panels that `true` has, and returns their titles."""
    wrong, known = [], [panel for panel in PANELS if panel["title"] in true]
    for panel in known:
        found, right = asked(server, panel, window_s), true[panel["title"]]
        if not same(found, right, tolerance):
            wrong.append(f"{panel['title']}: {found} is not {right}")
    assert not wrong, "\n".join(wrong)
    return {panel["title"] for panel in known}


def compare_gauges(server, cluster, urls):
    """Compares the gauges while streams run, one or more at each router."""
    streams = [
        GreedyStream(SimpleNamespace(url=url, config=cluster.config), random_ids(50, 330, seed=i), 15000)
        for i, url in enumerate([*urls, *urls, *urls][:NUM_STREAMS])
    ]
    try:
        wait_until(lambda: num_running(cluster) == NUM_STREAMS, 30, "the streams run")
        first = used_pages(cluster)
        server.wait_scraped(2)
        true = gauges(status(cluster), [httpx.get(f"{url}/status").json() for url in urls])
        seen = compare(server, true, 1, 0.001) | compare_pages(server, cluster, first)
        assert num_running(cluster) == NUM_STREAMS, "too short for the comparison"
        assert true["Queued and running"]["running",] == NUM_STREAMS
    finally:
        for stream in streams:
            stream.leave()
    return seen


def compare_pages(server, cluster, first):
    """Prometheus shows used pages between those of /status before its scrapes, `first`, and soon after: they
    grow, and a worker that exports itself may be ahead of the router's view of it.
    """
    panel = next(panel for panel in PANELS if panel["title"] == "Used pages")
    found = {key: value for key, value in asked(server, panel, 1).items() if value > 0}

    def is_enclosed():
        now = used_pages(cluster)
        return found.keys() == {key for key, value in now.items() if value > 0} and all(
            0.999 * min(first[key], now[key]) <= value <= 1.001 * max(first[key], now[key])
            for key, value in found.items()
        )

    wait_until(is_enclosed, 5, f"used pages {found} lie between {first} and those of now")
    return {panel["title"]}


def used_pages(cluster):
    """The used share of each worker's pages."""
    return {
        (worker["role"], worker["instance"]): 1 - worker["pages_free"] / worker["pages_total"]
        for worker in status(cluster)["workers"]
    }


def num_running(cluster):
    return sum(worker["running"] for worker in status(cluster)["workers"] if worker["role"] == "decode")


def compare_processes(server, urls, own):
    """Every scraped process has one series."""
    places = {("routers" if url in urls else "workers", url.partition("://")[2]) for url in [*urls, *own]}
    panels = {panel["title"]: panel for panel in PANELS if panel["title"] in ("CPU", "Memory")}
    assert {title: set(asked(server, panel, 5)) for title, panel in panels.items()} == {
        "CPU": places, "Memory": places
    }  # fmt: skip
    pids = {httpx.get(f"{url}/status").json()["router"]["pid"] for url in urls}
    shown = [value for (job, _), value in asked(server, panels["Memory"], 5).items() if job == "routers"]
    true = [psutil.Process(pid).memory_info().rss for pid in pids]
    assert sorted(shown) == pytest.approx(sorted(true), rel=0.1)
    return set(panels)


@needs("prometheus")
@pytest.mark.parametrize(("num_routers", "has_ports", "shown"), TOPOLOGIES)
def test_every_panel_shows_the_true_number(num_routers, has_ports, shown, long_model, tmp_path):
    first = {"PREFILL": free_port(), "DECODE": free_pair()} if has_ports else {}
    env = {f"BATON_{role}_METRICS_PORT": str(port) for role, port in first.items()}
    own = [first["PREFILL"], first["DECODE"], first["DECODE"] + 1] if first else []
    own = [f"http://127.0.0.1:{port}" for port in own]
    settings = {"prefill": 1, "decode": 2, "kv_memory_mb": 64, "threads": 1, "transport": "tcp"}
    with ExitStack() as stack:
        cluster = stack.enter_context(
            serving(long_model, "ngram", env, routers=num_routers, worker_metrics=shown, **settings)
        )
        urls = cluster.own_urls if num_routers > 1 else [cluster.url]
        wait_until(lambda: all(httpx.get(f"{url}/ready").is_success for url in urls), 60, "all ready")
        server = stack.enter_context(prometheus(tmp_path, {"routers": urls, "workers": own}))
        begun, before = time.time(), [Scrape(url) for url in urls]
        server.wait_scraped(2)
        answers = load(urls, cluster.config)
        wait_free(cluster)
        server.wait_scraped(2)
        window_s = max(WINDOW_S, math.ceil(time.time() - begun))
        time.sleep(max(0, begun + window_s - time.time()))  # the window begins where `before` was taken
        truth = Truth(urls, before, status(cluster)["workers"], answers)
        seen = compare(server, rates(truth, window_s), window_s, TOLERANCE)
        if shown == "auto":
            pages = sum(worker["pages_total"] for worker in truth.workers)
            plain = server.query('sum(baton_worker_pages{kind="total"})')
            assert list(plain.values()) == [pages], "a sum needs no care for copies"
        seen |= compare_gauges(server, cluster, urls)
        seen |= compare_processes(server, urls, own)
    assert seen == {panel["title"] for panel in PANELS}
