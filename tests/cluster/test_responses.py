"""/v1/responses, /tokenize and the documents, with the official client over scripted workers."""

import json

import httpx
import jsonschema
import openai
import pytest
from baton.tests.cluster.router_fakes import ANSWER, MODEL, RunningRouter, Script, encode_chat
from openai.types.responses import Response


@pytest.fixture(scope="module")
def served(tmp_path_factory, model_dir):
    running = RunningRouter(tmp_path_factory.mktemp("run"), model_dir=model_dir)
    script = Script(running.tokenizer.encode(ANSWER))
    running.pair(script)
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def post(served, path, **body):
    return httpx.post(f"{served.url}/{path}", json=body)


def test_a_response_is_one_message_with_its_usage(client):
    made = client.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert made.output_text == ANSWER
    assert (made.status, made.object, made.instructions, made.metadata) == (
        "completed",
        "response",
        "Be brief.",
        {"a": "b"},
    )
    assert (made.temperature, made.store, made.error) == (0.5, False, None)
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.usage.input_tokens_details.cached_tokens == 16
    assert Response.model_validate(made.model_dump()).output[0].role == "assistant"
    again = [{"role": "user", "content": "hi"}, *[item.model_dump() for item in made.output]]
    assert (
        client.responses.create(model=MODEL, input=[*again, {"role": "user", "content": "on"}]).output_text
        == ANSWER
    )


def test_every_answer_has_its_id_in_a_header_by_which_it_is_found(served, client):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    made, talked = client.responses.create(model=MODEL, input="hi"), client.chat.completions.create(**asked)
    streamed = client.responses.with_raw_response.create(model=MODEL, input="hi", stream=True)
    first = next(iter(streamed.parse())).response
    for name, told, prefix in (
        (made.id, made._request_id, "resp_"),
        (talked.id, talked._request_id, "chatcmpl-"),
        (first.id, streamed.request_id, "resp_"),
    ):
        assert name == told
        assert name.startswith(prefix)
        assert httpx.get(f"{served.url}/requests/{name}").json()["id"] == name


def test_an_incomplete_answer_is_marked(client):
    made = client.responses.create(model=MODEL, input="hi", max_output_tokens=3)
    assert (made.status, made.incomplete_details.reason, made.output[0].status) == (
        "incomplete", "max_output_tokens", "incomplete",
    )  # fmt: skip


def test_the_events_of_a_stream_build_the_whole_response(client):
    events = list(
        client.responses.create(
            model=MODEL, input="hi", stream=True, include=["message.output_text.logprobs"]
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert (
        "".join(event.delta for event in events[4:-4])
        == events[-4].text
        == events[-1].response.output_text
        == ANSWER
    )
    assert events[-1].response.usage.output_tokens > 10
    assert len(events[-4].logprobs) == events[-1].response.usage.output_tokens
    assert {event.item_id for event in events[4:-4]} == {events[-1].response.output[0].id}


def test_the_stream_helper_of_the_client_takes_the_events(client):
    with client.responses.stream(model=MODEL, input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == ANSWER


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input",
        ),
        ({"input": "x" * 50_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "input"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=str,
)
def test_unsupported_fields_are_named_as_in_the_responses_api(served, wrong, param):
    reply = post(served, "v1/responses", **({"model": MODEL, "input": "hi"} | wrong))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_an_idempotency_key_repeats_its_answer(served):
    def ask():
        body = {"model": MODEL, "input": "hi", "stream": True}
        return httpx.post(
            served.url + "/v1/responses", json=body, headers={"idempotency-key": "k-responses"}
        ).text

    assert ask() == ask()


def test_tokenize_and_detokenize_are_inverse(served):
    made = post(served, "tokenize", prompt="hello wörld<|im_end|>", return_token_strs=True).json()
    assert made["tokens"] == served.tokenizer.encode("hello wörld<|im_end|>")
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 512)
    assert made["token_strs"][-1] == "<|im_end|>"
    assert post(served, "detokenize", tokens=made["tokens"]).json() == {"prompt": "hello wörld<|im_end|>"}
    chat = [{"role": "user", "content": "hi"}]
    assert post(served, "tokenize", messages=chat).json()["tokens"] == encode_chat(served.tokenizer, chat)
    for path, wrong in (
        ("tokenize", {}),
        ("tokenize", {"prompt": "a", "messages": chat}),
        ("tokenize", {"prompt": "a", "model": "other"}),
        ("detokenize", {"tokens": [10**6]}),
        ("detokenize", {"tokens": [-1]}),
        ("detokenize", {}),
    ):
        assert post(served, path, **wrong).status_code in (400, 404), (path, wrong)


def test_a_chat_with_tools_has_as_many_tokens_as_tokenize_says(served):
    functions = [
        {"name": name, "description": "Looks it up.", "parameters": {"type": "object"}}
        for name in ("look", "see")
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    counts = [
        post(served, "tokenize", **asked, tools=shown).json()["count"]
        for shown in (None, [], tools[:1], tools)
    ]
    told = [
        post(served, "v1/chat/completions", model=MODEL, **asked, tools=shown).json()["usage"][
            "prompt_tokens"
        ]
        for shown in (None, [], tools[:1], tools)
    ]
    assert counts == told
    assert counts[0] == counts[1] < counts[2] < counts[3]
    for wrong in (
        tools * 2,
        [{"type": "web_search"}],
        [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
    ):
        for path, more in (("tokenize", {}), ("v1/chat/completions", {"model": MODEL})):
            reply = post(served, path, **asked, **more, tools=wrong)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools"), reply.text
    assert post(served, "tokenize", prompt="a", tools=tools).json()["error"]["param"] == "tools"
    refused = [{"role": "user", "content": "hi", "audio": {"id": "x"}}]
    assert post(served, "tokenize", messages=refused).json()["error"]["param"] == "messages"


@pytest.mark.parametrize("damaged", ["\xff", "\\ud800", "\n"])
def test_an_invalid_schema_is_a_client_error_in_every_field(served, damaged):
    parameters = {"type": "object", "title": "DAMAGED"}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("look", "see")
    ]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    one = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "look"}}}
    asked = [
        ("tokenize", {"messages": chat["messages"], "tools": tools}),
        (
            "v1/chat/completions",
            chat | one | {"tools": [{"type": "function", "function": {"name": "look"}}, tools[1]]},
        ),
        ("v1/chat/completions", chat | {"tools": tools, "tool_choice": "none"}),
        (
            "v1/chat/completions",
            chat | {"response_format": {"type": "json_schema", "json_schema": {"schema": parameters}}},
        ),
        ("v1/responses", {"model": MODEL, "input": "hi", "tools": flat, "tool_choice": "none"}),
    ]
    for path, body in asked:
        raw = json.dumps(body).encode().replace(b"DAMAGED", damaged.encode("latin-1"))
        reply = httpx.post(f"{served.url}/{path}", content=raw)
        assert reply.status_code == 400, (path, reply.text)


