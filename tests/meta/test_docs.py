"""docs/protocol.md and docs/runbook.md list the messages, settings, times, counters, faults of the code."""

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import zmq
from baton.cluster.config.load import settings_of
from baton.cluster.config.roles import ROLES
from baton.cluster.net.sockets import make_socket
from baton.cluster.protocol.messages import ControlDown, ControlUp, KVDown, KVUp
from baton.cluster.telemetry.metric_names import KNOWN_EVENTS, OF_EVENT
from baton.kvtransfer.protocol.session import TransferCounters
from baton.router.rooms.attempt_log import AttemptLog
from baton.router.rooms.effects import Timeouts
from baton.router.rooms.timeline import Timeline
from baton.router.scheduling.load_history import ROUTER_SERIES, WORKER_SERIES
from baton.tests.faults.rows import load
from baton.tests.sim.cluster_talk import as_json, of_one_request, talk

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL, RUNBOOK, ROUTER, ARCHITECTURE, FAILURES = (
    ROOT / "docs" / f"{name}.md" for name in ("protocol", "runbook", "router", "architecture", "failures")
)
PAGES = (
    "api.md", "development.md", "failures.md", "gpu.md", "guarantees.md", "metrics.md", "operate.md",
    "protocol.md", "router.md", "running.md",
)  # fmt: skip
SERVING = ("cluster", "decode", "deploy", "kvtransfer", "prefill", "router", "worker")
# How often something is looked at, or what an answer says: nothing happens to a room at its end.
PACES = {
    "FOREVER_S", "PAUSE_S", "POLL_S", "READY_TIMEOUT_S", "STEP_S", "SWEEP_S", "TICK_S", "IDLE_WAIT_S",
    "RETRY_S", "COUNT_S",
    "MAX_RETRY_S", "RETRY_AFTER_S", "BUDGET_STEP_S", "TERM_AGAIN_S", "KILL_AFTER_S", "LAST_FRAMES_S",
    "TIMEOUT_S",
    "deploy.up.supervise.LAST_LINE_S", "deploy.up.supervise.WHY_S",
    "cluster.process.log_throttle.QUIET_S", "PRIORITY_S", "LONGEST_RETRY_AFTER_S", "RATE_WINDOW_S",
    "MINUTE_S",
    "cluster.process.process.SWITCH_INTERVAL_S",
    "router.http.access_log.FLUSH_S",
    "LOOK_AGAIN_S", "LOOK_S", "deploy.cli.findings.KEY_WARN_S", "deploy.cli.findings.COMMAND_S",
    "deploy.cli.findings.MAX_SKEW_S", "deploy.cli.findings.STALE_S", "deploy.cli.pull_test.SILENCE_S",
    "deploy.cli.pull_test.SERVE_S", "deploy.cli.pull_test.MEASURE_S",
    "deploy.cli.doctor.ANSWER_S", "deploy.cli.client.SILENCE_S", "deploy.cli.top.ANSWER_S",
    "deploy.cli.top_view.WINDOW_S",
    "SWITCH_INTERVAL_S", "deploy.packaging.units.SETTLE_S", "deploy.up.gpu_list.PROBE_S",
}  # fmt: skip


def section(path, heading):
    """The text under a heading, up to the next one of its level or above."""
    level = heading.split(" ")[0]
    text = path.read_text().partition(f"\n{heading}\n")[2]
    assert text, heading
    return re.split(rf"\n#{{1,{len(level)}}} ", text)[0]


def rows(text):
    """Cells of every table row but headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for at, row in enumerate(found) if set(row[0]) != {"-"} and not is_heading(found, at)]


def is_heading(found, at):
    return at + 1 < len(found) and set(found[at + 1][0]) == {"-"}


def code(cell):
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def value_of(path):
    """The default behind `module.NAME` or `module.Class.field`, both below the package."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module("baton." + ".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        for name in parts[depth:]:
            found = getattr(found, name)
        return found
    raise AssertionError(path)


