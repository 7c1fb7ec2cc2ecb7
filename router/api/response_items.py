"""The items of the `input` of /v1/responses, and their translation to chat messages.

Clients send the items of earlier answers back. Known fields without a meaning for the model are ignored.
Unknown fields are refused, as in every body.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import msgspec
from msgspec import UNSET, Raw, Struct

from ..errors import printable, unsupported_value
from .body_types import RequestMessage, TextPart, Unread
from .field_errors import UNREADABLE, check_refused, is_unknown_field, refused_of, unreadable
from .fields import INPUT_CALL, INPUT_CALL_OUTPUT, INPUT_MESSAGE, INPUT_REASONING, OUTPUT_PART, Field
from .tool_bodies import CalledFunction, ToolCall


class InputTextPart(TextPart, tag="input_text", forbid_unknown_fields=True):
    """A text part of an input message."""


class OutputTextPart(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """A text part of an earlier answer."""

    TABLE: ClassVar[Mapping[str, Field]] = OUTPUT_PART

    text: str
    annotations: Unread = UNSET
    logprobs: Unread = UNSET
    parsed: Unread = UNSET


Content = str | list[TextPart | InputTextPart | OutputTextPart]


class InputMessage(Struct, forbid_unknown_fields=True):
    """A message. Items without a type are messages."""

    TABLE: ClassVar[Mapping[str, Field]] = INPUT_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    type: Literal["message"] | None = None
    id: Unread = UNSET
    status: Unread = UNSET
    phase: Unread = UNSET


class InputCall(Struct, forbid_unknown_fields=True):
    """A function call of an earlier answer."""

    TABLE: ClassVar[Mapping[str, Field]] = INPUT_CALL

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Unread = UNSET
    status: Unread = UNSET
    parsed_arguments: Unread = UNSET
    caller: Unread = UNSET
    namespace: Unread = UNSET
    is_async: Unread = msgspec.field(default=UNSET, name="async")
    dumped_async: Unread = msgspec.field(default=UNSET, name="async_")


class InputCallOutput(Struct, forbid_unknown_fields=True):
    """The result of a function call."""

    TABLE: ClassVar[Mapping[str, Field]] = INPUT_CALL_OUTPUT

    type: Literal["function_call_output"]
    output: Content
    call_id: str | None = None
    name: str | None = None
    id: Unread = UNSET
    status: Unread = UNSET
    caller: Unread = UNSET
    namespace: Unread = UNSET


class InputReasoning(Struct, forbid_unknown_fields=True):
    """The reasoning of an earlier answer."""

    TABLE: ClassVar[Mapping[str, Field]] = INPUT_REASONING

    type: Literal["reasoning"]
    id: Unread = UNSET
    summary: Unread = UNSET
    content: Unread = UNSET
    encrypted_content: Unread = UNSET
    status: Unread = UNSET


Item = InputMessage | InputCall | InputCallOutput | InputReasoning
ITEMS: Mapping[str, type[Item]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "reasoning": InputReasoning,
}
DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in ITEMS.items()}
REFUSED = {kind: refused_of(kind) for kind in ITEMS.values()}


class ReasoningText(Struct):
    """A part of reasoning. Its other fields are ignored."""

    text: str = ""


THOUGHTS = msgspec.json.Decoder(list[ReasoningText] | None)


class _Typed(Struct):
    """The type of any item."""

    type: str | None = None


TYPE_OF = msgspec.json.Decoder(_Typed)


def messages_of(items: Sequence[Raw]) -> list[RequestMessage]:
    """Translates input items to chat messages. Raises ApiError (400), which names the item at fault."""
    messages: list[RequestMessage] = []
    for number, raw in enumerate(items):
        _add(messages, _item_of(raw, f"input[{number}]"))
    return messages


def check_items(items: Sequence[Raw]) -> None:
    """Raises msgspec.ValidationError for the first item with an unknown field; `messages_of` tells of all
    other faults."""
    for raw in items:
        try:
            kind = TYPE_OF.decode(raw).type or "message"
            if kind in DECODERS:
                DECODERS[kind].decode(raw)
        except UNREADABLE as error:
            if is_unknown_field(error):
                raise


def _item_of(raw: Raw, where: str) -> Item:
    """Parses an item by its type. An unsupported type is reported as such, whatever its fields are."""
    try:
        kind = TYPE_OF.decode(raw).type or "message"
        if kind not in DECODERS:
            raise unsupported_value(
                f"{where}: items of type {printable(kind)} are not supported", param="input"
            )
        item = DECODERS[kind].decode(raw)
    except UNREADABLE as error:
        raise unreadable(error, where) from None
    check_refused(item, REFUSED[type(item)], f"{where}.", "input")
    return item


def _add(messages: list[RequestMessage], item: Item) -> None:
    """Adds an item. Calls are added to the assistant message before them, if there is one.

    An assistant message without text and calls is reasoning, to which the next item belongs.
    """
    if isinstance(item, InputCall):
        made = ToolCall(item.call_id, CalledFunction(item.name, item.arguments))
        if messages and messages[-1].role == "assistant":
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), made]
        else:
            messages.append(RequestMessage("assistant", tool_calls=[made]))
    elif isinstance(item, InputCallOutput):
        messages.append(
            RequestMessage("tool", _text_of(item.output), item.name, tool_call_id=item.call_id or "")
        )
    elif isinstance(item, InputReasoning):
        if thoughts := _thoughts_of(item):
            raw = Raw(msgspec.json.encode(thoughts))
            messages.append(RequestMessage("assistant", reasoning_content=raw))
    elif item.role == "assistant" and messages and _is_reasoning_only(messages[-1]):
        messages[-1].content = None if item.content is None else _text_of(item.content)
    else:
        messages.append(RequestMessage(item.role, None if item.content is None else _text_of(item.content)))


def _is_reasoning_only(message: RequestMessage) -> bool:
    return bool(message.thoughts) and message.content is None and not message.tool_calls


def _thoughts_of(item: InputReasoning) -> str:
    """The text of an item of reasoning; "" without any."""
    if not isinstance(item.content, Raw):
        return ""
    try:
        return "".join(part.text for part in THOUGHTS.decode(item.content) or ())
    except msgspec.ValidationError:
        return ""


def _text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join([part.text for part in content])
