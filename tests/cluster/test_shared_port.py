"""Several routers behind one port: each serves, and one that dies takes nothing of the others."""

import os
import signal

import httpx
import pytest
from baton.tests.cluster.serving import complete, random_ids, serving, status, wait_until


def routers(cluster):
    return [child for child in cluster.children if child.role == "router"]


@pytest.mark.slow
def test_two_routers_share_a_port_and_the_workers_and_one_that_dies_is_not_missed(served_dir):
    with serving(served_dir, prefill=1, decode=1, kv_memory_mb=8, threads=1, routers=2) as cluster:
        pids = {child.pid for child in routers(cluster)}
        seen = set()
        wait_until(lambda: seen.add(status(cluster)["router"]["pid"]) or seen == pids, 30, "both answer")
        prompt = random_ids(40, 330, seed=3)
        texts = {tuple(complete(cluster, prompt, max_tokens=8)[0]) for _ in range(12)}
        assert len(texts) == 1
        victim = routers(cluster)[1].pid
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: routers(cluster)[1].pid != victim, 30, "the death is seen")
        for _ in range(8):
            assert httpx.get(f"{cluster.url}/health", timeout=10).status_code == 200
        assert tuple(complete(cluster, prompt, max_tokens=8)[0]) in texts
        wait_until(lambda: seen.add(status(cluster)["router"]["pid"]) or len(seen) == 3, 60, "another one answers")