def test_the_document_and_its_page_are_served(served):
    document = httpx.get(served.url + "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path, ways in document["paths"].items():
        for method in ways:
            reply = httpx.request(method, served.url + path.replace("{model}", MODEL), content=b"")
            assert reply.status_code != 404 or "{id}" in path, path
    page = httpx.get(served.url + "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text


TOLD = [
    (
        "v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "n": 2},
    ),
    ("v1/completions", {"prompt": ["hi", "ho"], "logprobs": 2, "return_token_ids": True}),
    ("v1/responses", {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
]


@pytest.mark.parametrize(("path", "body"), TOLD, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("is_stream", [False, True])
def test_answers_and_errors_match_the_document(served, path, body, is_stream):
    document = httpx.get(served.url + "/openapi.json").json()
    answers = document["paths"][f"/{path}"]["post"]["responses"]

    def check(value, schema):
        jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)

    headers = {"x-baton-timeline": "1"}
    reply = httpx.post(
        f"{served.url}/{path}", json={"model": MODEL, "stream": is_stream, **body}, headers=headers
    )
    told = answers["200"]["content"][reply.headers["content-type"].partition(";")[0]]["schema"]
    if not is_stream:
        check(reply.json(), told)
        with pytest.raises(jsonschema.ValidationError):
            check({**reply.json(), "object": 3}, told)
    else:
        events = [
            dict(line.split(": ", 1) for line in event.splitlines())
            for event in reply.text.split("\n\n")
            if event
        ]
        data = told["properties"]["data"]
        inner = data.get("anyOf", [data])[-1]["contentSchema"]
        assert len(events) > 5
        for event in events:
            check(event, told)
            if event["data"] != "[DONE]":
                check(json.loads(event["data"]), inner)
        assert (events[-1]["data"] == "[DONE]") is (path != "v1/responses")
    check(
        post(served, path, model="other", **body).json(),
        answers["404"]["content"]["application/json"]["schema"],
    )


def test_a_field_unknown_to_an_older_worker_is_not_sent_to_it(start):
    running, script = start()
    running.pair(script, takes=())
    body = {"model": MODEL, "prompt": "hi"}
    assert post(running, "v1/completions", **body).status_code == 200
    for young in (
        {"min_tokens": 2},
        {"echo": True, "logprobs": 1},
        {"response_format": {"type": "json_object"}},
    ):
        reply = post(running, "v1/completions", **body, **young)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1"), reply.text
