"""The rollout of a head, over a cluster of books: one worker at a time, judged, and taken back."""

import dataclasses
from pathlib import Path

import httpx
import pytest
from baton.engine.errors import CheckpointError
from baton.training.command import main
from baton.training.swap import Drafting, HttpDecodes, RolledBack, Rollout, SwapSettings, point_link

OLD, NEW = "0" * 8, "f" * 8
LENGTHS = {OLD: 2.0, NEW: 2.4}


class FakeDecodes:
    """Decode workers whose requests are verified at `lengths` by head; time passes with each look."""

    def __init__(self, count=3, lengths=None, before=1000):
        self.now, self.lengths = 0.0, lengths or LENGTHS
        self.workers = {
            f"d{i}": Drafting(
                instance=f"d{i}", name=f"decode d{i}", host="h", fingerprint=OLD, verifies=before,
                tokens=int(before * self.lengths[OLD]), recent=self.lengths[OLD] if before else None,
                order="", state="", fault="", found="", found_ids=(), link="/heads/current", previous="",
            )
            for i in range(count)
        }  # fmt: skip
        self.orders = []
        self.pace = 20  # verifies between two looks
        self.idle = set()
        self.on_order = lambda instance, action: None
        self.refusals = {}
        self.is_other = False  # the new head has another shape
        self.layers = {"prefill p0": (1, 2, 3)}
        self.linked = OLD  # the head that a restarted worker has

    def change(self, instance, **fields):
        self.workers[instance] = dataclasses.replace(self.workers[instance], **fields)

    def look(self):
        for one in list(self.workers.values()):
            if one.instance not in self.idle:
                tokens = one.tokens + int(self.pace * self.lengths[one.fingerprint])
                self.change(one.instance, verifies=one.verifies + self.pace, tokens=tokens)
        return dict(self.workers)

    def order(self, instance, order, action, path):
        self.orders.append((instance, action, path))
        self.on_order(instance, action)
        if instance not in self.workers:
            return
        if action == "restart":
            one = self.workers.pop(instance)
            new = f"{instance}'"
            fields = {"fingerprint": self.linked, "verifies": 0, "tokens": 0, "recent": None, "order": ""}
            self.workers[new] = dataclasses.replace(one, instance=new, name=f"decode {new}", **fields)
            return
        one, fault = self.workers[instance], self.refusals.get((instance, action), "")
        done = {"order": order, "state": "refused" if fault else "done", "fault": fault, "found": NEW}
        if action == "check" and not fault:
            done |= {"state": "other" if self.is_other else "checked", "found_ids": (1, 3)}
            done["fault"] = "it is wider" if self.is_other else ""
        elif action == "swap" and not fault:
            done |= {"fingerprint": NEW, "previous": one.fingerprint, "verifies": 0, "tokens": 0}
        elif action == "back" and not fault:
            done |= {"fingerprint": one.previous, "previous": "", "verifies": 0, "tokens": 0}
        self.change(instance, **done)

    def offered(self):
        return self.layers

    def sleep(self, seconds):
        self.now += seconds

    def heads(self):
        return [one.fingerprint for one in self.workers.values()]

    def done(self):
        return [(instance, action) for instance, action, _ in self.orders if action != "check"]


def rollout(decodes, said=None, **changes):
    settings = SwapSettings(**({"path": Path("/heads/new"), "verifies": 200, "verdict_s": 60.0} | changes))
    say = (said if said is not None else []).append
    return Rollout(settings, decodes, say, clock=lambda: decodes.now, sleep=decodes.sleep)


def test_a_better_head_reaches_every_worker_one_after_the_other():
    decodes, said = FakeDecodes(), []
    rollout(decodes, said).run()
    assert decodes.heads() == [NEW] * 3
    assert decodes.orders[:3] == [(f"d{i}", "check", "/heads/new") for i in range(3)]
    assert decodes.done() == [(f"d{i}", "swap") for i in range(3)]
    verdicts = [line for line in said if "accept length" in line]
    assert ["on the others meanwhile" in line for line in verdicts] == [True, True, False]
    assert "2.40 over" in verdicts[0]
    assert "2.00 before" in verdicts[2], "no other worker has the old head"


def test_a_second_run_changes_nothing():
    decodes, said = FakeDecodes(), []
    rollout(decodes).run()
    decodes.orders.clear()
    rollout(decodes, said).run()
    assert decodes.done() == []
    assert said == ["every decode worker has /heads/new already"]


def test_a_run_that_was_broken_off_goes_on():
    decodes = FakeDecodes()
    decodes.change("d1", fingerprint=NEW)
    rollout(decodes).run()
    assert decodes.done() == [("d0", "swap"), ("d2", "swap")]


