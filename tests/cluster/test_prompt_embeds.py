"""Prompt embeddings over real processes: equal to token ids, also behind a kill; refused where off."""

import os
import signal
from functools import partial

import httpx
import pytest
import torch
from baton.cluster.protocol.messages import YOUNG_FIELDS, PromptEmbeds
from baton.tests.cluster.router_fakes import BODY, assert_nothing_left, save_tokenizer
from baton.tests.cluster.serving import (
    at_once,
    complete,
    served_model,
    serving,
    sse_events,
    status,
    wait_free,
)
from baton.tests.embeds import embeds_text
from baton.tests.parity.conftest import few_references
from baton.tests.parity.eagle3_toys import write_oracle
from safetensors.torch import load_file

PROMPT = [11, 12, 13, 14, 31, 32, 33, 9, 8, 7, 21, 22, 23, 5, 6, 47, 48, 49, 50, 51, 52, 53, 39]
LENGTH = 150
SMALL = {"kv_memory_mb": 32, "threads": 1, "chunk_size": 16, "prompt_embeds": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target whose drafts are always right, with a tokenizer, and its head."""
    target, head = write_oracle(tmp_path_factory.mktemp("oracle"))
    return save_tokenizer(target), head


@pytest.fixture(scope="module")
def table(models):
    return load_file(models[0] / "model.safetensors")["model.embed_tokens.weight"]


def ask(cluster, ids, table, **more):
    """(ids, the whole answer) of the embeddings of `ids`."""
    text = embeds_text(table[ids])
    return complete(cluster, [], **{"prompt": "", "prompt_embeds": text, "max_tokens": LENGTH} | more)


def refusal(cluster, **body):
    body = {"model": served_model(cluster), "max_tokens": 4} | body
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    return answer.status_code, answer.json()["error"]["message"]


def kill_decode_of_the_stream(cluster):
    """Whether a decode worker had a room and was killed."""
    workers = [worker for worker in status(cluster)["workers"] if worker["role"] == "decode"]
    busy = [worker["pid"] for worker in workers if worker["placed"]]
    for pid in busy:
        os.kill(pid, signal.SIGKILL)
    return bool(busy)


@pytest.mark.parametrize(
    "settings", [{"decode": 2}, {"prefill": 0, "decode": 2, "aggregated": True}], ids=["handed over", "alone"]
)
def test_embeddings_are_answered_as_their_ids_also_behind_a_kill(models, table, settings):
    with serving(*models, **SMALL, **settings) as cluster:
        wanted = complete(cluster, PROMPT, max_tokens=LENGTH)[0]
        found, answer = ask(cluster, PROMPT, table)
        usage = answer["usage"]
        assert found == wanted
        assert usage["prompt_tokens"] == len(PROMPT)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "pages of the ids are others"
        assert usage["draft_tokens_details"]["accepted_tokens"] > LENGTH / 2
        both = ask(cluster, PROMPT, table, n=2, prompt=[PROMPT, PROMPT])[1]
        assert [choice["token_ids"] for choice in both["choices"]] == [wanted] * 6
        assert at_once([lambda: ask(cluster, PROMPT, table)[0]] * 6, 6) == [wanted] * 6
        body = {
            "model": served_model(cluster), "prompt_embeds": embeds_text(table[PROMPT]), "temperature": 0,
            "max_tokens": LENGTH, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        streamed, is_killed = [], False
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as response:
            for event in sse_events(response):
                assert "error" not in event, event
                streamed += [token for choice in event["choices"] for token in choice["token_ids"]]
                is_killed = is_killed or kill_decode_of_the_stream(cluster)
        assert is_killed
        assert streamed == wanted
        wait_free(cluster)


@pytest.mark.smollm2
def test_smollm2_without_drafts_and_prefill_answers_as_transformers(smollm2_dir, smollm2_tokenizer):
    table = load_file(smollm2_dir / "model.safetensors")["model.embed_tokens.weight"].float()
    references = few_references(smollm2_dir, smollm2_tokenizer, ("capital", "haiku"))
    settings = {"prefill": 0, "aggregated": True, "local_prefill_tokens": 16, "prompt_embeds": True}
    with serving(smollm2_dir, **settings) as cluster:
        jobs = [partial(ask, cluster, each.prompt_ids, table, max_tokens=24) for each in references]
        assert [ids for ids, _ in at_once(jobs, 2)] == [each.output_ids[:24] for each in references]


HOOKLESS = {"takes": YOUNG_FIELDS[:-1], "embeds_fault": "ToyModel takes no input_embeds"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "start the router and all workers with --prompt-embeds"),
        ({"prompt_embeds": True}, "ToyModel takes"),
    ],
    ids=["off by default", "a model without the hook"],
)
def test_embeddings_that_nobody_takes_are_refused(start, settings, told):
    running, script = start(**settings)
    for worker in running.pair(script, **HOOKLESS):
        assert worker.of(PromptEmbeds) == []
    body = {"model": BODY["model"], "prompt_embeds": embeds_text(torch.ones(3, 5))}
    reply = httpx.post(running.url + "/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_embeds")
    assert told in reply.json()["error"]["message"]
    assert_nothing_left(running)


def test_wrong_embeddings_are_told_what_to_do_and_harm_nobody(models, table):
    width = table.shape[1]
    with serving(*models, **SMALL | {"prompt_embeds_mb": 1, "max_body_mb": 8}) as cluster:
        for wrong, told in (
            (embeds_text(torch.ones(3, 5)), f"this model takes [tokens, {width}]"),
            (embeds_text(torch.full((3, width), float("nan"))), "is not finite at [0, 0]"),
            ("UEsDBA" + "A" * 42, "never read"),
            (embeds_text(torch.ones(1 << 19, 1)), "--prompt-embeds-mb"),
            (embeds_text(torch.ones(300, width, dtype=torch.bfloat16), torch.bfloat16), "at most 255 fit"),
        ):
            code, message = refusal(cluster, prompt_embeds=wrong)
            assert (code, told in message) == (400, True), message
        assert ask(cluster, PROMPT, table)[0] == complete(cluster, PROMPT, max_tokens=LENGTH)[0]
        wait_free(cluster)
