"""Real processes that draft by lookup: with a prefill worker that knows no drafts, and aggregated."""

import shutil

import pytest
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import at_once, complete, serving, status

VOCAB = 330
SHARED = [11, 12, 13, 14] * 12
PROMPTS = [SHARED, [*SHARED, 20, 21], [7], [31, 32] * 9]
LENGTH = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory, toy_checkpoint):
    directory = tmp_path_factory.mktemp("lookup")
    shutil.copytree(toy_checkpoint("llama", vocab_size=VOCAB), directory, dirs_exist_ok=True)
    return save_tokenizer(directory)


@pytest.fixture(scope="module")
def answers(model):
    with serving(model, kv_memory_mb=32, threads=1) as plain:
        return [complete(plain, ids, max_tokens=LENGTH)[0] for ids in PROMPTS]


LOOKUP = {"spec_steps": 4, "ngram_min": 1, "ngram_max": 3, "kv_memory_mb": 32, "threads": 1}


@pytest.mark.parametrize(
    "settings", [{}, {"prefill": 0, "aggregated": True}], ids=["handed over", "aggregated"]
)
def test_a_cluster_that_drafts_by_lookup_answers_as_one_without_drafts(model, answers, settings):
    with serving(model, "ngram", **LOOKUP, **settings) as cluster:
        alone = [complete(cluster, ids, max_tokens=LENGTH) for ids in PROMPTS]
        assert [ids for ids, _ in alone] == answers
        jobs = [lambda ids=ids: complete(cluster, ids, max_tokens=LENGTH)[0] for ids in PROMPTS * 2]
        together = at_once(jobs, 8)
        assert together == answers * 2, "side by side, and from the prefix cache"
        details = [answer["usage"]["draft_tokens_details"] for _, answer in alone]
        assert sum(found["accepted_tokens"] for found in details) > 0
        choices = complete(cluster, PROMPTS[0], max_tokens=LENGTH, n=2)[1]["choices"]
        assert [choice["token_ids"] for choice in choices] == [answers[0]] * 2
        workers = status(cluster)["workers"]
        assert {worker["role"]: worker["feature_width"] for worker in workers}["decode"] == 0
        assert all(worker["draft_widths"]["steps"] == 4 for worker in workers if worker["role"] == "decode")
