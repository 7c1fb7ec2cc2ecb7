"""Answers under grammars with a real vocabulary: SmolLM2 over HTTP, with EAGLE3 chains and trees and without.

A cluster without drafts answers whole, the others stream the same answers: every one validates, and neither
drafts nor streaming change a token or a character of it. Where a token differs, both must be as good within
float32 noise.
"""

import json
import re
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from baton.kernels.noise import gumbel
from baton.tests.cluster.serving import at_once, served_model, serving, sse_events
from baton.tests.parity.json_schemas import NARROW, WIDE, schemas

pytestmark = pytest.mark.smollm2

SHAPES = {"chain": {}, "tree": {"spec_topk": 2, "spec_tokens": 8}}
TIE = 1e-3  # as in the tests of served tokens; noise and log probabilities are exact besides
WIDTH = 8  # requests at once
QUICK_TOKENS, SLOW_TOKENS, MOST_TOKENS = 128, 256, 4096
CUT = 5  # tokens
NUM_PARTS = 4  # of the slow tests, each of which has at most
MOST_CUT, MOST_TIES = 4, 2
COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["rouge foncé", "青", "<|im_end|>"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
ODD = {
    "type": "array",
    "prefixItems": [{"const": "<|im_end|>"}, {"type": "string", "pattern": "^[一-龥]{3}$"}],
    "items": False,
    "minItems": 2,
}
PAINT = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": COLOURS}}
UNFINISHED = re.compile(r"(t(ru?)?|f(a(ls?)?)?|n(ul?)?|-|\.|[eE][+-]?|\\u?[0-9a-fA-F]{0,4})?")


@dataclass(frozen=True)
class Job:
    """A chat, and the schema of what comes."""

    schema: dict[str, Any]
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    text: str  # or the arguments of the call
    ids: list[int]
    logprobs: list[float]
    finish: str
    num_prompt: int
    timeline: dict[str, Any]


def job_of(schema, number, **body):
    wanted = {"type": "json_schema", "json_schema": {"name": "wanted", "schema": schema, "strict": True}}
    messages = said(f"Write record {number} of a shop as JSON.")
    return Job(
        schema, {"response_format": wanted, "messages": messages, "seed": number, "temperature": 0, **body}
    )


def said(text):
    return [{"role": "user", "content": text}]


def ask(cluster, job, *, is_streamed=False, **more):
    body = {
        "model": served_model(cluster),
        "return_token_ids": True,
        "logprobs": True,
        "max_tokens": QUICK_TOKENS,
    }
    body |= (
        job.body | more | ({"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {})
    )
    address, told = f"{cluster.url}/v1/chat/completions", {"x-baton-timeline": "1"}
    with httpx.stream("POST", address, json=body, timeout=600, headers=told) as response:
        assert response.status_code == 200, (response.read(), body)
        documents = list(sse_events(response)) if is_streamed else [json.loads(response.read())]
    choices = [choice for document in documents for choice in document["choices"]]
    said = [choice["delta" if is_streamed else "message"] for choice in choices]
    calls = [call for part in said for call in part.get("tool_calls") or ()]
    return Answer(
        text="".join(
            [part.get("content") or "" for part in said] + [call["function"]["arguments"] for call in calls]
        ),
        ids=[token for choice in choices for token in choice.get("token_ids", ())],
        logprobs=[
            token["logprob"]
            for choice in choices
            if choice["logprobs"]
            for token in choice["logprobs"]["content"]
        ],
        finish=choices[-1]["finish_reason"],
        num_prompt=documents[-1]["usage"]["prompt_tokens"],
        timeline=documents[-1]["timeline"],
    )


def answers_of(cluster, jobs, **more):
    return at_once([partial(ask, cluster, job, **more) for job in jobs], WIDTH)


def begins_json(text):
    """Whether JSON may begin like this."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated") or UNFINISHED.fullmatch(text[error.pos :]) is not None
    return True


def assert_follows(job, answer):
    if answer.finish == "length":
        assert begins_json(answer.text), answer
        return
    assert answer.finish == ("tool_calls" if "tools" in job.body else "stop")
    jsonschema.validate(json.loads(answer.text), job.schema)


def assert_same(job, answer, other):
    """The same tokens and text, or a split at a proven tie with equal scores. True: the same."""
    for i, (token, another) in enumerate(zip(answer.ids, other.ids, strict=False)):
        if token != another:
            scores = [score(job, one, i) for one in (answer, other)]
            assert scores[0] == pytest.approx(scores[1], abs=TIE), (
                f"token {i} is {token} or {another}: {answer} {other}"
            )
            return False
    assert (answer.ids, answer.text, answer.finish) == (other.ids, other.text, other.finish)
    return True


def score(job, answer, i):
    """The score of the token at `i`: its log probability, and at temperature 1 the noise at its position."""
    if not job.body["temperature"]:
        return answer.logprobs[i]
    place, token = answer.num_prompt + i, torch.tensor([answer.ids[i]])
    return answer.logprobs[i] + gumbel(torch.tensor([job.body["seed"]]), torch.tensor([place]), token).item()


def assert_drafts_are_heard(answers):
    steps, drafted, accepted = (
        sum(answer.timeline[name] or 0 for answer in answers)
        for name in ("verify_steps", "drafted", "accepted")
    )
    assert 0 < accepted < drafted
    assert steps < sum(len(answer.ids) for answer in answers), "fewer steps than tokens"


def quick_jobs():
    """Some of everything; the last one is the first, and is cut."""
    asked = [*schemas(2, seed=4, kind=NARROW), *schemas(2, seed=15, kind=WIDE), ODD]
    jobs = [job_of(schema, i, temperature=i % 2) for i, schema in enumerate(asked)]
    free = {"response_format": {"type": "json_object"}, "messages": said("The capital of France, as JSON?")}
    called = {"tools": [PAINT], "tool_choice": {"type": "function", "function": {"name": "paint"}}}
    called |= {"messages": said("Paint the walls."), "seed": 5}
    others = [Job({"type": "object"}, free | {"temperature": 0}), Job(COLOURS, called | {"temperature": 1})]
    return [*jobs, *others, job_of(asked[0], 0, max_tokens=CUT)]


@pytest.fixture(scope="module")
def plain(smollm2_dir):
    with serving(smollm2_dir, kv_memory_mb=768) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=SHAPES)
def drafting(request, smollm2_dir, eagle3_dir):
    with serving(smollm2_dir, eagle3_dir, kv_memory_mb=768, **SHAPES[request.param]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(plain):
    """The answers of quick_jobs without drafts."""
    return answers_of(plain, quick_jobs())


def test_answers_follow_their_schemas(expected):
    for job, answer in zip(quick_jobs(), expected, strict=True):
        assert_follows(job, answer)
    *whole, cut = expected
    assert [answer.finish for answer in whole].count("length") == 0
    assert (cut.finish, cut.ids) == ("length", whole[0].ids[:CUT])
    assert not any(answer.timeline["drafted"] for answer in expected)
    assert all(begins_json(answer.text[:i]) for answer in whole for i in range(len(answer.text)))


def test_drafts_and_streaming_change_no_token_and_no_character(expected, drafting):
    answers = answers_of(drafting, quick_jobs(), is_streamed=True)
    for job, answer, other in zip(quick_jobs(), answers, expected, strict=True):
        assert_same(job, answer, other)
    assert_drafts_are_heard(answers)


def slow_jobs(part):
    """Every fourth of 200, half of them wide, and half of either greedy."""
    asked = [*schemas(100, seed=11, kind=NARROW), *schemas(100, seed=12, kind=WIDE)]
    jobs = [job_of(schema, i, temperature=i // NUM_PARTS % 2) for i, schema in enumerate(asked)]
    return jobs[part::NUM_PARTS]


@pytest.fixture(scope="module")
def all_expected(plain):
    """The answers of slow_jobs without drafts."""
    return cache(lambda part: answers_of(plain, slow_jobs(part), max_tokens=SLOW_TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_200_answers_follow_their_schemas(plain, all_expected, part):
    """Those that were cut are the beginnings of answers that do."""
    jobs, answers = slow_jobs(part), all_expected(part)
    for job, answer in zip(jobs, answers, strict=True):
        assert_follows(job, answer)
    cut = [i for i, answer in enumerate(answers) if answer.finish == "length"]
    assert len(cut) <= MOST_CUT
    longer = answers_of(plain, [jobs[i] for i in cut], max_tokens=MOST_TOKENS)
    for i, answer in zip(cut, longer, strict=True):
        assert (answer.finish, answer.ids[:SLOW_TOKENS]) == ("stop", answers[i].ids)
        assert_follows(jobs[i], answer)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_drafts_and_streaming_change_none_of_200_answers(all_expected, drafting, part):
    jobs = slow_jobs(part)
    answers = answers_of(drafting, jobs, is_streamed=True, max_tokens=SLOW_TOKENS)
    same = [assert_same(*each) for each in zip(jobs, answers, all_expected(part), strict=True)]
    assert same.count(False) <= MOST_TIES
    for job, answer in zip(jobs, answers, strict=True):
        assert_follows(job, answer)
    assert_drafts_are_heard(answers)
