"""A real cluster with graphs: the tokens of transformers, from replays."""

from dataclasses import replace
from functools import partial

import httpx
import pytest
from baton.tests.cluster.serving import at_once, complete, serving, status, wait_until
from baton.tests.parity.test_cluster_tokens import assert_same

pytestmark = pytest.mark.smollm2

NUM_TOKENS = 32


def test_with_graphs_the_cluster_serves_the_tokens_of_transformers(reference_greedy, smollm2_dir, eagle3_dir):
    whole = [r for r in reference_greedy.values() if len(r.prompt_ids) < 100][:3]
    references = [replace(r, output_ids=r.output_ids[:NUM_TOKENS]) for r in whole]
    with serving(smollm2_dir, eagle3_dir, chunk_size=64, max_running=2, graphs="on") as cluster:
        workers = {worker["role"]: worker["graphs"] for worker in status(cluster)["workers"]}
        assert workers["prefill"]["prefill"] > 0
        assert all(count == 0 for kind, count in workers["prefill"].items() if kind != "prefill"), workers
        assert workers["decode"]["prefill"] == 0, workers
        assert all(workers["decode"][kind] > 0 for kind in ("verify", "decode", "draft_prefill")), workers
        answers = at_once(
            [partial(complete, cluster, r.prompt_ids, max_tokens=NUM_TOKENS) for r in references], 3
        )
        same = [assert_same(r, ids) for r, (ids, _) in zip(references, answers, strict=True)]
        assert sum(same) >= len(same) - 1, "more ties than real text has"
        timelines = [document["timeline"] for _, document in answers]
        assert 1 + sum(t["accepted"] for t in timelines) / sum(t["verify_steps"] for t in timelines) > 1.5

        def replays_are_reported() -> bool:
            text = httpx.get(f"{cluster.url}/metrics").text
            replays = [
                line for line in text.splitlines() if line.startswith("baton_worker_graph_replays_total{")
            ]
            kinds = ("target_prefill", "decode_step", "draft_prefill")
            return all(any(f'kind="{kind}"' in line for line in replays) for kind in kinds)

        wait_until(replays_are_reported, 60, "replays in /metrics")
