"""The requests that Open WebUI 0.12.4 makes of an OpenAI-compatible connection, by its own HTTP client.

They are taken from its source: `routers/openai.py` (models, chats, responses, checks of a connection),
`routers/tasks.py` (titles, tags, follow-ups), `utils/middleware.py` (tool loops, reasoning sent back). The
answers are told (`SAY:`).
"""

import asyncio
import json
import sys

import aiohttp
from call_groups import make_all

URL, MODEL = sys.argv[1:3]
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": "Bearer none",
    "HTTP-Referer": "https://openwebui.com/",
    "X-Title": "Open WebUI",
    "X-OpenWebUI-User-Name": "A%20B",
    "X-OpenWebUI-User-Id": "u",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def asked(path, payload=None):
    """The status and the text of one request, made as Open WebUI makes it."""

    async def ask():
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(trust_env=True, timeout=timeout) as session:
            if payload is None:
                made = session.get(f"{URL}/v1{path}", headers=HEADERS)
            else:
                made = session.request("POST", f"{URL}/v1{path}", data=json.dumps(payload), headers=HEADERS)
            async with made as response:
                return response.status, response.headers["content-type"], await response.text()

    return asyncio.run(ask())


def chat(said, **more):
    """The chunks of a streamed chat: its deltas, and its usage."""
    payload = {
        "stream": True,
        "model": MODEL,
        "messages": said if isinstance(said, list) else [{"role": "user", "content": said}],
        "stream_options": {"include_usage": True},
    }
    status, kind, text = asked("/chat/completions", payload | more)
    assert (status, kind.partition(";")[0]) == (200, "text/event-stream"), text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return deltas, next(chunk["usage"] for chunk in chunks if chunk.get("usage"))


def content(deltas):
    return "".join(delta.get("content") or "" for delta in deltas)


def connection_check():
    status, _, text = asked("/models")
    [model] = json.loads(text)["data"]
    assert (status, model["id"], model["object"]) == (200, MODEL, "model")
    assert model["owned_by"] != "ollama"


def streamed_chats():
    deltas, usage = chat("SAY:hello world")
    assert content(deltas) == "hello world"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def chats_with_parameters():
    """Those that its settings of a model have; max_completion_tokens arrives as max_tokens."""
    more = {
        "temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 40, "max_tokens": 100, "seed": 1,
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["world"], "logit_bias": {"5": -10},
        "reasoning_effort": "medium",
    }  # fmt: skip
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "SAY:hello world"}]
    assert content(chat(said, **more)[0]) == "hello "


def titles_and_tags():
    payload = {"model": MODEL, "messages": [{"role": "user", "content": "SAY:a title"}], "stream": False}
    status, _, text = asked("/chat/completions", payload | {"max_tokens": 1000})
    assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "a title")


def tool_loops():
    said = [{"role": "user", "content": f"SAY:{CALL}"}]
    deltas, _ = chat(said, tools=[TOOL])
    calls = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        call = calls.setdefault(
            part["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.get("id") or call.get("id")
        call["function"]["name"] += part["function"].get("name") or ""
        call["function"]["arguments"] += part["function"].get("arguments") or ""
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Rome"}
    assistant = {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **calls[0]}]}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "SAY:sunny"}
    assert content(chat([*said, assistant, result], tools=[TOOL])[0]) == "sunny"


def reasoning_sent_back():
    """In the field of llama.cpp, or as tags inside of the text."""
    for said in (
        {"role": "assistant", "content": "yes", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "<think>Hm.</think>\nyes"},
    ):
        turns = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "SAY:on"}]
        assert content(chat(turns)[0]) == "on"


def continued_answers():
    """The button Continue: the last message is the assistant's."""
    turns = [{"role": "user", "content": "SAY:hello"}, {"role": "assistant", "content": "I say"}]
    assert chat(turns)[0]
    assert chat(turns, continue_final_message=True, add_generation_prompt=False)[0]


def responses():
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "SAY:hello world"}]},
    ]
    payload = {"model": MODEL, "stream": True, "input": items, "instructions": "Be brief."}
    status, _, text = asked("/responses", payload)
    assert (status, text.count("event: response.completed")) == (200, 1)
    assert '"text":"hello world"' in text


def images_are_refused_in_one_line():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    payload = {"model": MODEL, "messages": [{"role": "user", "content": [image]}], "stream": True}
    status, kind, text = asked("/chat/completions", payload)
    assert (status, kind) == (400, "application/json")
    assert "text" in json.loads(text)["error"]["message"]


def embeddings_are_a_clean_404():
    status, _, text = asked("/embeddings", {"model": MODEL, "input": "hi"})
    assert (status, json.loads(text)["error"]["code"]) == (404, "not_found")


CALLS = (
    connection_check, streamed_chats, chats_with_parameters, titles_and_tags, tool_loops, reasoning_sent_back,
    continued_answers, responses, images_are_refused_in_one_line, embeddings_are_a_clean_404,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(make_all(CALLS, "requests"))
