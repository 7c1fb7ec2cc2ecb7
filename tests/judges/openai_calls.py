"""The openai client's typed calls over every feature that is served; run with the judges' interpreter."""

import json
import sys

import openai
from call_groups import make_all
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
CLIENT = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=120)
MESSAGES = [{"role": "user", "content": "hello world"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}


class Paint(BaseModel):
    """What a parsed answer becomes."""

    ok: bool
    number: bool


def chat(**more):
    return CLIENT.chat.completions.create(
        **{"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 60} | more
    )


def complete(**more):
    return CLIENT.completions.create(**{"model": MODEL, "prompt": "hello", "max_tokens": 12} | more)


def respond(**more):
    return CLIENT.responses.create(**{"model": MODEL, "input": "hello", "max_output_tokens": 60} | more)


def models():
    assert [model.id for model in CLIENT.models.list()] == [MODEL]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


def chat_whole():
    reply = chat(
        n=2,
        seed=1,
        temperature=0.7,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={"5": -1},
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def chat_content_parts():
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    one, two = chat(temperature=0), chat(temperature=0, messages=[{"role": "user", "content": parts}])
    assert one.choices[0].message.content == two.choices[0].message.content


def chat_stream():
    chunks = list(chat(stream=True, seed=2, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == chat(seed=2).choices[0].message.content
    )


def chat_logprobs():
    tokens = chat(logprobs=True, top_logprobs=3, seed=3).choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 3 and token.bytes is not None for token in tokens)


def chat_stop():
    text = chat(seed=4, temperature=0).choices[0].message.content
    mark = text[3:5]
    reply = chat(seed=4, temperature=0, stop=[mark])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.content == text[: text.index(mark)]


def chat_json_schema():
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    document = json.loads(chat(response_format=wanted).choices[0].message.content)
    assert set(document) == {"kind", "ok"}


def chat_parse():
    reply = CLIENT.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Paint)
    assert isinstance(reply.choices[0].message.parsed, Paint)


def chat_tools():
    for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
        reply = chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_completion_tokens=200)
        call = reply.choices[0].message.tool_calls[0]
        assert set(json.loads(call.function.arguments)) == {"kind", "ok"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    assert chat(
        messages=[*MESSAGES, reply.choices[0].message, result], tools=[TOOL], tool_choice="none"
    ).choices
    assert chat(tools=[TOOL], tool_choice="auto").choices


def chat_stream_helper():
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 200}
    with CLIENT.chat.completions.stream(
        **asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.name == "paint"


def chat_ignored():
    assert chat(
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        reasoning_effort="low",
        verbosity="low",
    ).id


def extra_fields():
    """Fields of vLLM and SGLang, as their users give them to this client."""
    words = ["red", "green"]
    for body in ({"guided_choice": words}, {"regex": "red|green"}, {"structured_outputs": {"choice": words}}):
        assert chat(extra_body=body).choices[0].message.content in words
        assert complete(extra_body=body).choices[0].text in words
        assert respond(extra_body=body).output_text in words
    body = {"cache_salt": "x", "min_tokens": 8, "truncate_prompt_tokens": 4, "repetition_penalty": 1.1}
    made = chat(extra_body=body).usage
    assert made.completion_tokens >= 8
    assert made.prompt_tokens == 4
    assert made.draft_tokens_details["drafted_tokens"] >= made.draft_tokens_details["accepted_tokens"]


def completions_whole():
    assert len(complete(prompt=["a", "b"], n=2).choices) == 4
    ids = complete(prompt=[5, 6, 7], extra_body={"return_token_ids": True, "top_k": 5, "min_p": 0.01})
    assert len(ids.choices[0].token_ids) == ids.usage.completion_tokens


def completions_echo():
    choice = complete(echo=True, logprobs=2, max_tokens=1).choices[0]
    assert choice.text.startswith("hello")
    assert choice.logprobs.token_logprobs[0] is None
    assert (
        len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(choice.logprobs.top_logprobs)
    )
    assert complete(echo=True, max_tokens=0).choices[0].text == "hello"


def completions_best_of():
    assert len(complete(best_of=3, n=2, seed=1).choices) == 2


def completions_stream():
    text = "".join(chunk.choices[0].text for chunk in complete(stream=True, seed=5))
    assert text == complete(seed=5).choices[0].text


def responses_whole():
    made = respond(instructions="Be brief.", metadata={"a": "b"}, temperature=0)
    assert made.usage.total_tokens > 0
    again = [{"role": "user", "content": "hello"}, *made.output, {"role": "user", "content": "on"}]
    assert respond(input=again).output


def responses_stream():
    with CLIENT.responses.stream(model=MODEL, input="hello", max_output_tokens=20) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def responses_parse():
    assert isinstance(
        CLIENT.responses.parse(model=MODEL, input="hello", text_format=Paint).output_parsed, Paint
    )


def responses_tools():
    tool = {"type": "function", **TOOL["function"]}
    made = respond(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200)
    assert made.output[0].type == "function_call"
    output = {"type": "function_call_output", "call_id": made.output[0].call_id, "output": "done"}
    assert respond(input=[{"role": "user", "content": "hello"}, *made.output, output], tools=[tool]).output


def refusal_of(wrong, error):
    try:
        chat(**wrong)
    except error as told:
        return told
    return None


def errors():
    for wrong, error in (
        ({"model": "other"}, openai.NotFoundError),
        ({"n": 0}, openai.BadRequestError),
        ({"audio": {"voice": "x", "format": "wav"}}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"extra_body": {"num_ctx": 1}}, openai.BadRequestError),
    ):
        told = refusal_of(wrong, error)
        assert told is not None, f"{wrong} was served"
        assert told.code


def leaving():
    with chat(stream=True, max_completion_tokens=400) as stream:
        next(iter(stream))
    assert chat().choices


CALLS = (
    models, chat_whole, chat_content_parts, chat_stream, chat_logprobs, chat_stop, chat_json_schema,
    chat_parse, chat_tools,
    chat_stream_helper, chat_ignored, extra_fields, completions_whole, completions_echo, completions_best_of,
    completions_stream,
    responses_whole, responses_stream, responses_parse, responses_tools, errors, leaving,
)  # fmt: skip


def main():
    return make_all(CALLS, "typed calls")


if __name__ == "__main__":
    sys.exit(main())