@pytest.mark.parametrize(("length", "is_kept"), [(1.9, True), (1.7, False), (1.0, False)])
def test_a_head_is_taken_back_when_fewer_drafts_are_accepted(length, is_kept):
    decodes, said = FakeDecodes(lengths={OLD: 2.0, NEW: length}), []
    if is_kept:
        return rollout(decodes, said).run()
    with pytest.raises(RolledBack, match=r"decode d0: accept length 1\.\d0 over 2\d0 verifies, 2\.00 on the"):
        rollout(decodes, said).run()
    assert decodes.heads() == [OLD] * 3
    assert decodes.done() == [("d0", "swap"), ("d0", "back")]
    assert said[-1] == "decode d0: drafts with its old head"


def test_a_head_that_fails_late_is_taken_back_everywhere():
    decodes = FakeDecodes()
    decodes.on_order = lambda instance, action: decodes.lengths.update(
        {NEW: 1.0} if (instance, action) == ("d2", "swap") else {}
    )
    decodes.lengths = dict(LENGTHS)
    with pytest.raises(RolledBack, match="decode d2"):
        rollout(decodes).run()
    assert decodes.done()[3:] == [("d2", "back"), ("d1", "back"), ("d0", "back")]
    assert decodes.heads() == [OLD] * 3


@pytest.mark.parametrize("instance", ["d0", "d2"])
def test_a_refused_check_leaves_every_worker_alone(instance):
    decodes = FakeDecodes()
    decodes.refusals[instance, "check"] = "it is torn"
    with pytest.raises(CheckpointError, match=f"decode {instance}: it is torn"):
        rollout(decodes).run()
    assert decodes.done() == []


def test_hosts_with_other_files_at_the_path_are_refused(monkeypatch):
    decodes, order = FakeDecodes(), FakeDecodes.order

    def other(self, instance, number, action, path):
        order(self, instance, number, action, path)
        if instance == "d1":
            self.change(instance, found="e" * 8)

    monkeypatch.setattr(FakeDecodes, "order", other)
    with pytest.raises(CheckpointError, match="another checkpoint on the host of decode d1"):
        rollout(decodes).run()
    assert decodes.done() == []


@pytest.mark.parametrize("when", ["at its order", "while it is judged"])
def test_a_worker_that_is_lost_ends_the_run_and_the_others_go_back(when):
    decodes, said = FakeDecodes(), []

    def lose(instance, action):
        if (instance, action) == ("d1", "swap") and when == "at its order":
            del decodes.workers[instance]

    decodes.on_order = lose
    look = decodes.look

    def looked():
        one = decodes.workers.get("d1")
        if when == "while it is judged" and one is not None and one.fingerprint == NEW and one.verifies > 40:
            del decodes.workers["d1"]
        return look()

    decodes.look = looked
    with pytest.raises(RolledBack, match="decode d1 was lost; the old head is back"):
        rollout(decodes, said).run()
    assert decodes.heads() == [OLD, OLD]
    assert "decode d1: lost; after a restart it has the head of its --draft" in said


def test_without_traffic_there_is_no_verdict_and_the_head_goes_back():
    decodes = FakeDecodes(before=0)
    decodes.pace = 0
    with pytest.raises(RolledBack, match=r"no verdict within 60 s, 0 of 200 verifies; lower --verifies"):
        rollout(decodes).run()
    assert decodes.heads() == [OLD] * 3


def test_zero_verifies_swap_without_a_comparison():
    decodes = FakeDecodes(before=0)
    decodes.pace = 0
    rollout(decodes, verifies=0).run()
    assert decodes.heads() == [NEW] * 3


def test_a_worker_that_joins_meanwhile_gets_the_head_too():
    decodes = FakeDecodes(count=2)

    def join(instance, action):
        if (instance, action) == ("d1", "swap"):
            decodes.workers["d9"] = dataclasses.replace(
                FakeDecodes(1).workers["d0"], instance="d9", name="d9"
            )

    decodes.on_order = join
    rollout(decodes).run()
    assert decodes.heads() == [NEW] * 3
    assert ("d9", "check", "/heads/new") in decodes.orders


LINKED = {"link": Path("/heads/current"), "may_restart": True}
POINTED = {Path("/heads/new"): NEW, Path("/heads/old"): OLD}


@pytest.fixture
def linked(monkeypatch):
    """Workers that must restart for the new head, and follow the link when they do."""
    decodes = FakeDecodes()
    decodes.is_other, decodes.pointed = True, [Path("/heads/old")]

    def point(link, target):
        decodes.pointed.append(target)
        decodes.linked = POINTED[target]
        return decodes.pointed[-2]

    monkeypatch.setattr("baton.training.swap.point_link", point)
    return decodes