def sources(*folders):
    return "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@pytest.mark.parametrize(
    ("heading", "union"),
    [
        ("### Control, worker to router", ControlUp),
        ("### Control, router to worker", ControlDown),
        ("### KV, decode to prefill", KVUp),
        ("### KV, prefill to decode", KVDown),
    ],
)
def test_the_tables_of_each_direction_list_exactly_its_messages(heading, union):
    named = [code(row[0])[0] for row in rows(section(PROTOCOL, heading))]
    assert sorted(named) == sorted(message.__name__ for message in get_args(union))


def test_every_documented_socket_setting_is_that_of_a_new_socket():
    context = zmq.Context()
    with context, make_socket(context, zmq.ROUTER) as bound, make_socket(context, zmq.DEALER) as dialing:
        for option, value, _ in rows(section(PROTOCOL, "## Planes"))[6:]:
            of_bound, _, of_dialing = value.partition(" / ")
            assert bound.getsockopt(getattr(zmq, option)) == int(of_bound), option
            assert dialing.getsockopt(getattr(zmq, option)) == int(of_dialing or of_bound), option


def times():
    return {code(row[0])[0]: row[1] for row in rows(section(PROTOCOL, "## Times"))}


def test_every_documented_timeout_is_the_default_of_the_code():
    for path, shown in times().items():
        assert shown == f"{value_of(path):g} s", path


def test_every_timeout_of_the_code_is_documented():
    told = {path.rpartition(".")[2] for path in times()}
    constants = {
        f"{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}.{name}"
        for folder in SERVING
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"^([A-Z_]+_S) = ", path.read_text(), re.MULTILINE)
    }
    paces = {name for name in constants if name in PACES or name.rpartition(".")[2] in PACES}
    assert constants - paces <= set(times()), "a time that no table of docs/protocol.md names"
    assert {f.name for f in fields(Timeouts)} <= told
    assert {name for role in ROLES for name in settings_of(role) if name.endswith("_s")} <= told


def test_every_log_line_and_counter_that_is_named_exists():
    text = sources(*SERVING, "engine")
    lines = rows(section(RUNBOOK, "## Log lines"))
    named = [code(row[0])[0] for row in lines]
    assert len(named) > 15
    for line in named:
        assert f'"{line}' in text, line
    counters = section(RUNBOOK, "## Counters and events")
    for name in code(counters):
        known = name.startswith("baton_") or re.search(rf'"{name}"|^    {name}: int', text, re.MULTILINE)
        assert known, name
    hand_off = {f.name for f in fields(TransferCounters)} - {"blocks", "bytes"}
    assert hand_off <= set(code(counters))
    router_events = set(re.findall(r'events\["(\w+)"\]', text))
    assert router_events <= set(code(counters))
    of_router = {name for name in code(counters.partition("Events of the router")[2]) if "{" not in name}
    events = {name for name in of_router if not name.startswith("baton_")}
    assert events == {*KNOWN_EVENTS, *OF_EVENT}, "events that are shown as 0 before the first one"


def test_every_series_of_the_load_history_is_explained():
    text = section(ROUTER, "## Observability").partition("**The load of the last 15 minutes.**")[2]
    told = {name for row in rows(text) for cell in row for name in code(cell)}
    assert {*ROUTER_SERIES, *WORKER_SERIES} <= told


def test_every_field_of_a_timeline_is_explained():
    text = section(ROUTER, "## Observability").partition("**One request.**")[2]
    table = text.partition("**In the terminal.**")[0]
    told = {name for row in rows(table) for name in code(row[0])}
    assert told == {field.name for field in msgspec.structs.fields(Timeline)}
    attempt = text.partition("`attempt_log`")[2]
    shown = {field.name for field in msgspec.structs.fields(AttemptLog)} - {
        "prefill_instance",
        "decode_instance",
    }
    assert shown <= set(code(attempt))


