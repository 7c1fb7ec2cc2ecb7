"""Every prefill worker is dead: real decode workers compute the prompts, and the client's tokens do not change."""

import os
import signal
import threading

import pytest
from baton.tests.cluster.serving import complete, serving, status, wait_until

pytestmark = pytest.mark.smollm2


def prefill_workers(cluster):
    return [worker for worker in status(cluster)["workers"] if worker["role"] == "prefill"]


def test_prompts_are_served_without_a_prefill_worker_and_by_it_again_once_it_is_back(
    smollm2_dir, eagle3_dir, reference_greedy
):
    references = [r for r in reference_greedy.values() if 64 < len(r.prompt_ids) < 200][:2]
    assert len(references) == 2, "prompts of several chunks that are quickly computed"
    with serving(smollm2_dir, eagle3_dir, prefill=1, decode=1, chunk_size=64, kv_memory_mb=512) as cluster:
        expected = [complete(cluster, r.prompt_ids, max_tokens=24)[0] for r in references[:1]]
        running = []
        stream = threading.Thread(
            target=lambda: running.append(complete(cluster, references[0].prompt_ids, max_tokens=200)[0])
        )
        stream.start()
        wait_until(lambda: status(cluster)["router"]["running"], 60, "the stream runs")
        old = prefill_workers(cluster)[0]["instance"]
        os.kill(next(child.pid for child in cluster.children if child.role == "prefill"), signal.SIGKILL)
        wait_until(lambda: not prefill_workers(cluster), 60, "the death is seen")
        answers = [complete(cluster, r.prompt_ids, max_tokens=24) for r in references]
        stream.join()
        assert [ids for ids, _ in answers][:1] == expected
        assert [ids for ids, _ in answers] == [list(r.output_ids[:24]) for r in references]
        assert running[0][:24] == expected[0]
        local = [document["timeline"]["local_prefill"] for _, document in answers]
        assert local[0], "the first one at least found no prefill worker"
        assert status(cluster)["router"]["events"]["local_prefill"] >= sum(local)
        back = wait_until(lambda: [w for w in prefill_workers(cluster) if w["state"] == "serving"], 120, "a restart")
        assert back[0]["instance"] != old
        assert not complete(cluster, references[1].prompt_ids, max_tokens=4)[1]["timeline"]["local_prefill"]