def test_workers_restart_one_by_one_for_a_head_of_another_shape(linked):
    said = []
    rollout(linked, said, **LINKED).run()
    assert linked.pointed[1:] == [Path("/heads/new")]
    assert linked.done() == [(f"d{i}", "restart") for i in range(3)]
    assert linked.heads() == [NEW] * 3
    assert said[0] == "/heads/current names /heads/new"
    assert [line.split(":")[0] for line in said[1::2]] == [f"decode d{i}'" for i in range(3)]


def test_restarted_workers_go_back_through_the_link(linked):
    linked.lengths = {OLD: 2.0, NEW: 1.2}
    with pytest.raises(RolledBack, match="decode d0: accept length 1"):
        rollout(linked, **LINKED).run()
    assert linked.pointed[1:] == [Path("/heads/new"), Path("/heads/old")]
    assert linked.done() == [("d0", "restart"), ("d0'", "restart")]
    assert linked.heads() == [OLD] * 3


def test_a_worker_that_comes_back_with_another_head_ends_the_run(linked, monkeypatch):
    monkeypatch.setitem(POINTED, Path("/heads/new"), "e" * 8)
    linked.lengths = LENGTHS | {"e" * 8: 2.0}
    with pytest.raises(RolledBack, match="came back with another head, eeeeeeee"):
        rollout(linked, **LINKED).run()


@pytest.mark.parametrize(
    ("settings", "change", "fault"),
    [
        ({}, {}, "decode d0: it is wider --link LINK"),
        ({"link": Path("/heads/current")}, {}, "it is wider"),
        (LINKED | {"link": Path("/heads/x")}, {}, "its --draft is not the link /heads/x"),
        (LINKED, {"layers": {"prefill p0": (1,)}}, "prefill p0 does not offer the features of layers 3"),
        (LINKED, {"workers": {}}, "is the only decode worker"),
    ],
)
def test_a_restart_that_cannot_go_well_is_refused_before_any(linked, settings, change, fault):
    for name, value in change.items():
        setattr(linked, name, value or dict([next(iter(linked.workers.items()))]))
    with pytest.raises(CheckpointError, match=fault):
        rollout(linked, **settings).run()
    assert (linked.done(), linked.pointed[1:]) == ([], [])


def test_an_order_that_gets_lost_is_sent_again():
    decodes, order = FakeDecodes(count=1), FakeDecodes.order
    lost = iter([True, True, False, True, False])
    decodes.order = lambda *which: None if next(lost) else order(decodes, *which)
    rollout(decodes).run()
    assert decodes.heads() == [NEW]


def test_a_link_names_the_new_head_in_one_step(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (tmp_path / "current").symlink_to(old)
    point_link(tmp_path / "current", new)
    assert (tmp_path / "current").readlink() == new
    assert point_link(tmp_path / "current", old) == new
    point_link(tmp_path / "first", new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "first", "new", "old"]
    with pytest.raises(CheckpointError, match="no symbolic link"):
        point_link(old, new)


def test_a_link_that_cannot_be_changed_is_a_fault_in_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be changed"):
        point_link(tmp_path / "absent" / "current", tmp_path)


def test_a_directory_in_place_of_the_link_ends_the_run_before_any_order(tmp_path):
    decodes = FakeDecodes()
    with pytest.raises(CheckpointError, match="no symbolic link"):
        rollout(decodes, link=tmp_path).run()
    assert decodes.orders == []


def served(handler):
    return HttpDecodes(httpx.Client(transport=httpx.MockTransport(handler)), "http://here:1", "key")


def test_a_refusal_of_the_router_is_quoted_at_once():
    def handler(request):
        assert request.headers["authorization"] == "Bearer key"
        return httpx.Response(403, text="takes an operator's key")

    with pytest.raises(CheckpointError, match="/status answered 403: takes an operator's key"):
        served(handler).look()


def test_a_router_that_restarts_is_asked_again(monkeypatch):
    monkeypatch.setattr("baton.training.swap.LOOK_S", 0.0)
    answers = iter([httpx.Response(503), httpx.Response(200, json={"workers": []})])
    assert served(lambda request: next(answers)).look() == {}


def test_a_worker_that_drafts_by_lookup_cannot_be_swapped():
    worker = {
        "role": "decode", "state": "serving", "draft_widths": {}, "draft": None, "instance": "d" * 32,
        "pid": 7, "host": "h",
    }  # fmt: skip
    decodes = served(lambda request: httpx.Response(200, json={"workers": [worker]}))
    with pytest.raises(CheckpointError, match=r"decode dddddddd \(pid 7 on h\) drafts by lookup"):
        decodes.look()
    worker["state"] = "draining"
    assert decodes.look() == {}


def test_the_command_ends_in_one_line_without_a_router(monkeypatch, capsys):
    monkeypatch.setattr("baton.training.swap.AWAY_S", 0.0)
    assert main(["swap", "somewhere", "--url", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("baton draft swap: http://127.0.0.1:1: no answer (ConnectError")
    assert said.count("\n") == 1
