"""The metrics of workers, on a router and on the workers themselves."""

import pytest
from baton.cluster.config.router_groups import WORKER_METRICS
from baton.cluster.protocol.messages import GraphCounts, RoomCounts, WorkerStats
from baton.cluster.telemetry.metrics import RouterMetrics, RouterRecord
from baton.cluster.telemetry.worker_metrics import WorkerRecord, render_worker, shown_workers
from baton.tests.unit.cluster.telemetry.test_metrics import (
    AFTER_READY,
    FACTS,
    GRAPHS,
    INSTANCE,
    MODEL,
    samples,
    value,
)


def test_heartbeats_become_labelled_gauges_and_counters():
    stats = WorkerStats(
        state="draining", pages_total=100, pages_free=60, pages_cached=20, pages_promised=7, running=2,
        accept_length=2.5, spec_steps=3, canaries=RoomCounts(running=1),
        graphs=GraphCounts(verify=3), counters={"forwards": 12.0}, window_pages_total=9, window_pages_free=4,
    )  # fmt: skip
    workers = [
        WorkerRecord(role="decode", instance=INSTANCE, stats=stats),
        WorkerRecord(role="prefill", instance="1e" * 16, stats=WorkerStats()),
    ]
    found = samples(RouterMetrics(MODEL).render(RouterRecord(queued=0, running=0), workers))
    who = {"role": "decode", "worker": INSTANCE}
    assert value(found, "baton_worker_up", state="draining", **who) == 1
    assert value(found, "baton_worker_pages", kind="free", **who) == 60
    assert value(found, "baton_worker_pages", kind="promised", **who) == 7
    assert value(found, "baton_worker_pages", kind="window_free", **who) == 4
    assert len([key for key in found if ("kind", "window_total") in key[1]]) == 1, "prefill has no windows"
    assert value(found, "baton_worker_requests", kind="running", **who) == 1, "a canary is no request"
    assert value(found, "baton_worker_requests", kind="canaries", **who) == 1
    assert value(found, "baton_worker_graphs", kind="verify", **who) == 3
    assert value(found, "baton_worker_accept_length", **who) == 2.5
    assert value(found, "baton_worker_spec_steps", **who) == 3
    assert len([key for key in found if key[0] == "baton_worker_spec_steps"]) == 1, "prefill drafts nothing"
    assert value(found, "baton_worker_events_total", event="forwards", **who) == 12
    assert [key for key in found if key[0] == "baton_worker_accept_length"] == [
        ("baton_worker_accept_length", tuple(sorted(who.items())))
    ]


def test_a_worker_that_left_leaves_no_series():
    metrics = RouterMetrics(MODEL)
    metrics.render(
        RouterRecord(queued=0, running=0),
        [WorkerRecord(role="decode", instance=INSTANCE, stats=WorkerStats())],
    )
    assert INSTANCE not in metrics.render(RouterRecord(queued=0, running=0), []).decode()


def test_what_a_worker_is_stands_in_one_series():
    worker = WorkerRecord(role="decode", instance=INSTANCE, stats=WorkerStats(), facts=FACTS)
    labels = {"host": "node-1", "device": "cuda:0", "card": "3: H200", "fingerprint": "ab12"}
    shown = samples(render_worker(MODEL, worker))
    assert value(shown, "baton_worker_info", role="decode", worker=INSTANCE, **labels) == 1
    starting = samples(
        render_worker(MODEL, WorkerRecord(role="decode", instance=INSTANCE, stats=WorkerStats()))
    )
    assert not any(name == "baton_worker_info" for name, _ in starting), "nothing is known before the engine"


@pytest.mark.parametrize(("choice", "shown"), list(zip(WORKER_METRICS, ("a", "ab", ""), strict=True)))
def test_a_router_leaves_out_workers_that_export_their_own_series(choice, shown):
    without = WorkerRecord(role="decode", instance="a", stats=WorkerStats())
    own = WorkerRecord(role="decode", instance="b", stats=WorkerStats(), metrics_port=9100)
    assert "".join(worker.instance for worker in shown_workers([without, own], choice)) == shown


def test_work_that_belongs_before_ready_has_metrics_of_its_own():
    worker = WorkerRecord(role="prefill", instance=INSTANCE, stats=WorkerStats(counters=AFTER_READY))
    found = samples(render_worker(MODEL, worker))
    who = {"role": "prefill", "worker": INSTANCE}
    for name, total in AFTER_READY.items():
        assert value(found, f"baton_worker_{name}_total", **who) == total
    assert not any(name == "baton_worker_events_total" for name, _ in found)


def test_counters_of_graphs_become_metrics_by_kind_and_reason():
    worker = WorkerRecord(role="decode", instance=INSTANCE, stats=WorkerStats(counters=GRAPHS))
    found = samples(render_worker(MODEL, worker))
    who = {"role": "decode", "worker": INSTANCE}
    assert value(found, "baton_worker_graph_replays_total", kind="target_verify", **who) == 7
    assert value(found, "baton_worker_graph_pad_rows_total", kind="draft", **who) == 4
    assert (
        value(found, "baton_worker_graph_fallbacks_total", kind="draft_extend", reason="too_large", **who)
        == 3
    )
    assert value(found, "baton_worker_graph_fallbacks_total", kind="draft", reason="off", **who) == 2
    assert not any(name == "baton_worker_events_total" for name, _ in found)
