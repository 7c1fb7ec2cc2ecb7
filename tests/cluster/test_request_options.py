"""Fields of vLLM and SGLang over real HTTP, with scripted workers: what reaches a worker, what comes back."""

import json

import httpx
import pytest
from baton.cluster.protocol.messages import Reserve
from baton.router.api.sampling_defaults import SamplingDefaults
from baton.tests.cluster.router_fakes import ANSWER, RunningRouter, Script, encode_chat, until

HI = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "Hello, this is"}
QWEN = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=9)
PATHS = {
    "chat/completions": {"messages": [HI]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory, model_dir):
    made = RunningRouter(
        tmp_path_factory.mktemp("run"),
        model_dir=model_dir,
        unknown_fields="ignore",
        sampling_defaults=QWEN,
    )
    made.prefill, made.decode = made.pair(Script(made.tokenizer.encode(ANSWER)))
    yield made
    made.close()


def post(running, path, **more):
    reply = httpx.post(f"{running.url}/v1/{path}", json=PATHS[path] | more, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply


def error_of(running, path, **more):
    reply = httpx.post(f"{running.url}/v1/{path}", json=PATHS[path] | more, timeout=30)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def order_of(running, path, **more):
    """The order that decode gets."""
    before = len(running.decode.of(Reserve))
    post(running, path, **more)
    return until(lambda: running.decode.of(Reserve)[before:], "a Reserve arrived")[-1]


def text_of(running, ids):
    return running.tokenizer.decode(ids)


def test_the_last_message_is_continued_and_echoed(running):
    more = {"messages": [HI, SAID], "continue_final_message": True, "max_tokens": 200}
    order = order_of(running, "chat/completions", **more)
    assert text_of(running, order.prompt_ids).endswith("<|im_start|>assistant\nHello, this is")
    message = post(running, "chat/completions", **more, echo=True).json()["choices"][0]["message"]
    assert message["content"] == SAID["content"] + ANSWER
    with httpx.stream(
        "POST", f"{running.url}/v1/chat/completions", json=more | {"echo": True, "stream": True}
    ) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == SAID["content"] + ANSWER


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True, "messages": [HI, {"role": "assistant"}]}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: <[1]>"}}, "structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_served_are_named(running, more, param):
    assert error_of(running, "chat/completions", **more)["param"] == param


def test_without_a_generation_prompt_nothing_follows_the_messages(running):
    order = order_of(running, "chat/completions", add_generation_prompt=False)
    assert text_of(running, order.prompt_ids).endswith("hi<|im_end|>\n")
    asked = {"messages": [HI], "add_generation_prompt": False}
    reply = httpx.post(f"{running.url}/tokenize", json=asked).json()
    assert reply["tokens"] == order.prompt_ids


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_prompt_is_cut_to_its_last_tokens(running, path):
    long = (
        {"prompt": "hello world " * 100}
        if path == "completions"
        else {"messages": [HI | {"content": "hello world " * 100}]}
    )
    whole = order_of(running, path, **long, max_tokens=5).prompt_ids
    assert order_of(running, path, **long, truncate_prompt_tokens=7).prompt_ids == whole[-7:]
    assert order_of(running, path, **long, truncate_prompt_tokens=5000).prompt_ids == whole
    longer = (
        {"prompt": "hello world " * 400}
        if path == "completions"
        else {"messages": [HI | {"content": "hello world " * 400}]}
    )
    assert error_of(running, path, **longer)["code"] == "context_length_exceeded"
    fitting = order_of(running, path, **longer, truncate_prompt_tokens=-1, max_tokens=12)
    assert len(fitting.prompt_ids) == 512 - 12


@pytest.mark.parametrize("path", PATHS)
def test_a_salt_separates_cached_prefixes_of_one_tenant(running, path):
    plain, one, same, other = (
        order_of(running, path, **more).salt
        for more in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"})
    )
    assert plain == ""
    assert one == same
    assert len({plain, one, other}) == 3
    assert "a" * 64 not in one


def test_ids_of_prompt_and_answer_are_returned(running):
    chat = post(running, "chat/completions", return_token_ids=True, max_tokens=200).json()
    assert chat["prompt_token_ids"] == encode_chat(running.tokenizer, [HI])
    texts = {"prompt": ["hello", "world"], "n": 2, "return_token_ids": True}
    choices = post(running, "completions", **texts).json()["choices"]
    wanted = [running.tokenizer.encode(text) for text in ("hello", "hello", "world", "world")]
    assert [choice["prompt_token_ids"] for choice in choices] == wanted
    for path in ("chat/completions", "completions"):
        asked = PATHS[path] | {"return_token_ids": True, "stream": True, "max_tokens": 200}
        with httpx.stream("POST", f"{running.url}/v1/{path}", json=asked) as reply:
            events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
        told = [e for e in events if "prompt_token_ids" in e or "prompt_token_ids" in e["choices"][0]]
        assert told == events[:1], "once, in the first chunk"
    assert "prompt_token_ids" not in post(running, "chat/completions").text


def test_logprobs_name_tokens_by_their_ids(running):
    asked = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
    choice = post(running, "completions", **asked).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert "token_id:4" in choice["logprobs"]["top_logprobs"][0]


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_string_is_kept_on_request(running, name):
    for more, wanted in (({}, "Hello "), ({name: True}, "Hello wörld")):
        choice = post(running, "completions", stop="wörld", max_tokens=200, **more).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")


@pytest.mark.parametrize("path", PATHS)
def test_sampling_comes_from_the_request_then_from_the_model(running, path):
    made = order_of(running, path).sampling
    assert (made.temperature, made.top_k, made.top_p) == (0.6, 20, 0.95)
    assert made.max_new_tokens == (16 if path == "completions" else QWEN.max_new_tokens)
    length = "max_output_tokens" if path == "responses" else "max_tokens"
    mine = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0.2, length: 12, "stop_token_ids": [5]}
    made = order_of(running, path, **mine, ignore_eos=True, repetition_penalty=1.1).sampling
    assert (made.temperature, made.top_k, made.top_p, made.min_p) == (0, 0, 1, 0.2)
    assert (made.max_new_tokens, made.stop_token_ids, made.ignore_eos) == (12, [5], True)
    assert made.repetition_penalty == 1.1


