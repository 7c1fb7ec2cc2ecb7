"""Writes tools as text into the prompt, for chat templates without a known form of tool calls
(`formats/registry`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..api.tool_bodies import CLOSE, OPEN

ChatMessage = dict[str, Any]

EXPLAINED = (
    "You may call these functions, of which each line describes one by its name, "
    "its purpose and a JSON schema of its "
    "arguments:\n{tools}\n\nTo call a function, write exactly this, with its name and its arguments:\n"
    f'{OPEN}\n{{{{"name": "...", "arguments": {{{{...}}}}}}}}\n{CLOSE}\n'
    "What it returns is told to you in <tool_response> marks."
)


def written_out(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The chat with tools, calls and results as plain text in system, user and assistant messages."""
    written = [_written(message) for message in messages]
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    explained = EXPLAINED.format(tools=lines)
    if written and written[0]["role"] == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{explained}"}, *written[1:]]
    return [{"role": "system", "content": explained}, *written]


def _written(message: ChatMessage) -> ChatMessage:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    return {**kept, "content": "\n".join([content, *calls] if content else calls)} if calls else kept


def _call(function: Mapping[str, Any]) -> str:
    called = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(called, ensure_ascii=False)}\n{CLOSE}"
