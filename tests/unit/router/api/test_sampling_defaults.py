"""The sampling of a model's generation_config.json, for the fields that a request leaves out."""

import json

import pytest
from baton.cluster.errors import StartupError
from baton.router.api.body_checks import parse_body, sampling_of
from baton.router.api.body_types import ChatBody, CompletionBody
from baton.router.api.response_bodies import ResponseBody, chat_of, told_of
from baton.router.api.sampling_defaults import FILE, SamplingDefaults, load_sampling_defaults

QWEN = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.6,
    "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
}  # fmt: skip
BODIES = {
    ChatBody: {"messages": [{"role": "user", "content": "hi"}]},
    CompletionBody: {"prompt": "hi"},
    ResponseBody: {"input": "hi"},
}


def loaded(tmp_path, content):
    (tmp_path / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return load_sampling_defaults(str(tmp_path))


def filled(defaults, kind, **more):
    body = parse_body(json.dumps(BODIES[kind] | more).encode(), kind)
    defaults.fill(body)
    return body


def sampling(body):
    return sampling_of(chat_of(body) if isinstance(body, ResponseBody) else body, max_new=4, choice=0)


@pytest.mark.parametrize("kind", BODIES)
def test_the_file_fills_what_a_request_leaves_out(tmp_path, kind):
    defaults = loaded(tmp_path, QWEN | {"repetition_penalty": 1.05, "min_p": 0.1, "max_new_tokens": 2048})
    made = sampling(filled(defaults, kind))
    assert (made.temperature, made.top_p) == (0.6, 0.95)
    if kind is not ResponseBody:
        assert (made.top_k, made.min_p, made.repetition_penalty) == (20, 0.1, 1.05)
    assert made.max_new_tokens == 4
    assert defaults.max_new_tokens == 2048
    mine = sampling(filled(defaults, kind, temperature=0, top_p=1))
    assert (mine.temperature, mine.top_p) == (0.0, 1.0)


def test_a_response_tells_the_sampling_that_was_used(tmp_path):
    told = told_of(filled(loaded(tmp_path, QWEN), ResponseBody))
    assert (told.temperature, told.top_p) == (0.6, 0.95)


def test_a_model_whose_file_has_no_sampling_has_no_defaults(tmp_path):
    assert load_sampling_defaults(str(tmp_path)) == SamplingDefaults()
    defaults = loaded(tmp_path, {"eos_token_id": 2, "temperature": None})
    assert defaults.given == {}
    assert sampling(filled(defaults, ChatBody)).temperature == 1.0


@pytest.mark.parametrize("content", ["{", "[]", {"temperature": "hot"}, {"top_p": 1.5}, {"top_k": -7}])
def test_a_file_that_cannot_be_used_ends_the_start_in_one_line(tmp_path, content):
    with pytest.raises(StartupError, match="--generation-config none") as caught:
        loaded(tmp_path, content)
    assert "\n" not in str(caught.value)
