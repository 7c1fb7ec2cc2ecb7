"""The content blocks of /v1/messages, and their translation to chat messages.

A user's turn may hold results of tools and text: each result becomes a message of its own. An assistant's
turn with text, calls and thinking becomes one message.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct

from ..errors import bad_request, printable
from .body_types import RequestMessage, Unread
from .field_errors import UNREADABLE, unreadable
from .tool_bodies import CalledFunction, ToolCall

NO_TEXT = ("image", "document")


class TextBlock(Struct, forbid_unknown_fields=True):
    """Text."""

    text: str
    type: Literal["text"] = "text"
    cache_control: Unread = UNSET
    citations: Unread = UNSET


class ThinkingBlock(Struct, forbid_unknown_fields=True):
    """Reasoning of an earlier answer."""

    thinking: str
    type: Literal["thinking"] = "thinking"
    signature: Unread = UNSET


class RedactedThinkingBlock(Struct, forbid_unknown_fields=True):
    """Encrypted reasoning of another server; ignored."""

    type: Literal["redacted_thinking"]
    data: Unread = UNSET


class ToolUseBlock(Struct, forbid_unknown_fields=True):
    """A call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Raw]
    type: Literal["tool_use"] = "tool_use"
    cache_control: Unread = UNSET
    caller: Unread = UNSET


class ToolResultBlock(Struct, forbid_unknown_fields=True):
    """The result of a call."""

    tool_use_id: str
    type: Literal["tool_result"] = "tool_result"
    content: str | list[Raw] | None = None
    is_error: bool | None = None
    cache_control: Unread = UNSET


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
OF_ASSISTANT: Mapping[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
}
OF_USER: Mapping[str, type[Block]] = {"text": TextBlock, "tool_result": ToolResultBlock}
TEXT_ONLY: Mapping[str, type[Block]] = {"text": TextBlock}
DECODERS = {kind: msgspec.json.Decoder(kind) for kind in (*OF_ASSISTANT.values(), *OF_USER.values())}
Content = str | list[Raw]


class _Typed(Struct):
    """The type of any block."""

    type: str


TYPE_OF = msgspec.json.Decoder(_Typed)


def text_of(content: Content | None, where: str) -> str:
    """The text of content that may be text only. Raises ApiError (400), which names the block at fault."""
    blocks = _blocks_of(content or "", TEXT_ONLY, where)
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def messages_of_user(content: Content, where: str) -> list[RequestMessage]:
    """The chat messages of a user's turn. Raises ApiError (400)."""
    messages: list[RequestMessage] = []
    for number, block in enumerate(_blocks_of(content, OF_USER, where)):
        if isinstance(block, ToolResultBlock):
            text = text_of(block.content, f"{where}[{number}].content")
            messages.append(RequestMessage("tool", text, tool_call_id=block.tool_use_id))
        elif isinstance(block, TextBlock):
            if messages and messages[-1].role == "user":
                messages[-1].content = messages[-1].text + block.text
            else:
                messages.append(RequestMessage("user", block.text))
    return messages or [RequestMessage("user", "")]


def message_of_assistant(content: Content, where: str) -> RequestMessage:
    """The chat message of an assistant's turn. Raises ApiError (400)."""
    text, thoughts, calls = "", "", []
    for block in _blocks_of(content, OF_ASSISTANT, where):
        if isinstance(block, TextBlock):
            text += block.text
        elif isinstance(block, ThinkingBlock):
            thoughts += block.thinking
        elif isinstance(block, ToolUseBlock):
            arguments = msgspec.json.encode(block.input).decode()
            calls.append(ToolCall(block.id, CalledFunction(block.name, arguments)))
    message = RequestMessage("assistant", text or (None if calls else ""), tool_calls=calls or None)
    if thoughts:
        message.reasoning_content = Raw(msgspec.json.encode(thoughts))
    return message


def _blocks_of(content: Content, kinds: Mapping[str, type[Block]], where: str) -> Sequence[Block]:
    if isinstance(content, str):
        return [TextBlock(content)]
    return [_block_of(raw, kinds, f"{where}[{number}]") for number, raw in enumerate(content)]


def _block_of(raw: Raw, kinds: Mapping[str, type[Block]], where: str) -> Block:
    """Parses a block by its type. An unsupported type is reported as such, whatever its fields are."""
    try:
        kind = TYPE_OF.decode(raw).type
        if kind not in kinds:
            remedy = "; this model reads text only" if kind in NO_TEXT else ""
            text = f"{where}: blocks of type {printable(kind)} are not supported here{remedy}"
            raise bad_request(text, param=where.partition("[")[0].partition(".")[0])
        return DECODERS[kinds[kind]].decode(raw)
    except UNREADABLE as error:
        raise unreadable(error, where) from None
