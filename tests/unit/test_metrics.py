"""What /metrics says, read back with the Prometheus client's own parser."""

import pytest
from baton.cluster import metrics as module
from baton.cluster.messages import GraphCounts, WorkerStats
from baton.cluster.metrics import RequestRecord, RouterMetrics, RouterRecord, WorkerRecord
from prometheus_client.parser import text_string_to_metric_families

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
        drafted_tokens=9, accepted_tokens=5, handoff_bytes=1000,
    )  # fmt: skip
    metrics.request_ended(record)
    metrics.request_ended(RequestRecord(outcome="cancelled", e2e_s=1.0))
    found = samples(metrics.render(RouterRecord(queued=2, running=3, events={"stale": 4}), []))
    assert value(found, "baton_requests_total", outcome="ok") == 1
    assert value(found, "baton_requests_total", outcome="cancelled") == 1
    assert value(found, "baton_requests_total", outcome="failed") == 0
    assert value(found, "baton_output_tokens_total") == 7
    assert value(found, "baton_accepted_tokens_total") == 5
    assert value(found, "baton_handoff_bytes_total") == 1000
    assert value(found, "baton_request_seconds_count") == 2
    assert value(found, "baton_time_to_first_token_seconds_count") == 1
    assert value(found, "baton_queued_requests") == 2
    assert value(found, "baton_running_requests") == 3
    assert value(found, "baton_router_events_total", event="stale") == 4


def test_the_gap_of_a_message_is_shared_by_its_tokens():
    metrics = RouterMetrics()
    metrics.tokens_arrived(0.09, 3)
    found = samples(metrics.render(RouterRecord(queued=0, running=0), []))
    assert value(found, "baton_inter_token_seconds_sum") == pytest.approx(0.03)


def test_heartbeats_become_labelled_gauges_and_counters():
    stats = WorkerStats(
        state="draining", pages_total=100, pages_free=60, pages_cached=20, running=2, accept_length=2.5, spec_steps=3,
        graphs=GraphCounts(verify=3), counters={"forwards": 12.0},
    )  # fmt: skip
    workers = [
        WorkerRecord(role="decode", instance=INSTANCE, stats=stats),
        WorkerRecord(role="prefill", instance="1e" * 16, stats=WorkerStats()),
    ]
    found = samples(RouterMetrics().render(RouterRecord(queued=0, running=0), workers))
    who = {"role": "decode", "instance": INSTANCE}
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
        RouterRecord(queued=0, running=0), [WorkerRecord(role="decode", instance=INSTANCE, stats=WorkerStats())]
    )
    assert INSTANCE not in metrics.render(RouterRecord(queued=0, running=0), []).decode()


def test_two_routers_in_a_process_do_not_share_counters():
    first, second = RouterMetrics(), RouterMetrics()
    first.request_ended(RequestRecord(outcome="ok", e2e_s=1.0))
    found = samples(second.render(RouterRecord(queued=0, running=0), []))
    assert value(found, "baton_requests_total", outcome="ok") == 0


def test_the_table_in_the_docstring_lists_exactly_what_is_served():
    worker = WorkerRecord(
        role="decode", instance=INSTANCE, stats=WorkerStats(accept_length=1.0, counters={"forwards": 1.0})
    )
    body = RouterMetrics().render(RouterRecord(queued=0, running=0, events={"x": 1}), [worker]).decode()
    families = {family.name: family.type for family in text_string_to_metric_families(body)}
    served = {name: kind for name, kind in families.items() if not name.endswith("_created")}
    rows = [line.split() for line in module.__doc__.splitlines() if line.strip().startswith("baton_")]
    assert served == {name.removesuffix("_total"): kind for name, kind, *_ in rows}
