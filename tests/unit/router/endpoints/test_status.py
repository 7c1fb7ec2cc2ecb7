"""/status names what pairs workers, and why two do not pair."""

import json
from collections import Counter
from types import SimpleNamespace

import msgspec
from baton.cluster.protocol.messages import Choice, DraftWidths, RoomCounts, WorkerStats
from baton.cluster.telemetry.metrics import RouterMetrics
from baton.router.endpoints.status import (
    metrics_of,
    registered_of,
    serving_of,
    status_of,
    unpaired_of,
    why_not_ready,
)
from baton.router.workers.registry import Registry
from baton.router.workers.role_changes import RoleChanges
from baton.router.workers.stalls import Stalls
from baton.tests.unit.router.workers.test_registry import beat, hello

P, D, PLAIN = "1" * 32, "2" * 32, "3" * 32
WIDTHS = DraftWidths(features=192, hidden=64, steps=3, topk=1, tokens=4)


def registry_of(*hellos):
    registry = Registry("a" * 32, 3.0)
    for message in hellos:
        registry.hello(message.instance[:1].encode(), message, 0.0)
        beat(registry, registry.get(message.instance), phase="serving", weights_hash="e" * 64)
    return registry


def dispatcher_of(registry):
    proofs = SimpleNamespace(
        status=lambda now: [], why_not=lambda now: "no pair was shown", failures=lambda: []
    )
    return SimpleNamespace(
        registry=registry, is_draining=False, is_ready=False, num_queued=0, num_running=0, num_open=0,
        event_totals={},
        health_probes=SimpleNamespace(pair_health=proofs, outcomes={}),
        metrics=RouterMetrics("m"),
        stalls=Stalls(registry, 0.0, Counter()),
        role_changes=RoleChanges(registry),
        classes=lambda: (),
    )  # fmt: skip


PREFILL = hello(P, "prefill", feature_ids=(1, 5), feature_width=128)
SPECULATIVE = hello(D, feature_ids=(1, 5, 8), feature_width=192, draft_widths=WIDTHS)


def test_status_names_layers_widths_phase_and_weights_of_each_worker():
    status = status_of(dispatcher_of(registry_of(PREFILL, SPECULATIVE)), "m", 0.0, 0.0)
    shown = [
        (w.feature_ids, w.feature_width, w.draft_widths, w.phase, w.weights_hash) for w in status.workers
    ]
    assert shown == [
        ([1, 5], 128, None, "serving", "e" * 64),
        ([1, 5, 8], 192, WIDTHS, "serving", "e" * 64),
    ]


def test_status_shows_the_sizes_that_a_worker_chose_and_why():
    chosen = {"chunk_size": Choice(value=2048, why="by the card"), "graphs": Choice(value="on", why="a GPU")}
    registry = registry_of(hello(P, "prefill", chosen=chosen), SPECULATIVE)
    shown = json.loads(msgspec.json.encode(status_of(dispatcher_of(registry), "m", 0.0, 0.0)))
    assert shown["workers"][0]["chosen"] == {
        "chunk_size": {"value": 2048, "why": "by the card"},
        "graphs": {"value": "on", "why": "a GPU"},
    }
    assert shown["workers"][1]["chosen"] == {}


def test_status_counts_no_canary_as_a_request_at_a_worker():
    registry = registry_of(SPECULATIVE)
    counts = {"running": 3, "queued": 1, "transferring": 1}
    beat(registry, registry.get(D), canaries=RoomCounts(running=1, transferring=1), **counts)
    [worker] = status_of(dispatcher_of(registry), "m", 0.0, 0.0).workers
    assert (worker.running, worker.queued, worker.transferring, worker.canaries) == (2, 1, 0, 2)


def test_registered_workers_are_counted_by_role_and_state():
    registry = registry_of(PREFILL, SPECULATIVE, hello(PLAIN))
    registry.drain(registry.get(PLAIN))
    shown = {key: number for key, number in registered_of(registry).items() if number}
    assert shown == {("prefill", "serving"): 1, ("decode", "serving"): 1, ("decode", "draining"): 1}
    assert registered_of(registry_of())["prefill", "serving"] == 0, "an alert needs a series to compare"


def test_serving_workers_are_counted_by_role():
    registry = registry_of(hello(D), hello(PLAIN))
    registry.hello(b"p", PREFILL, 0.0)
    assert serving_of(registry) == {"prefill": 0, "decode": 2}, "it has no heartbeat yet"
    beat(registry, registry.get(P))
    assert serving_of(registry) == {"prefill": 1, "decode": 2}


def test_a_router_without_prefill_says_so_in_its_metrics():
    def lacks(*hellos):
        return b'baton_lacks_prefill{model_name="m"} 1' in metrics_of(dispatcher_of(registry_of(*hellos)))

    assert lacks(hello(D))
    assert not lacks(hello(D), PREFILL)
    assert not lacks(hello(D, aggregated=True))


def test_status_names_aggregated_workers():
    registry = registry_of(PREFILL, hello(D, aggregated=True), hello(PLAIN))
    shown = status_of(dispatcher_of(registry), "m", 0.0, 0.0).workers
    assert [worker.aggregated for worker in shown] == [False, True, False]


def test_status_names_workers_that_end_together():
    registry = registry_of(PREFILL, hello(D, group=D), hello(PLAIN, group=D))
    shown = status_of(dispatcher_of(registry), "m", 0.0, 0.0).workers
    assert [worker.group for worker in shown] == ["", D, D]


def test_status_says_why_two_workers_do_not_pair():
    registry = registry_of(PREFILL, SPECULATIVE, hello(PLAIN))
    (one,) = unpaired_of(registry)
    assert (one.prefill, one.decode) == (P, D)
    assert "[1, 5]" in one.reason
    assert "[1, 5, 8]" in one.reason
    assert status_of(dispatcher_of(registry), "m", 0.0, 0.0).unpaired == [one]


def test_a_cluster_without_a_pair_says_which_features_are_missing():
    assert "[1, 5, 8]" in why_not_ready(dispatcher_of(registry_of(PREFILL, SPECULATIVE)), 0.0)
    other = hello(D, fingerprint="another")
    assert "equal fingerprints" in why_not_ready(dispatcher_of(registry_of(PREFILL, other)), 0.0)


def test_a_worker_that_omits_its_features_pairs_by_fingerprint():
    registry = Registry("a" * 32, 3.0)
    for message in (hello(P, "prefill"), hello(D)):
        registry.hello(message.instance[:1].encode(), message, 0.0)
        worker = registry.get(message.instance)
        registry.heartbeat(
            worker.identity, worker.instance, WorkerStats(pages_total=100, pages_free=100), 0.0
        )
    assert unpaired_of(registry) == []