@pytest.mark.parametrize("path", PATHS)
def test_constraints_reach_the_workers_as_grammars(running, path):
    for more, words in (
        ({"guided_choice": ["yes", "no"]}, 'CHOICE: \\"yes\\" | \\"no\\"'),
        ({"guided_regex": "[ab]+"}, "/[ab]+/"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, '\\"x\\"'),
        ({"guided_json": {"type": "object", "properties": {"a": {}}}}, '"additionalProperties": false'),
    ):
        assert words in order_of(running, path, **more).sampling.grammar


@pytest.mark.parametrize("path", PATHS)
def test_ignored_fields_are_listed_in_a_header(running, path):
    reply = post(running, path, num_ctx=4096, mirostat=2)
    assert reply.headers["x-baton-ignored-fields"] == "num_ctx, mirostat"
    assert "x-baton-ignored-fields" not in post(running, path).headers
    assert error_of(running, path, num_ctx=1, temperature="hot")["param"] == "temperature"


def test_each_name_of_the_model_is_taken_and_answers_have_the_first(start):
    running, script = start(served_model="tiny,org/tiny")
    running.pair(script)
    ask = {"messages": [HI], "max_tokens": 2}
    for name in ("tiny", "org/tiny"):
        assert post(running, "chat/completions", **ask, model=name).json()["model"] == "tiny"
        assert httpx.get(f"{running.url}/v1/models/{name}").json()["id"] == name
    unknown = httpx.post(f"{running.url}/v1/chat/completions", json=ask | {"model": "org"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    cards = httpx.get(f"{running.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "org/tiny"]
