"""Conversations of real processes whose prefill worker pulls what decode generated, and those without."""

from itertools import pairwise

import httpx
import pytest
from baton.tests.cluster.serving import complete, serving, status

ANSWER, TURNS = 40, 3
PAGE = 16
SAMPLED = {"temperature": 0.9, "seed": 7}
FOLLOWING = [11, 42, 9, 88, 105, 3]
TEXT = (
    "The city of Basel lies where the Rhine turns north, on the borders of three countries. Its oldest "
    "houses stand on a hill above the river, and its university is older than most of them. Please tell me "
)
TOY = [7, 80, 33, 150, 9, 212, 41, 5, 18, 99, 120, 61, 3, 77, 240, 14, 15, 16, 200, 31]


def conversation(cluster, prompt, **body):
    """The (tokens, document) of each turn; every prompt continues with the answer before it."""
    said, ids = [], list(prompt)
    for _ in range(TURNS):
        said.append(complete(cluster, ids, max_tokens=ANSWER, **body))
        ids += said[-1][0] + FOLLOWING
    return said


def pulled(cluster):
    """(tokens that prefill pulled, tokens that decode offered, misses) of its workers."""
    workers = {worker["role"]: worker["counters"] for worker in status(cluster)["workers"]}
    misses = sum(count for name, count in workers["prefill"].items() if name.startswith("pull_misses"))
    return workers["prefill"]["pulled_tokens"], workers["decode"]["offered_tokens"], misses


def assert_turns_are_pulled(turns):
    """Turns from the second on have pulled what decode generated, and say so."""
    for (_, before), (_, document) in pairwise(turns):
        usage, timeline = document["usage"], document["timeline"]
        generated = ANSWER + PAGE  # the tokens, and a part of a page that the answer's first tokens filled
        assert generated - 2 * PAGE < timeline["pulled_tokens"] <= generated, timeline
        assert usage["prompt_tokens_details"]["cached_tokens"] == timeline["cached_tokens"]
        assert timeline["cached_tokens"] > before["usage"]["prompt_tokens"] + ANSWER - 2 * PAGE
        assert 0 < timeline["pull_ms"] < timeline["ttft_ms"]


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "shape", [pytest.param({}, id="chain"), pytest.param({"spec_topk": 2}, id="tree", marks=pytest.mark.slow)]
)
def test_the_real_model_says_the_same_behind_pulled_prefixes(
    smollm2_dir, eagle3_dir, smollm2_tokenizer, shape
):
    prompts = [smollm2_tokenizer(TEXT + what).input_ids for what in ("what it trades.", "who lives there.")]
    answers = {}
    for mode in ("always", "off"):
        with serving(smollm2_dir, eagle3_dir, chunk_size=64, prefix_pulls=mode, **shape) as cluster:
            greedy, sampled = conversation(cluster, prompts[0]), conversation(cluster, prompts[1], **SAMPLED)
            answers[mode] = [ids for ids, _ in greedy + sampled]
            if mode == "off":
                assert pulled(cluster) == (0, 0, 0)
                continue
            assert_turns_are_pulled(greedy)
            assert_turns_are_pulled(sampled)
            tokens, offered, misses = pulled(cluster)
            assert 0 < tokens < offered, "decode offers whole prefixes, and prefill has their beginnings"
            assert misses == 0
            metrics = httpx.get(f"{cluster.url}/metrics", timeout=60).text
            assert "pulled_tokens" in metrics
    assert answers["always"] == answers["off"]


@pytest.mark.parametrize("transports", ["shm,zmq_blocks", "zmq_blocks"])
def test_a_cluster_with_keys_pulls_prefixes_over_each_transport(served_dir, shared_keys, transports):
    answers = {}
    for mode in ("always", "off"):
        settings = {"keys": str(shared_keys), "transports": transports, "kv_memory_mb": 8, "threads": 1}
        with serving(served_dir, prefix_pulls=mode, **settings) as cluster:
            turns = conversation(cluster, TOY)
            answers[mode] = [ids for ids, _ in turns]
            if mode == "always":
                assert_turns_are_pulled(turns)
    assert answers["always"] == answers["off"]


def test_decode_that_offers_nothing_is_never_asked(served_dir):
    with serving(served_dir, prefix_pulls="always", offer_prefixes=False, kv_memory_mb=8) as cluster:
        turns = conversation(cluster, TOY)
        assert all(document["timeline"]["pulled_tokens"] == 0 for _, document in turns)
        assert pulled(cluster) == (0, 0, 0)
