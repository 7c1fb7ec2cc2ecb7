"""The alert rules are rules of Prometheus, fire when they must, ask for known metrics, and have a section of
the runbook each."""

import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from baton.cluster.telemetry.metric_names import KNOWN_EVENTS
from baton.decode.step_metrics import DECODE_COUNTERS
from baton.kvtransfer.protocol.session import TransferCounters
from baton.prefill.worker import PREFILL_COUNTERS
from baton.tests.cluster.prometheus import needs
from baton.tests.unit.cluster.telemetry.test_metrics import series_of, told
from baton.tests.unit.deploy.packaging.alert_cases import CASES

ROOT = Path(__file__).resolve().parents[4]
ALERTS = ROOT / "deploy" / "packaging" / "helm" / "baton" / "alerts.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"
GROUPS = yaml.safe_load(ALERTS.read_text())["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
OF_WORKERS = {*DECODE_COUNTERS, *PREFILL_COUNTERS, *(f.name for f in fields(TransferCounters))}
OF_SCRAPE = {"job", "instance", "namespace"}  # labels that Prometheus and its operator add
SELECTOR = re.compile(r"\b((?:baton|process)_\w+)(?:\{([^}]*)\})?")
PARTS = ("**What it means.**", "**Where to look.**", "**What to do.**")


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@needs("promtool")
def test_prometheus_takes_the_rules():
    code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", str(ALERTS))
    assert code == 0, said


def as_test(case, minutes, series, is_firing):
    labels = {"severity": case.severity, **case.labels}
    link = f"docs/runbook.md#{case.alert.lower()}"
    fired = {"exp_labels": labels, "exp_annotations": {"summary": case.summary, "runbook_url": link}}
    return {
        "name": f"{case.alert} {'fires' if is_firing else 'is quiet'} after {minutes} minutes",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minutes}m", "alertname": case.alert, "exp_alerts": [fired] if is_firing else []}
        ],
    }


@needs("promtool")
def test_every_alert_fires_when_it_must_and_only_then(tmp_path):
    tests = [
        as_test(case, minutes, series, is_firing)
        for case in CASES
        for minutes, series, is_firing in ((60, case.fires, True), (60, case.quiet, False), *case.later)
    ]
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    code, said = promtool("test", "rules", str(file))
    assert code == 0, said


def test_every_alert_has_cases():
    assert [case.alert for case in CASES] == list(RULES)


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_asks_for_known_metrics_labels_and_events(alert):
    metrics, expr = told(), RULES[alert]["expr"]
    found, known = SELECTOR.findall(expr), {"le"} | OF_SCRAPE
    assert found
    for name, selector in found:
        assert name in series_of(metrics), name
        _, labels = metrics.get(name) or metrics[re.sub(r"_(bucket|sum|count)$", "", name)]
        known |= labels
        assert set(re.findall(r"(\w+) ?[=!]", selector)) <= labels, selector
        for event in re.findall(r'event=~?"([^"]*)"', selector):
            assert set(event.split("|")) <= (OF_WORKERS if "worker_events" in name else set(KNOWN_EVENTS))
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr):
        assert {label.strip() for label in group.split(",")} <= known, group


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_leads_to_its_section_of_the_runbook(alert):
    rule = RULES[alert]
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{alert.lower()}"
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    section = re.split(r"\n##", RUNBOOK.read_text().partition(f"\n### {alert}\n")[2])[0]
    places = [section.find(part) for part in PARTS]
    assert -1 not in places, f"{alert} lacks one of {PARTS}"
    assert places == sorted(places)
    assert "`" in section.partition(PARTS[1])[2], "a command or a query"


def test_the_runbook_has_no_section_of_another_alert():
    alerts = RUNBOOK.read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\w+)$", alerts, re.MULTILINE) == list(RULES)


def test_the_page_of_metrics_lists_the_alerts_by_severity():
    text = (ROOT / "docs" / "metrics.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (critical|warning|info) \| (.*) \|$", text, re.MULTILINE)
    listed = {alert: severity for severity, cell in rows for alert in re.findall(r"`(\w+)`", cell)}
    assert listed == {alert: rule["labels"]["severity"] for alert, rule in RULES.items()}


def test_the_metrics_that_the_runbook_names_exist():
    named = set(re.findall(r"\bbaton_\w+", RUNBOOK.read_text()))
    assert len(named) > 20
    assert named <= series_of(told())
