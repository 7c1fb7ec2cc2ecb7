"""Real processes hand over pages of latents (DeepSeek-V3): the answers of transformers, with experts and
drafts, behind cached prefixes, and over lost workers.
"""

import base64
import os
import signal

import httpx
import numpy as np
import pytest
import torch
from baton.engine.runner.expert_counts import NAME
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import (
    GreedyStream,
    at_once,
    complete,
    instances,
    random_ids,
    serving,
    status,
    wait_free,
    wait_until,
)
from baton.tests.parity.test_latent_mtp import LAYERS, Toy
from baton.tests.parity.toy_models import reference_logits, reference_model
from prometheus_client.parser import text_string_to_metric_families

VOCAB, NUM_MODULES, NUM_TOKENS = 330, 2, 40
TOP_K, DENSE = 3, 1  # experts of a token; the first layer has none
SETTINGS = {
    "kv_memory_mb": 16,
    "threads": 1,
    "chunk_size": 48,
    "graphs": "on",
    "local_prefill": False,
    "return_routed_experts": True,
    "count_experts": True,
    "spec_adaptive": "off",
}
HALF = random_ids(60, VOCAB, seed=9)
PROMPTS = [[7], random_ids(45, VOCAB, seed=1), HALF + HALF[:40], random_ids(300, VOCAB, seed=2)]


@pytest.fixture(scope="module")
def toy(toy_checkpoint, tmp_path_factory):
    whole = toy_checkpoint("deepseek_v3", num_hidden_layers=LAYERS + NUM_MODULES, vocab_size=VOCAB)
    made = Toy.of(whole, tmp_path_factory.mktemp("latents"), NUM_MODULES)
    save_tokenizer(made.target)
    return made


@pytest.fixture(scope="module")
def reference(toy):
    return reference_model(toy.target)


def assert_would_say(reference, prompt, tokens, count=NUM_TOKENS):
    """Each token is the likeliest one behind those before it."""
    assert len(tokens) == count
    logits = reference_logits(reference, [*prompt, *tokens[:-1]])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


