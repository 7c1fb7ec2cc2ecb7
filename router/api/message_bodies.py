"""The bodies of POST /v1/messages, Anthropic's Messages API, and their translation to a chat body."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct

from ..errors import ApiError, bad_request, printable
from .body_types import (
    NOT_EMPTY,
    ChatBody,
    Fraction,
    Positive,
    RequestMessage,
    StreamOptions,
    Switches,
    Unread,
)
from .fields import MESSAGES, Field
from .message_blocks import Content, message_of_assistant, messages_of_user, text_of
from .tool_bodies import (
    MAX_TOOLS,
    Function,
    FunctionChoice,
    Json,
    NamedSchema,
    SchemaFormat,
    Tool,
    ToolChoice,
)

VERSION = "2023-06-01"
PARAM_OF = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "continue_final_message": "messages",
}  # names of a chat's fields
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$(?!\n)")]


class Turn(Struct, forbid_unknown_fields=True):
    """An entry of `messages`; each block of content is parsed by its type."""

    role: Literal["user", "assistant"]
    content: Content


class MessageTool(Struct, forbid_unknown_fields=True):
    """An entry of `tools`: a function of the client."""

    name: ToolName
    input_schema: Json = UNSET
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: Unread = UNSET
    allowed_callers: Unread = UNSET
    defer_loading: Unread = UNSET
    eager_input_streaming: Unread = UNSET
    input_examples: Unread = UNSET


class MessageToolChoice(Struct, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonOutput(Struct, forbid_unknown_fields=True):
    """`output_config.format`: JSON of a schema."""

    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(Struct, forbid_unknown_fields=True):
    """`output_config`."""

    format: JsonOutput | None = None
    effort: Unread = UNSET


class Thinking(Struct):
    """`thinking`. Fields besides the type are hints."""

    type: str


class MessageInput(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that a prompt is made of."""

    messages: Annotated[list[Turn], NOT_EMPTY]
    model: str | None = None
    system: Content | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    chat_template_kwargs: Switches | None = None
    cache_control: Unread = UNSET


class CountBody(MessageInput, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""


class MessageBody(MessageInput, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    TABLE: ClassVar[Mapping[str, Field]] = MESSAGES

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Fraction | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    billing_policy: Unread = UNSET
    compaction: Unread = UNSET
    container: Unread = UNSET
    context_management: Unread = UNSET
    diagnostics: Unread = UNSET
    fallback_credit_token: Unread = UNSET
    fallbacks: Unread = UNSET
    inference_geo: Unread = UNSET
    mcp_servers: Unread = UNSET
    metadata: Unread = UNSET
    service_tier: Unread = UNSET
    speed: Unread = UNSET
    thread: Unread = UNSET


def chat_of_message(body: MessageBody | CountBody) -> ChatBody:
    """Translates a body to a chat body. Raises ApiError (400)."""
    chosen = body.tool_choice
    chat = ChatBody(
        model=body.model,
        messages=_messages_of(body),
        tools=[_tool_of(tool, number) for number, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice_of(chosen),
        parallel_tool_calls=False if chosen is not None and chosen.disable_parallel_tool_use else None,
        chat_template_kwargs=_switches_of(body),
        response_format=_format_of(body),
    )
    # the answer continues what the assistant has begun to say
    chat.continue_final_message = chat.messages[-1].role == "assistant" if chat.messages else None
    if isinstance(body, MessageBody):
        chat.max_tokens, chat.stop = body.max_tokens, body.stop_sequences
        chat.temperature, chat.top_k, chat.top_p = body.temperature, body.top_k, body.top_p
        chat.seed, chat.priority, chat.stream = body.seed, body.priority, body.stream
        # every event may need the tokens so far
        chat.stream_options = (
            StreamOptions(include_usage=True, continuous_usage_stats=True) if body.stream else None
        )
    return chat


def in_words_of_messages(error: ApiError) -> ApiError:
    """An error about a chat's field, translated to name the field of the message body."""
    told = error.body
    param = PARAM_OF.get(told.param or "", told.param)
    return ApiError(error.status, msgspec.structs.replace(told, param=param), error.retry_after_s)


def _messages_of(body: MessageInput) -> list[RequestMessage]:
    messages = [RequestMessage("system", text)] if (text := text_of(body.system, "system")) else []
    for number, turn in enumerate(body.messages):
        where = f"messages[{number}].content"
        if turn.role == "user":
            messages += messages_of_user(turn.content, where)
        else:
            messages.append(message_of_assistant(turn.content, where))
    return messages


def _tool_of(tool: MessageTool, number: int) -> Tool:
    if tool.type not in (None, "custom"):
        text = f"tools[{number}]: tools of type {printable(tool.type)} are not served here: give functions"
        raise bad_request(text, param="tools")
    return Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice_of(chosen: MessageToolChoice | None) -> ToolChoice | Literal["none", "auto", "required"] | None:
    if chosen is None:
        return None
    if chosen.type == "tool":
        if chosen.name is None:
            raise bad_request("tool_choice: name is missing", param="tool_choice")
        return ToolChoice(FunctionChoice(chosen.name))
    return "required" if chosen.type == "any" else "none" if chosen.type == "none" else "auto"


def _switches_of(body: MessageInput) -> Switches | None:
    """The switches of the template. `thinking` sets those by which templates turn reasoning on and off."""
    given = body.chat_template_kwargs
    if body.thinking is None:
        return given
    is_on = body.thinking.type != "disabled"
    return {"enable_thinking": is_on, "thinking": is_on, **(given or {})}


def _format_of(body: MessageInput) -> SchemaFormat | None:
    wanted = body.output_config.format if body.output_config is not None else None
    wanted = wanted or body.output_format
    return SchemaFormat(NamedSchema(schema=wanted.schema)) if wanted is not None else None
