"""/metrics, read by the Prometheus client's own parser, is as docs/metrics.md describes it."""

import re
from pathlib import Path

import pytest
from baton.cluster.protocol.messages import GraphCounts, WorkerStats
from baton.cluster.telemetry import metric_names as names
from baton.cluster.telemetry.metrics import (
    Handoff,
    PromptWork,
    RequestRecord,
    RouterMetrics,
    RouterRecord,
    WorkerRecord,
    render_worker,
)
from baton.decode.step_metrics import DECODE_COUNTERS
from baton.prefill.worker import PREFILL_COUNTERS
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[4]
INSTANCE = "0f" * 16


def samples(body):
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(found, name, **labels):
    return found[(name, tuple(sorted(labels.items())))]


def test_an_ended_request_counts_once_everywhere():
    metrics = RouterMetrics()
    record = RequestRecord(
        outcome="ok", e2e_s=2.0, ttft_s=0.3, prompt_tokens=10, cached_tokens=4, output_tokens=7,
        drafted_tokens=9, accepted_tokens=5, queued_s=0.1, prompts=(PromptWork(queue_s=0.02, compute_s=0.2),),
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
    assert value(found, "baton_handoff_bytes_total") == 1000
    assert value(found, "baton_request_seconds_count") == 2
    assert value(found, "baton_time_to_first_token_seconds_count") == 1
    assert value(found, "baton_queue_wait_seconds_sum") == pytest.approx(0.1)
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
    metrics = RouterMetrics()
    metrics.tokens_arrived(0.09, 3)
    found = samples(metrics.render(RouterRecord(queued=0, running=0), []))
    assert value(found, "baton_inter_token_seconds_sum") == pytest.approx(0.03)


def test_heartbeats_become_labelled_gauges_and_counters():
    stats = WorkerStats(
        state="draining", pages_total=100, pages_free=60, pages_cached=20, running=2, accept_length=2.5,
        spec_steps=3,
        graphs=GraphCounts(verify=3), counters={"forwards": 12.0},
    )  # fmt: skip
    workers = [
        WorkerRecord(role="decode", instance=INSTANCE, stats=stats),
        WorkerRecord(role="prefill", instance="1e" * 16, stats=WorkerStats()),
    ]
    found = samples(RouterMetrics().render(RouterRecord(queued=0, running=0), workers))
    who = {"role": "decode", "worker": INSTANCE}
    assert value(found, "baton_worker_up", state="draining", **who) == 1
    assert value(found, "baton_worker_pages", kind="free", **who) == 60
    assert value(found, "baton_worker_requests", kind="running", **who) == 2
    assert value(found, "baton_worker_graphs", kind="verify", **who) == 3
    assert value(found, "baton_worker_accept_length", **who) == 2.5
    assert value(found, "baton_worker_spec_steps", **who) == 3
    assert len([key for key in found if key[0] == "baton_worker_spec_steps"]) == 1, "prefill drafts nothing"
    assert value(found, "baton_worker_events_total", event="forwards", **who) == 12
    assert [key for key in found if key[0] == "baton_worker_accept_length"] == [
        ("baton_worker_accept_length", tuple(sorted(who.items())))
    ]


def test_a_worker_that_left_leaves_no_series():
    metrics = RouterMetrics()
    metrics.render(
        RouterRecord(queued=0, running=0),
        [WorkerRecord(role="decode", instance=INSTANCE, stats=WorkerStats())],
    )
    assert INSTANCE not in metrics.render(RouterRecord(queued=0, running=0), []).decode()


def test_two_routers_in_a_process_do_not_share_counters():
    first, second = RouterMetrics(), RouterMetrics()
    first.request_ended(RequestRecord(outcome="ok", e2e_s=1.0))
    found = samples(second.render(RouterRecord(queued=0, running=0), []))
    assert value(found, "baton_requests_total", outcome="ok") == 0


GRAPHS = {
    "graph_replays_target_verify": 7.0, "graph_replays_draft": 6.0, "graph_replays_draft_extend": 5.0,
    "graph_pad_rows_draft": 4.0, "graph_fallback_draft_extend_too_large": 3.0,
    "graph_fallback_draft_off": 2.0,
}  # fmt: skip


AFTER_READY = {
    "compilations_after_ready": 1.0, "captures_after_ready": 2.0, "allocations_after_ready": 3.0,
}  # fmt: skip


def test_work_that_belongs_before_ready_has_metrics_of_its_own():
    worker = WorkerRecord(role="prefill", instance=INSTANCE, stats=WorkerStats(counters=AFTER_READY))
    found = samples(render_worker(worker))
    who = {"role": "prefill", "worker": INSTANCE}
    for name, total in AFTER_READY.items():
        assert value(found, f"baton_worker_{name}_total", **who) == total
    assert not any(name == "baton_worker_events_total" for name, _ in found)


def test_counters_of_graphs_become_metrics_by_kind_and_reason():
    worker = WorkerRecord(role="decode", instance=INSTANCE, stats=WorkerStats(counters=GRAPHS))
    found = samples(render_worker(worker))
    who = {"role": "decode", "worker": INSTANCE}
    assert value(found, "baton_worker_graph_replays_total", kind="target_verify", **who) == 7
    assert value(found, "baton_worker_graph_pad_rows_total", kind="draft", **who) == 4
    assert (
        value(found, "baton_worker_graph_fallbacks_total", kind="draft_extend", reason="too_large", **who)
        == 3
    )
    assert value(found, "baton_worker_graph_fallbacks_total", kind="draft", reason="off", **who) == 2
    assert not any(name == "baton_worker_events_total" for name, _ in found)


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
    """The same of docs/metrics.md."""
    lines = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    rows = [row for row in cells if len(row) == 4]
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0].strip("`"): (row[1], set(re.findall(r"`(\w+)`", row[2]))) for row in rows}


def everything():
    metrics = RouterMetrics()
    metrics.request_ended(RequestRecord(outcome="ok", e2e_s=1.0))
    stats = WorkerStats(accept_length=1.0, spec_steps=2, counters={"forwards": 1.0} | GRAPHS | AFTER_READY)
    worker = WorkerRecord(role="decode", instance=INSTANCE, stats=stats)
    failing = ((INSTANCE, INSTANCE, "TransferTimeout", 2),)
    router = RouterRecord(
        queued=0,
        running=0,
        events={"x": 1},
        responses={200: 1},
        canaries={"passed": 1},
        failing_pairs=failing,
    )
    return shown(metrics.render(router, [worker])), shown(render_worker(worker))


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