def experts_by(reference, ids):
    """By transformers: the sorted experts of each of `ids` in layers with experts, `[T, L, K]`."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, out: found.append(out))
        for layer in reference.model.layers[DENSE:]
    ]
    reference_logits(reference, ids)
    for hook in hooks:
        hook.remove()
    chosen = [next(x for x in out if not x.is_floating_point()).view(-1, TOP_K) for out in found]
    return torch.stack(chosen, dim=1).sort(dim=2).values.numpy()


def experts_in(document):
    data = base64.b64decode(document["choices"][0]["sgl_ext"]["routed_experts"])
    return np.frombuffer(data, "<i4").reshape(-1, LAYERS, TOP_K)


def assert_are_counted(cluster, least):
    """/metrics has the rows of each expert, of workers of both roles: at least `least` of all layers.

    Returns them by role and event.
    """
    found: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}

    def are_reported():
        for family in text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics").text):
            for sample in family.samples:
                if sample.labels.get("event", "").startswith(NAME):
                    found[sample.labels["role"]][sample.labels["event"]] = sample.value
        return sum(sum(of.values()) for of in found.values()) >= least

    wait_until(are_reported, 30, f"{least} rows of experts in /metrics")
    for of in found.values():
        assert sum(of.values()) % (TOP_K * (LAYERS - DENSE)) == 0, "each row has its experts in all layers"
        assert sum(count > 0 for count in of.values()) > TOP_K, "all rows have the same experts"
    return found


DRAFTS = {
    "plain": {"no_draft": True},
    "lookup": {"draft": "ngram", "spec_steps": 3, "ngram_min": 1},
    "modules": {"spec_steps": NUM_MODULES},
}


@pytest.mark.parametrize("transports", ["shm,zmq_blocks", pytest.param("zmq_blocks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", DRAFTS)
def test_answers_and_experts_are_those_of_transformers(toy, reference, kind, transports):
    settings = dict(DRAFTS[kind])
    draft = settings.pop("draft", "" if "no_draft" in settings else toy.draft)
    with serving(toy.target, draft, transports=transports, **SETTINGS, **settings) as cluster:
        for is_cached in (False, True):
            asked = [
                lambda ids=ids: complete(cluster, ids, max_tokens=NUM_TOKENS, return_routed_experts=True)
                for ids in PROMPTS
            ]
            for prompt, (tokens, document) in zip(PROMPTS, at_once(asked, 4), strict=True):
                assert_would_say(reference, prompt, tokens)
                assert not document["timeline"]["local_prefill"]
                assert document["timeline"]["handoff_bytes"] > 0 or is_cached
                told = experts_in(document)
                assert (told[:, :DENSE] == -1).all()
                expected = experts_by(reference, [*prompt, *tokens[:-1]])
                assert (np.sort(told[:, DENSE:], axis=2) == expected).all()
            if not is_cached:
                rows = sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
                assert_are_counted(cluster, rows * TOP_K * (LAYERS - DENSE))
        tokens, document = complete(cluster, PROMPTS[3], max_tokens=NUM_TOKENS, n=2)
        assert [choice["token_ids"] for choice in document["choices"]] == [tokens] * 2
        assert_would_say(reference, PROMPTS[3], tokens)
        assert document["usage"]["prompt_tokens_details"]["cached_tokens"] >= 288
        details = document["usage"]["draft_tokens_details"]
        assert (details["drafted_tokens"] > 0) == (kind != "plain")
        wait_free(cluster)


@pytest.mark.slow
def test_workers_of_two_ranks_tell_and_count_the_experts_of_one(toy, reference):
    found = {}
    for name, flags in {"one": {}, "cut": {"tp": 2}, "whole": {"tp": 2, "ep": True}}.items():
        with serving(toy.target, "", no_draft=True, **SETTINGS, **flags) as cluster:
            said = [
                complete(cluster, prompt, max_tokens=NUM_TOKENS, return_routed_experts=True)
                for prompt in PROMPTS
            ]
            rows = sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
            counts = assert_are_counted(cluster, rows * TOP_K * (LAYERS - DENSE))
            found[name] = [(tokens, experts_in(document).tolist()) for tokens, document in said], counts
    for prompt, (tokens, told) in zip(PROMPTS, found["one"][0], strict=True):
        assert_would_say(reference, prompt, tokens)
        expected = experts_by(reference, [*prompt, *tokens[:-1]])
        assert (np.sort(told, axis=2)[:, DENSE:] == expected).all()
    assert found["cut"] == found["one"]
    assert found["whole"] == found["one"]


@pytest.mark.parametrize("kind", ["lookup", pytest.param("modules", marks=pytest.mark.slow)])
def test_answers_survive_a_killed_worker_of_either_role(toy, reference, kind):
    settings = dict(DRAFTS[kind])
    draft = settings.pop("draft", toy.draft)
    with serving(toy.target, draft, prefill=2, decode=2, **SETTINGS, **settings) as cluster:
        for role in ("decode", "prefill"):
            before = instances(cluster)
            streams = [GreedyStream(cluster, prompt, 300) for prompt in (*PROMPTS[1:3], *PROMPTS[1:3])]
            wait_until(lambda: any(len(stream.ids) > 20 for stream in streams), 60, "tokens")  # noqa: B023
            pids = {worker["pid"]: worker["instance"] for worker in status(cluster)["workers"]}
            victim = next(child for child in cluster.children if child.name == f"{role}-0")
            lost = pids[victim.pid]
            os.kill(victim.pid, signal.SIGKILL)
            for stream in streams:
                stream.join()
            for prompt, stream in zip((*PROMPTS[1:3], *PROMPTS[1:3]), streams, strict=True):
                assert stream.error is None
                assert_would_say(reference, prompt, stream.ids, 300)
            assert lost in before
            wait_until(lambda: len(instances(cluster) - {lost}) == 4, 120, "four workers")  # noqa: B023
            wait_free(cluster)
