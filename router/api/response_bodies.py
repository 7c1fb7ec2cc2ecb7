"""The body of POST /v1/responses, and its translation to a chat body."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from ..errors import ApiError, bad_request
from .body_types import (
    Bias,
    CacheSalt,
    ChatBody,
    Fraction,
    NotNegative,
    Penalty,
    Positive,
    RepetitionPenalty,
    RequestMessage,
    StopIds,
    StreamOptions,
    TopK,
    Unread,
)
from .field_errors import check_refused, refused_of
from .fields import PASSED_ON, RESPONSE, RESPONSE_TOOL, TEXT_OPTIONS, Field
from .response_items import messages_of
from .structured import ConstraintFields
from .tool_bodies import (
    MAX_TOOLS,
    AllowedFunctions,
    AllowedTools,
    AnyFormat,
    AnyToolChoice,
    Function,
    FunctionChoice,
    NamedSchema,
    ObjectFormat,
    SchemaFormat,
    TextFormat,
    Tool,
    ToolChoice,
)

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
PARAM_OF = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}  # names of a chat's fields


class ResponseTool(Function, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """An entry of `tools`: a function, spelled flat."""

    TABLE: ClassVar[Mapping[str, Field]] = RESPONSE_TOOL

    output_schema: Unread = msgspec.UNSET
    is_async: Unread = msgspec.field(default=msgspec.UNSET, name="async")
    defer_loading: Unread = msgspec.UNSET
    allowed_callers: Unread = msgspec.UNSET


REFUSED_IN_TOOLS = refused_of(ResponseTool)


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

    TABLE: ClassVar[Mapping[str, Field]] = TEXT_OPTIONS

    format: TextFormat | ObjectFormat | FlatSchemaFormat | None = None
    verbosity: Unread = msgspec.UNSET


class ResponseBody(ConstraintFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    TABLE: ClassVar[Mapping[str, Field]] = RESPONSE

    input: str | list[Raw]  # items; each is parsed by its type
    model: str | None = None
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
    stop: str | list[str] | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    min_tokens: NotNegative | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopIds | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: CacheSalt | None = None
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
    """The fields of a request that its response repeats."""

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
    """The fields that the response to `body` repeats."""
    return Told(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_logprobs=body.top_logprobs or 0,
        metadata=body.metadata or {},
        text=Raw(msgspec.json.encode(TextOptions((body.text and body.text.format) or TextFormat()))),
        tools=Raw(msgspec.json.encode([_as_read(tool) for tool in body.tools or ()])),
        tool_choice=Raw(msgspec.json.encode(body.tool_choice or "auto")),
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def chat_of(body: ResponseBody) -> ChatBody:
    """Translates a response body to a chat body. Raises ApiError (400)."""
    if body.stream_options is not None and body.stream_options.include_accepted_drafts:
        raise bad_request(
            "include_accepted_drafts is an option of chats and completions", param="stream_options"
        )
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
        tools=[Tool(_function_of(tool, number)) for number, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice_of(body),
        parallel_tool_calls=body.parallel_tool_calls,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        **{name: getattr(body, name) for name in PASSED_ON},
    )
    return chat


def in_words_of_responses(error: ApiError) -> ApiError:
    """An error about a chat's field, translated to name the field of the response body."""
    told = error.body
    param = PARAM_OF.get(told.param or "", told.param)
    return ApiError(error.status, msgspec.structs.replace(told, param=param), error.retry_after_s)


def _messages_of(body: ResponseBody) -> list[RequestMessage]:
    messages = [RequestMessage("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, RequestMessage("user", body.input)]
    return messages + messages_of(body.input)


def _format_of(body: ResponseBody) -> AnyFormat | None:
    wanted = body.text.format if body.text is not None else None
    if isinstance(wanted, FlatSchemaFormat):
        return SchemaFormat(NamedSchema(wanted.name, wanted.schema, wanted.description, wanted.strict))
    return wanted


def _as_read(tool: ResponseTool) -> ResponseTool:
    """A tool without its ignored fields."""
    return ResponseTool(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )


def _function_of(tool: ResponseTool, number: int) -> Function:
    check_refused(tool, REFUSED_IN_TOOLS, f"tools[{number}].", "tools")
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def _choice_of(body: ResponseBody) -> AnyToolChoice | None:
    chosen = body.tool_choice
    if isinstance(chosen, ResponseAllowedTools):
        return AllowedTools(
            AllowedFunctions(chosen.mode, [ToolChoice(FunctionChoice(tool.name)) for tool in chosen.tools])
        )
    return ToolChoice(FunctionChoice(chosen.name)) if isinstance(chosen, ResponseToolChoice) else chosen
