"""Workers change their roles under load, by `baton role`: no request fails, and no token changes."""

import itertools
import os

import pytest
from baton.deploy.cli import role
from baton.tests.cluster.serving import complete, random_ids, serving, status, wait_until
from baton.tests.cluster.test_rolling_restart import Load

NUM_TOKENS = 12


def served(cluster):
    """The PIDs of serving workers by role."""
    found = {"prefill": set(), "decode": set()}
    for worker in status(cluster)["workers"]:
        if worker["state"] == "serving":
            found[worker["role"]].add(worker["pid"])
    return found


@pytest.mark.slow
def test_roles_change_under_load_and_no_request_fails(served_dir, capfd, monkeypatch):
    monkeypatch.setenv("BATON_API_KEY", "")
    settings = {"prefill": 2, "decode": 2, "kv_memory_mb": 16, "threads": 1, "canary_s": 10.0}
    with serving(served_dir, **settings) as cluster:
        prompts = [random_ids(20 + 5 * i, 330, seed=i) for i in range(24)]
        answers = [(prompt, complete(cluster, prompt, max_tokens=NUM_TOKENS)[0]) for prompt in prompts]
        load, before = Load(cluster, answers), served(cluster)
        try:
            for source, target in (("decode", "prefill"), ("prefill", "decode"), ("prefill", "decode")):
                done, pid = len(load.done), min(served(cluster)[source])
                wait_until(lambda done=done: len(load.done) >= done + 30, 60, "requests pass")
                code = role.main([str(pid), target, "--url", cluster.url, "--drain-s", "3"])
                assert code == 0, capfd.readouterr().err[-2000:]
                now = served(cluster)
                assert pid in now[target]
                assert pid not in now[source]
            code = role.main([str(min(served(cluster)["prefill"])), "decode", "--url", cluster.url])
            assert code == 1
            assert "is the only prefill worker" in capfd.readouterr().err
            done = len(load.done)
            wait_until(lambda: len(load.done) >= done + 30, 60, "requests pass")
        finally:
            load.close()
        assert load.wrong == []
        events = status(cluster)["router"]["events"]
        assert events.get("worker_lost", 0) == 0
        moves = status(cluster)["router"]["role_changes"]
        assert [move["state"] for move in moves] == ["done"] * 3
        seconds = [move["seconds"] for move in moves]
        print(f"{len(load.done)} requests, role changes took {seconds} s")
        assert set(itertools.chain(*before.values())) == set(itertools.chain(*served(cluster).values()))
        assert all(os.path.exists(f"/proc/{pid}") for pid in itertools.chain(*before.values()))
