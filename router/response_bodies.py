"""POST /v1/responses: its body, and the chat that it asks for."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Raw, Struct

from .api_bodies import ChatBody, Message, Positive, StreamOptions, TextPart, Unread
from .api_fields import RESPONSE, Field
from .errors import ApiError, bad_request, printable

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
PARAM_OF = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}  # of a chat's fields


class InputPart(Struct):
    """A part of a message: `input_text`, or `output_text` of an answer before."""

    type: str
    text: str | None = None


class InputItem(Struct):
    """A message of `input`; an answer's own items hold fields that say nothing here."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None


class ResponseBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    TABLE: ClassVar[Mapping[str, Field]] = RESPONSE

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    text: Unread = msgspec.UNSET
    tools: Unread = msgspec.UNSET
    tool_choice: Unread = msgspec.UNSET
    parallel_tool_calls: Unread = msgspec.UNSET
    access_programs: Unread = msgspec.UNSET
    background: Unread = msgspec.UNSET
    context_management: Unread = msgspec.UNSET
    conversation: Unread = msgspec.UNSET
    image: Unread = msgspec.UNSET
    max_tool_calls: Unread = msgspec.UNSET
    moderation: Unread = msgspec.UNSET
    previous_response_id: Unread = msgspec.UNSET
    prompt: Unread = msgspec.UNSET
    prompt_cache_key: Unread = msgspec.UNSET
    prompt_cache_options: Unread = msgspec.UNSET
    prompt_cache_retention: Unread = msgspec.UNSET
    reasoning: Unread = msgspec.UNSET
    safety_identifier: Unread = msgspec.UNSET
    service_tier: Unread = msgspec.UNSET
    store: Unread = msgspec.UNSET
    truncation: Unread = msgspec.UNSET
    user: Unread = msgspec.UNSET


class Told(Struct, frozen=True, kw_only=True):
    """What a response repeats of its request."""

    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    metadata: dict[str, str]
    text: Raw
    tools: Raw
    tool_choice: Raw
    parallel_tool_calls: bool


def told_of(body: ResponseBody) -> Told:
    """What the response to `body` repeats of it."""
    return Told(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_logprobs=body.top_logprobs or 0,
        metadata=body.metadata or {},
        text=_or(body.text, b'{"format":{"type":"text"}}'),
        tools=_or(body.tools, b"[]"),
        tool_choice=_or(body.tool_choice, b'"auto"'),
        parallel_tool_calls=bytes(_or(body.parallel_tool_calls, b"true")) != b"false",
    )


def chat_of(body: ResponseBody) -> ChatBody:
    """The chat that stands for a response. Raises ApiError (400) in the words of /v1/responses."""
    wants_logprobs = LOGPROBS in (body.include or ())
    chat = ChatBody(
        model=body.model,
        messages=_messages_of(body),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        priority=body.priority,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
    )
    return chat


def in_words_of_responses(error: ApiError) -> ApiError:
    """An error about a chat's field, about the field that it came from."""
    told = error.body
    param = PARAM_OF.get(told.param or "", told.param)
    return ApiError(error.status, msgspec.structs.replace(told, param=param), error.retry_after_s)


def _messages_of(body: ResponseBody) -> list[Message]:
    messages = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message("user", body.input)]
    return messages + [_message_of(item, f"input[{number}]") for number, item in enumerate(body.input)]


def _message_of(item: InputItem, where: str) -> Message:
    if item.type != "message":
        raise bad_request(f"{where}: items of type {printable(item.type)} are not supported", param="input")
    if item.role not in ("system", "developer", "user", "assistant"):
        raise bad_request(f"{where}.role is not system, developer, user or assistant", param="input")
    if isinstance(item.content, list):
        for part in item.content:
            if part.type not in ("input_text", "output_text", "text") or part.text is None:
                raise bad_request(f"{where}: content of type {printable(part.type)} is not supported", param="input")
        parts = [TextPart(part.text or "") for part in item.content]
        return msgspec.convert({"role": item.role}, Message) if not parts else Message(item.role, parts)  # type: ignore[arg-type]
    return Message(item.role, item.content)  # type: ignore[arg-type]


def _or(value: Unread, default: bytes) -> Raw:
    is_said = isinstance(value, Raw) and bytes(value) != b"null"
    return value if is_said and isinstance(value, Raw) else Raw(default)
