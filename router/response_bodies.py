"""POST /v1/responses: its body, and the chat that it asks for."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from .api_bodies import ChatBody, Message, Positive, StreamOptions, Unread
from .api_fields import RESPONSE, Field
from .errors import ApiError, bad_request, printable
from .tool_bodies import (
    MAX_TOOLS,
    AllowedFunctions,
    AllowedTools,
    AnyFormat,
    AnyToolChoice,
    CalledFunction,
    Function,
    FunctionChoice,
    NamedSchema,
    ObjectFormat,
    SchemaFormat,
    TextFormat,
    Tool,
    ToolCall,
    ToolChoice,
)

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
PARAM_OF = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}  # of a chat's fields


class InputPart(Struct):
    """A part of a message: `input_text`, or `output_text` of an answer before."""

    type: str
    text: str | None = None


class InputItem(Struct):
    """An item of `input`: a message, a function call or its output. An answer's own items hold more that says nothing."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[InputPart] = ""


class ResponseTool(Function, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """An entry of `tools`: a function, spelled flat."""


class ResponseToolChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """`tool_choice`: this one."""

    name: str


class ResponseAllowedTools(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """`tool_choice`: some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class FlatSchemaFormat(NamedSchema, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """`text.format`: JSON of a schema, spelled flat."""


class TextOptions(Struct, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | ObjectFormat | FlatSchemaFormat | None = None
    verbosity: Unread = msgspec.UNSET


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
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = None
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
        text=Raw(msgspec.json.encode(body.text or TextOptions(TextFormat()))),
        tools=Raw(msgspec.json.encode(body.tools or [])),
        tool_choice=Raw(msgspec.json.encode(body.tool_choice or "auto")),
        parallel_tool_calls=body.parallel_tool_calls is not False,
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
        response_format=_format_of(body),
        tools=[Tool(_function_of(tool)) for tool in body.tools or ()] or None,
        tool_choice=_choice_of(body),
        parallel_tool_calls=body.parallel_tool_calls,
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
    for number, item in enumerate(body.input):
        _add_item(messages, item, f"input[{number}]")
    return messages


def _add_item(messages: list[Message], item: InputItem, where: str) -> None:
    if item.type == "function_call":
        made = ToolCall(item.call_id, CalledFunction(item.name, item.arguments))
        if messages and messages[-1].role == "assistant":
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), made]
        else:
            messages.append(Message("assistant", tool_calls=[made]))
    elif item.type == "function_call_output":
        messages.append(Message("tool", _text_of(item.output, f"{where}.output"), tool_call_id=item.call_id))
    elif item.type == "message":
        messages.append(_message_of(item, where))
    elif item.type != "reasoning":
        raise bad_request(f"{where}: items of type {printable(item.type)} are not supported", param="input")


def _message_of(item: InputItem, where: str) -> Message:
    if item.role not in ("system", "developer", "user", "assistant"):
        raise bad_request(f"{where}.role is not system, developer, user or assistant", param="input")
    role: Any = item.role
    return Message(role, None if item.content is None else _text_of(item.content, where))


def _text_of(content: str | list[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("input_text", "output_text", "text") or part.text is None:
            raise bad_request(f"{where}: content of type {printable(part.type)} is not supported", param="input")
    return "".join(part.text or "" for part in content)


def _format_of(body: ResponseBody) -> AnyFormat | None:
    wanted = body.text.format if body.text is not None else None
    if isinstance(wanted, FlatSchemaFormat):
        return SchemaFormat(NamedSchema(wanted.name, wanted.schema, wanted.description, wanted.strict))
    return wanted


def _function_of(tool: ResponseTool) -> Function:
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def _choice_of(body: ResponseBody) -> AnyToolChoice | None:
    chosen = body.tool_choice
    if isinstance(chosen, ResponseAllowedTools):
        return AllowedTools(AllowedFunctions(chosen.mode, [ToolChoice(FunctionChoice(tool.name)) for tool in chosen.tools]))
    return ToolChoice(FunctionChoice(chosen.name)) if isinstance(chosen, ResponseToolChoice) else chosen
