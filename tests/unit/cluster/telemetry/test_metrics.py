"""/metrics, read by the Prometheus client's own parser, is as docs/metrics.md describes it."""

import re
from pathlib import Path

import pytest
from baton.cluster.protocol.messages import TierStats, WorkerStats
from baton.cluster.telemetry import metric_names as names
from baton.cluster.telemetry.metrics import (
    ROUTES,
    ClassLoad,
    Handoff,
    PromptWork,
    RequestClass,
    RequestRecord,
    RouterMetrics,
    RouterRecord,
    priority_class,
)
from baton.cluster.telemetry.worker_metrics import WorkerFacts, WorkerRecord, render_worker
from baton.decode.step_metrics import DECODE_COUNTERS
from baton.prefill.worker import PREFILL_COUNTERS
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[4]
INSTANCE = "0f" * 16
MODEL = "tiny"
OF_BUILD = ("baton_build", "baton_build_info")
GRAPHS = {
    "graph_replays_target_verify": 7.0, "graph_replays_draft": 6.0, "graph_replays_draft_extend": 5.0,
    "graph_pad_rows_draft": 4.0, "graph_fallback_draft_extend_too_large": 3.0,
    "graph_fallback_draft_off": 2.0,
}  # fmt: skip
TIERS = {"host_hit_tokens": 32.0, "disk_read_bytes": 4096.0}
AFTER_READY = {
    "compilations_after_ready": 1.0, "captures_after_ready": 2.0, "allocations_after_ready": 3.0,
}  # fmt: skip
FACTS = WorkerFacts(host="node-1", device="cuda:0", card="3: H200", fingerprint="ab12")
USUAL = {"route": "chat", "priority": "normal"}


def samples(body):
    """Values by name and labels, without the model, which every series of baton must name."""
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            is_named = sample.name.startswith("baton_") and sample.name not in OF_BUILD
            assert bool(sample.labels.pop("model_name", "")) == is_named, sample
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(found, name, **labels):
    return found[(name, tuple(sorted(labels.items())))]


def test_an_ended_request_counts_once_everywhere():
    metrics = RouterMetrics(MODEL)
    record = RequestRecord(
        outcome="ok", e2e_s=2.0, ttft_s=0.3, prompt_tokens=10, cached_tokens=4, output_tokens=7,
        verify_steps=3, drafted_tokens=9, accepted_tokens=5, queued_s=0.1, lengths=((6, 3), (4, 4)),
        prompts=(PromptWork(queue_s=0.02, compute_s=0.2),),
        handoffs=(Handoff(num_bytes=600, seconds=0.5), Handoff(num_bytes=400, seconds=0.0)),
    )  # fmt: skip
    metrics.request_ended(record)
    metrics.request_ended(RequestRecord(outcome="cancelled", e2e_s=1.0))
    events = {"stale": 4, "worker_lost": 2, "breaker_opened": 1, "requeued": 5}
    found = samples(metrics.render(RouterRecord(queued=2, running=3, events=events), []))
    assert value(found, "baton_requests_total", outcome="ok") == 1
    assert value(found, "baton_requests_total", outcome="cancelled") == 1
    assert value(found, "baton_requests_total", outcome="failed") == 0
    assert value(found, "baton_output_tokens_total") == 7
    assert value(found, "baton_accepted_tokens_total") == 5
    assert value(found, "baton_verify_steps_total") == 3
    assert value(found, "baton_handoff_bytes_total") == 1000
    assert value(found, "baton_request_seconds_count", **USUAL) == 2
    assert value(found, "baton_time_to_first_token_seconds_count", **USUAL) == 1
    assert value(found, "baton_queue_wait_seconds_sum", **USUAL) == pytest.approx(0.1)
    assert value(found, "baton_prefill_queue_seconds_sum") == pytest.approx(0.02)
    assert value(found, "baton_prefill_seconds_sum") == pytest.approx(0.2)
    assert value(found, "baton_handoff_seconds_count") == 2
    assert value(found, "baton_handoff_bytes_per_second_count") == 1, "no time, no rate"
    assert value(found, "baton_handoff_bytes_per_second_sum") == 1200
    assert value(found, "baton_queued_requests") == 2
    assert value(found, "baton_running_requests") == 3
    assert value(found, "baton_router_events_total", event="stale") == 4
    assert value(found, "baton_worker_deaths_total") == 2
    assert value(found, "baton_ejections_total") == 1
    assert value(found, "baton_retries_total") == 5
    assert not any(("event", "worker_lost") in labels for _, labels in found), "one thing, one name"


def test_the_gap_of_a_message_is_shared_by_its_tokens():
    metrics = RouterMetrics(MODEL)
    metrics.tokens_arrived(RequestClass(), 0.09, 3)
    found = samples(metrics.render(RouterRecord(queued=0, running=0), []))
    assert value(found, "baton_inter_token_seconds_sum", **USUAL) == pytest.approx(0.03)


