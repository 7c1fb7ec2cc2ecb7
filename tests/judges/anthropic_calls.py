"""Typed calls of Anthropic's official client over everything that /v1/messages serves.

Where a loop of calls and results shall come to its end, the answers are told (`SAY:`).
"""

import asyncio
import json
import sys

import anthropic
from call_groups import make_all

URL, MODEL, SAYING_URL, SAYING_MODEL = sys.argv[1:5]
CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
SAYING = anthropic.Anthropic(base_url=SAYING_URL, api_key="none", max_retries=0, timeout=60)
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def turn(text):
    return {"role": "user", "content": text}


def call_of(city):
    return f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': city}})}\n</tool_call>"


def say(text, **more):
    return SAYING.messages.create(
        **{"model": SAYING_MODEL, "max_tokens": 200, "messages": [turn(f"SAY:{text}")]} | more
    )


def ask(**more):
    return CLIENT.messages.create(**{"model": MODEL, "max_tokens": 20, "messages": [turn("hello")]} | more)


def whole():
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}  # newer models of Anthropic take none
    made = say("hello world", system="Be brief.", metadata={"user_id": "u"}, extra_body=sampling)
    assert (made.content[0].text, made.stop_reason, made.role) == ("hello world", "end_turn", "assistant")
    assert made.usage.output_tokens > 0
    blocks = [{"type": "text", "text": "SAY:two blocks", "cache_control": {"type": "ephemeral"}}]
    assert say("", messages=[turn(blocks)]).content[0].text == "two blocks"


def ends():
    assert ask(max_tokens=3).stop_reason == "max_tokens"
    made = say("one two three", stop_sequences=["two"])
    assert (made.stop_reason, made.stop_sequence, made.content[0].text) == ("stop_sequence", "two", "one ")


def streams():
    with SAYING.messages.stream(
        model=SAYING_MODEL, max_tokens=200, messages=[turn("SAY:hello wide world")]
    ) as stream:
        assert "".join(stream.text_stream) == "hello wide world"
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == ("hello wide world", "end_turn")
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens > 0
    kinds = [event.type for event in say("hello world", stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert {"ping", "content_block_start", "content_block_stop", "message_delta"} <= {
        event for event in raw_events()
    }


def raw_events():
    """The names of the events, pings included, which the client swallows."""
    with SAYING.messages.with_streaming_response.create(
        model=SAYING_MODEL, max_tokens=20, messages=[turn("SAY:hello")], stream=True
    ) as response:
        lines = list(response.iter_lines())
    return [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]


def tool_loop():
    """Two parallel calls, their results, and the answer; whole and streamed."""
    told = turn("SAY:" + call_of("Rome") + "\n" + call_of("Oslo"))
    for made in (say("", messages=[told], tools=[TOOL]), streamed(messages=[told], tools=[TOOL])):
        assert made.stop_reason == "tool_use"
        uses = [block for block in made.content if block.type == "tool_use"]
        assert [use.input["city"] for use in uses] == ["Rome", "Oslo"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "SAY:sunny"} for use in uses]
        again = say(
            "", messages=[told, {"role": "assistant", "content": made.content}, turn(results)], tools=[TOOL]
        )
        assert again.content[0].text == "sunny"


def streamed(**more):
    asked = {"model": SAYING_MODEL, "max_tokens": 200} | more
    with SAYING.messages.stream(**asked) as stream:
        return stream.get_final_message()


def tool_choices():
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        made = ask(tools=[TOOL], tool_choice=choice, max_tokens=400)
        assert made.content[0].type == "tool_use", made
    assert all(b.type == "text" for b in ask(tools=[TOOL], tool_choice={"type": "none"}).content)


def runner():
    """The client's own loop of calls and results."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return f"SAY:sunny in {city}"

    loop = SAYING.beta.messages.tool_runner(
        model=SAYING_MODEL, max_tokens=200, tools=[weather], messages=[turn("SAY:" + call_of("Rome"))]
    )
    assert loop.until_done().content[0].text == "sunny in Rome"


def schemas():
    schema = {"type": "object", "properties": {"kind": {"enum": ["red", "green"]}}, "required": ["kind"]}
    form = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    made = ask(output_config=form, max_tokens=60)
    assert json.loads(made.content[0].text)["kind"] in ("red", "green")


def thinking():
    made = say("hello", thinking={"type": "enabled", "budget_tokens": 1024})
    assert made.content[0].text == "hello"
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    turns = [turn("hi"), {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}]
    assert say("", messages=[*turns, turn("SAY:on")]).content[0].text == "on"


def counts():
    asked = {"model": MODEL, "messages": [turn("hello")], "system": "Be brief.", "tools": [TOOL]}
    usage = CLIENT.messages.create(**asked, max_tokens=2).usage
    counted = CLIENT.messages.count_tokens(**asked).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def refusal_of(wrong, error):
    try:
        ask(**wrong)
    except error as told:
        return told
    raise AssertionError(f"{wrong} was served")


def errors():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    for wrong, error, kind in (
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [turn([image])]}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
    ):
        told = refusal_of(wrong, error)
        assert (told.body["type"], told.body["error"]["type"]) == ("error", kind), told.body
        assert told.request_id, "no request-id"
    assert ask()._request_id


def leaving():
    with CLIENT.messages.stream(model=MODEL, max_tokens=400, messages=[turn("hello")]) as stream:
        next(iter(stream))
    assert ask().content


def at_once():
    async def work():
        async with anthropic.AsyncAnthropic(base_url=SAYING_URL, api_key="none", max_retries=0) as client:
            asked = {"model": SAYING_MODEL, "max_tokens": 99}
            return await asyncio.gather(
                *[client.messages.create(**asked, messages=[turn(f"SAY:number {i}")]) for i in range(8)]
            )

    assert [made.content[0].text for made in asyncio.run(work())] == [f"number {i}" for i in range(8)]


def models():
    found = CLIENT.models.list()
    assert [model.id for model in found] == [MODEL]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


CALLS = (
    whole, ends, streams, tool_loop, tool_choices, runner, schemas, thinking, counts, errors, leaving,
    at_once, models,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(make_all(CALLS, "calls"))