def test_documented_messages_decode():
    talk_shown = section(PROTOCOL, "## What a message looks like")
    shown = re.findall(r"^[\d.]+ \w+ -> \w+ (\{.*\})", talk_shown, re.MULTILINE)
    assert len(shown) > 10
    unions = {
        message.__name__: message
        for union in (ControlUp, ControlDown, KVUp, KVDown)
        for message in get_args(union)
    }
    for line in shown:
        names = re.findall(r'(?:[{,] )?"(\w+)": ', re.sub(r": [\[{].*[\]}]", ": 0", line[1:-1]))
        message = unions[json.loads("{" + line[1:].partition(",")[0] + "}")["type"]]
        assert set(names) - {"type"} <= {f.encode_name for f in msgspec.structs.fields(message)}, line


def test_the_documented_frame_decodes_to_its_message():
    frame, decoded = re.search(r"--frame ([0-9a-f]+)\n(\{.*\})", PROTOCOL.read_text()).groups()
    assert as_json(bytes.fromhex(frame)) == [decoded]


def test_the_documented_request_matches_a_simulated_one():
    types = [json.loads(message)["type"] for _, _, _, message, _ in of_one_request(talk(3))]
    assert types[0] in ("Reserve", "Prefill")
    assert {
        "Reserve",
        "Prefill",
        "KVHello",
        "KVWelcome",
        "Attach",
        "Announce",
        "Pull",
        "Block",
        "Release",
    } <= set(types)
    assert types[-1] == "Finished"


def test_every_row_of_the_fault_table_is_explained_and_no_other():
    told = {name.strip() for row in rows(section(RUNBOOK, "## Symptoms")) for name in row[4].split(",")}
    assert told == set(load())
    results = [tuple(row[:3]) for row in rows(section(FAILURES, "## Results"))]
    assert results == [(row.name, row.fault, row.criterion) for row in load().values()]


def test_every_error_code_that_is_named_is_one_of_the_router():
    text = sources(*SERVING)
    for status, name, _ in rows(section(RUNBOOK, "## Errors that clients see")):
        assert f'"{code(name)[0]}"' in text, (status, name)


@pytest.mark.parametrize("name", PAGES)
def test_every_path_that_is_named_exists(name):
    named = [text for text in code((ROOT / "docs" / name).read_text()) if re.fullmatch(r"[\w/]+\.py", text)]
    assert named
    for path in named:
        assert (ROOT / path).is_file(), path


def test_every_path_of_the_map_exists_and_every_folder_is_in_it():
    """A path that is not written from the root on is that of a neighbour of the path before it."""
    text = re.sub("```.*?```", "", ARCHITECTURE.read_text(), flags=re.DOTALL)
    entries = [row for row in rows(section(ARCHITECTURE, "## The house in one picture")) if len(row) == 3]
    folders = [folder for row in entries for folder in code(row[0])]
    for row in entries:
        for file in code(row[2]):
            assert any((ROOT / folder / file).is_file() for folder in code(row[0])), row
    top = {path.parent.name for path in ROOT.glob("*/__main__.py")} | set(SERVING) | {"kernels", "training"}
    assert top <= {folder.partition("/")[0] for folder in folders}
    sources = {
        f"/{path.relative_to(ROOT)}" for name in top | {"engine"} for path in (ROOT / name).rglob("*.py")
    }
    named = [name for name in code(text) if re.fullmatch(r"[\w/]+(\.py|/)", name)]
    assert len(named) > 100
    for name in named:
        assert (ROOT / name).exists() or any(source.endswith(f"/{name}") for source in sources), name


def test_every_file_of_the_look_ups_exists_and_most_were_found_at_once():
    text = section(ARCHITECTURE, "## Where to find what")
    found = rows(text)
    for _, file, outcome in found:
        for path in (file, outcome) if outcome.startswith("no: ") else (file,):
            assert (ROOT / code(path)[0]).is_file(), path
    at_once = [outcome for _, _, outcome in found if outcome == "yes"]
    assert f"{len(at_once)} of {len(found)}." in text
    assert len(found) >= 30
    assert len(at_once) >= 0.85 * len(found)


def test_every_test_that_the_router_s_page_names_exists():
    named = [name.split("::") for name in code(ROUTER.read_text()) if "::" in name]
    assert len(named) >= 14
    for path, function in named:
        assert f"def {function}(" in (ROOT / path).read_text(), function
