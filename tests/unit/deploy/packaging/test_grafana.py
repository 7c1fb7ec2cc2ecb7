"""The Grafana dashboard asks for nothing but what docs/metrics.md tells, in the form that its type has."""

import json
import re
from pathlib import Path

import pytest
from baton.tests.unit.cluster.telemetry.test_metrics import series_of, told

ROOT = Path(__file__).resolve().parents[4]
DASHBOARD = ROOT / "deploy" / "packaging" / "grafana" / "baton.json"
SELECTOR = re.compile(r"\b((?:baton|process)_\w+)(?:\{([^}]*)\})?(\[)?")
OF_SCRAPE = {"job"}  # labels that Prometheus adds


def panels():
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def exprs():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.mark.parametrize("expr", exprs())
def test_a_query_names_series_and_labels_that_are_documented(expr):
    metrics, found = told(), SELECTOR.findall(expr)
    assert found, "a query of no metric"
    for name, selector, is_range in found:
        assert name in series_of(metrics), name
        kind, labels = metrics.get(name) or metrics[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert set(re.findall(r"(\w+) ?=", selector)) <= labels | OF_SCRAPE, selector
        assert (kind != "gauge") == bool(is_range), (
            f"{name}: a rate of counters and histograms, and of nothing else"
        )
        assert kind != "histogram" or name.endswith(("_bucket", "_sum", "_count")), name


@pytest.mark.parametrize("expr", exprs())
def test_a_query_groups_only_by_labels_of_its_metrics(expr):
    metrics = told()
    known = {"le"} | {label for name, (_, labels) in metrics.items() if name in expr for label in labels}
    known |= {"le"} | OF_SCRAPE
    for group in re.findall(r"\bby \(([^)]*)\)", expr):
        assert {label.strip() for label in group.split(",")} <= known, group


def test_panels_have_a_place_of_their_own():
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_dashboard_shows_every_listed_question_of_an_operator():
    asked = " ".join(exprs())
    for name in (
        "baton_requests_total", "baton_time_to_first_token_seconds", "baton_inter_token_seconds",
        "baton_queued_requests",
        "baton_queue_wait_seconds", "baton_handoff_bytes_total", "baton_handoff_seconds",
        "baton_worker_pages",
        "baton_worker_accept_length", "baton_worker_spec_steps", "baton_worker_graph_fallbacks_total",
        "baton_registered_workers", "baton_request_prompt_tokens", "baton_request_output_tokens",
        "baton_ejections_total", "baton_worker_deaths_total", "repulls",
    ):  # fmt: skip
        assert name in asked, name