def test_times_and_lengths_count_under_the_class_of_the_request():
    metrics, urgent = RouterMetrics(MODEL), RequestClass(route="completions", priority="high")
    record = RequestRecord(
        outcome="ok", kind=urgent, e2e_s=2.0, ttft_s=0.3, queued_s=0.5, lengths=((1000, 3), (24, 1))
    )
    metrics.request_ended(record)
    metrics.tokens_arrived(urgent, 0.2, 1)
    found = samples(metrics.render(RouterRecord(queued=0, running=0), []))
    labels = {"route": "completions", "priority": "high"}
    sums = {name: value(found, f"{name.name}_sum", **labels) for name in names.OF_CLASS}
    assert sums == {
        names.TTFT: 0.3, names.GAP: 0.2, names.REQUEST_SECONDS: 2.0, names.QUEUE_WAIT: 0.5,
        names.PROMPT_LENGTH: 1024, names.OUTPUT_LENGTH: 4,
    }  # fmt: skip
    assert value(found, "baton_request_prompt_tokens_bucket", le="64.0", **labels) == 1
    assert value(found, "baton_request_output_tokens_bucket", le="1.0", **labels) == 1


def test_the_usual_series_are_zero_before_the_first_request():
    found = samples(RouterMetrics(MODEL).render(RouterRecord(queued=0, running=0), []))
    for route in ROUTES:
        for name in names.OF_CLASS:
            assert value(found, f"{name.name}_count", route=route, priority="normal") == 0
    for status in names.KNOWN_STATUSES:
        assert value(found, "baton_http_responses_total", status=str(status)) == 0


def test_priorities_have_three_classes():
    assert [priority_class(n) for n in (-100, -1, 0, 1, 100)] == ["high", "high", "normal", "low", "low"]


def test_known_events_are_zero_before_the_first_one():
    found = samples(RouterMetrics(MODEL).render(RouterRecord(queued=0, running=0), []))
    events = {dict(labels)["event"] for name, labels in found if name == "baton_router_events_total"}
    assert events == set(names.KNOWN_EVENTS)


def test_two_routers_in_a_process_do_not_share_counters():
    first, second = RouterMetrics(MODEL), RouterMetrics(MODEL)
    first.request_ended(RequestRecord(outcome="ok", e2e_s=1.0))
    found = samples(second.render(RouterRecord(queued=0, running=0), []))
    assert value(found, "baton_requests_total", outcome="ok") == 0


# --- docs/metrics.md ----------------------------------------------------------------------------------------


def shown(body):
    """(type, labels) of every metric of a scrape, by the name of its series."""
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        if not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, labels)
    return found


def told():
    """The same of docs/metrics.md, which names the label of all metrics in a sentence."""
    lines = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    rows = [row for row in cells if len(row) == 4]
    assert len({row[0] for row in rows}) == len(rows)
    found = {row[0].strip("`"): (row[1], set(re.findall(r"`(\w+)`", row[2]))) for row in rows}
    for name, (_, labels) in found.items():
        if name.startswith("baton_") and name not in OF_BUILD:
            labels.add("model_name")
    return found


def everything():
    metrics = RouterMetrics(MODEL)
    metrics.request_ended(RequestRecord(outcome="ok", e2e_s=1.0))
    stats = WorkerStats(
        accept_length=1.0,
        spec_steps=2,
        tiers=[TierStats(name="host", used=1, total=2)],
        counters={"forwards": 1.0} | GRAPHS | AFTER_READY | TIERS,
    )
    worker = WorkerRecord(role="decode", instance=INSTANCE, stats=stats, facts=FACTS)
    failing = ((INSTANCE, INSTANCE, "TransferTimeout", 2),)
    router = RouterRecord(
        queued=0,
        running=0,
        events={"x": 1},
        responses={200: 1},
        canaries={"passed": 1},
        failing_pairs=failing,
        registered={("decode", "serving"): 1},
        classes=(ClassLoad(priority="low", queued=1),),
    )
    return shown(metrics.render(router, [worker])), shown(render_worker(MODEL, worker))


def test_the_page_lists_exactly_the_served_metrics_types_and_labels():
    router, worker = everything()
    assert router == told()
    assert {name: router.get(name) for name in worker} == worker
    assert len(worker) < len(router)


def test_every_name_of_the_catalogue_is_served():
    router, _ = everything()
    known = (*names.ROUTER_NAMES, *names.WORKER_NAMES)
    series = {f"{name.name}_total" if name.kind == names.COUNTER else name.name for name in known}
    assert series == {name for name in router if name.startswith("baton_")}


def test_the_page_lists_every_counter_of_a_worker():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Events")[2]
    events = {row[0] for row in re.findall(r"^\| `(\w+)` \| (both|prefill|decode) \|", text, re.MULTILINE)}
    assert {*DECODE_COUNTERS, *PREFILL_COUNTERS} <= events


def test_the_questions_of_an_operator_use_existing_metrics():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Questions")[2]
    asked = set(re.findall(r"baton_\w+", text))
    assert len(asked) > 8
    assert asked <= series_of(told())


def series_of(metrics):
    """Every name that a query may use."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    return {name + end for name, (kind, _) in metrics.items() for end in (*suffixes[kind], "")}
