"""One small cluster with the real model and its drafter: the part of the cluster tests that `make test` runs.

One prefill and one decode process serve a chat, a stream and the tokens of transformers, and survive a kill.
"""

import os
import signal
from functools import partial

import httpx
import pytest
from baton.tests.cluster.serving import (
    at_once,
    complete,
    pages_held,
    served_model,
    serving,
    sse_events,
    status,
    wait_until,
)
from baton.tests.embeds import embeds_text
from baton.tests.parity.conftest import few_references
from safetensors.torch import load_file

pytestmark = [pytest.mark.smollm2, pytest.mark.smoke]

NUM_TOKENS = 24
PROMPTS = ("capital", "haiku", "bug")


@pytest.fixture(scope="module")
def cluster(smollm2_dir, eagle3_dir):
    with serving(smollm2_dir, eagle3_dir, chunk_size=64, prompt_embeds=True) as running:
        yield running


@pytest.fixture(scope="module")
def references(smollm2_dir, smollm2_tokenizer):
    return few_references(smollm2_dir, smollm2_tokenizer, PROMPTS)


def chat(cluster, **more):
    """The body of a chat request whose answer is short."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    return {
        "model": served_model(cluster), "messages": question, "temperature": 0, "max_tokens": 32, **more
    }  # fmt: skip


def pids(cluster, role):
    return [worker["pid"] for worker in status(cluster)["workers"] if worker["role"] == role]


def greedy(cluster, references):
    """The served continuation of each prompt, all prompts at once."""
    jobs = [partial(complete, cluster, r.prompt_ids, max_tokens=NUM_TOKENS) for r in references]
    return at_once(jobs, len(jobs))


def test_greedy_tokens_equal_those_of_transformers(cluster, references):
    expected = [reference.output_ids[:NUM_TOKENS] for reference in references]
    answers = greedy(cluster, references)
    assert [ids for ids, _ in answers] == expected
    timelines = [document["timeline"] for _, document in answers]
    accepted, steps = (sum(t[key] for t in timelines) for key in ("accepted", "verify_steps"))
    assert 1 + accepted / steps > 1.25, "the mean accept length of these prompts is 1.48"
    assert all(timeline["handoff_bytes"] > 0 for timeline in timelines)


def test_embeddings_of_the_ids_are_answered_as_the_ids(cluster, references, smollm2_dir):
    table = load_file(smollm2_dir / "model.safetensors")["model.embed_tokens.weight"]
    reference = min(references, key=lambda each: len(each.prompt_ids))
    text = embeds_text(table[reference.prompt_ids].float())
    ids, answer = complete(cluster, [], prompt="", prompt_embeds=text, max_tokens=NUM_TOKENS)
    assert ids == reference.output_ids[:NUM_TOKENS]
    accepted, steps = (answer["timeline"][key] for key in ("accepted", "verify_steps"))
    assert 1 + accepted / steps > 1.25, "drafts read the embeddings of the prompt"


def test_a_chat_is_answered_and_its_stream_has_the_same_text(cluster):
    url = f"{cluster.url}/v1/chat/completions"
    choice = httpx.post(url, json=chat(cluster)).json()["choices"][0]
    assert choice["message"]["content"].startswith("The capital of France is Paris")
    assert choice["finish_reason"] == "stop"
    with httpx.stream("POST", url, json=chat(cluster, stream=True)) as response:
        deltas = [c["delta"] for event in sse_events(response) for c in event["choices"]]
    assert len(deltas) > 3
    assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]


def test_a_killed_prefill_worker_changes_no_token_and_is_replaced(cluster, references):
    """The open stream goes on, the next prompt is computed on decode, and a new process takes the place."""
    (victim,) = pids(cluster, "prefill")
    longest = max(references, key=lambda reference: len(reference.prompt_ids))
    body = {
        "model": served_model(cluster), "prompt": longest.prompt_ids, "temperature": 0, "ignore_eos": True,
        "max_tokens": len(longest.output_ids), "stream": True, "return_token_ids": True,
    }  # fmt: skip
    streamed, is_killed = [], False
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
        for event in sse_events(response):
            assert "error" not in event, event
            streamed += [token for choice in event["choices"] for token in choice["token_ids"]]
            if len(streamed) > 8 and not is_killed:  # decode has the whole prompt
                os.kill(victim, signal.SIGKILL)
                is_killed = True
    assert streamed == longest.output_ids
    wait_until(lambda: victim not in pids(cluster, "prefill"), 60, "the death is seen")
    expected = [reference.output_ids[:NUM_TOKENS] for reference in references]
    assert [ids for ids, _ in greedy(cluster, references)] == expected
    wait_until(lambda: pids(cluster, "prefill"), 60, "a restart")


def test_afterwards_no_page_is_held(cluster):
    wait_until(lambda: not any(pages_held(cluster)[0].values()), 60, "every page free again")
