"""The request bodies of the OpenAI API as types. msgspec refuses a body of any other shape.

Null always equals absent. `fields` lists how each field is treated; `openai` checks values that need more
than a type.
"""

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from .fields import CHAT, COMPLETION, MESSAGE, STREAM_OPTIONS, TEXT_PART, Field
from .structured import ConstrainedBody
from .tool_bodies import MAX_TOOLS, AnyToolChoice, Tool, ToolCall

MAX_CHOICES = 128  # rooms of a request: number of choices (or best_of) times number of prompts
MAX_SEED = 2**63 - 1
MAX_SWITCHES = 32  # variables for a template
MAX_SWITCH_CHARS = 256
LOWEST_REPETITION_PENALTY = 0.01  # logits divided by less leave the range of float32

NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
RepetitionPenalty = Annotated[float, Meta(ge=LOWEST_REPETITION_PENALTY, le=100.0)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
StopIds = Annotated[list[NotNegative], Meta(max_length=1024)]
NOT_EMPTY = Meta(extra_json_schema={"minLength": 1, "minItems": 1})  # `openai` checks it and words the error
SwitchText = Annotated[str, Meta(max_length=MAX_SWITCH_CHARS)]
Switches = Annotated[dict[str, bool | int | float | SwitchText | None], Meta(max_length=MAX_SWITCHES)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
Unread = msgspec.Raw | msgspec.UnsetType  # any JSON: ignored, or looked at only to refuse it


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    TABLE: ClassVar[Mapping[str, Field]] = STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_accepted_drafts: bool | None = None
    include_obfuscation: Unread = msgspec.UNSET


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """One part of a message's content; only text is served."""

    TABLE: ClassVar[Mapping[str, Field]] = TEXT_PART

    text: str
    prompt_cache_breakpoint: Unread = msgspec.UNSET
    cache_control: Unread = msgspec.UNSET


class RequestMessage(Struct, forbid_unknown_fields=True):
    """One message of a chat."""

    TABLE: ClassVar[Mapping[str, Field]] = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # in an assistant's message
    tool_call_id: str | None = None  # in a tool's message: the answered call
    # further fields of an answer's `message.model_dump()`; accepted only when they are empty
    refusal: Unread = msgspec.UNSET
    annotations: Unread = msgspec.UNSET
    audio: Unread = msgspec.UNSET
    function_call: Unread = msgspec.UNSET
    # fields that clients add to an answer's message before they send it back; ignored
    parsed: Unread = msgspec.UNSET
    reasoning: Unread = msgspec.UNSET
    reasoning_content: Unread = msgspec.UNSET
    thinking_blocks: Unread = msgspec.UNSET
    provider_specific_fields: Unread = msgspec.UNSET

    @property
    def thoughts(self) -> str:
        """The reasoning of an earlier answer; "" without any."""
        for raw in (self.reasoning_content, self.reasoning):
            if isinstance(raw, msgspec.Raw) and bytes(raw).lstrip().startswith(b'"'):
                return msgspec.json.decode(raw, type=str)
        return ""

    @property
    def num_chars(self) -> int:
        """The number of characters that a template may write of the message."""
        calls = sum(len(call.function.name) + len(call.function.arguments) for call in self.tool_calls or ())
        return len(self.role) + len(self.text) + len(self.name or "") + len(self.thoughts) + calls

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def as_template_input(self) -> dict[str, Any]:
        """The message in the form that chat templates expect."""
        fields: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.name:
            fields["name"] = self.name
        if self.tool_call_id:
            fields["tool_call_id"] = self.tool_call_id
        if thoughts := self.thoughts:
            fields["reasoning_content"] = thoughts
        if self.tool_calls:
            fields["tool_calls"] = [_as_template_call(call) for call in self.tool_calls]
        return fields


class CommonBody(ConstrainedBody, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and completions share."""

    TABLE: ClassVar[Mapping[str, Field]]

    model: str | None = None  # None: the served one
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=MAX_SEED)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    max_tokens: NotNegative | None = None
    min_tokens: NotNegative | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    stop_token_ids: StopIds | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    cache_salt: CacheSalt | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: NotNegative | None = None
    spaces_between_special_tokens: Unread = msgspec.UNSET
    session_id: Unread = msgspec.UNSET
    separate_reasoning: Unread = msgspec.UNSET
    stream_reasoning: Unread = msgspec.UNSET
    include_reasoning: Unread = msgspec.UNSET
    custom_params: Unread = msgspec.UNSET
    nvext: Unread = msgspec.UNSET
    use_beam_search: Unread = msgspec.UNSET
    length_penalty: Unread = msgspec.UNSET
    prompt_logprobs: Unread = msgspec.UNSET
    bad_words: Unread = msgspec.UNSET
    allowed_token_ids: Unread = msgspec.UNSET
    logits_processors: Unread = msgspec.UNSET
    user: Unread = msgspec.UNSET

    @property
    def keeps_stop(self) -> bool:
        """Whether the text of the answer ends with the stop string."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        """The number of choices per prompt in the answer."""
        return 1 if self.n is None else self.n

    @property
    def num_tries(self) -> int:
        """The number of choices per prompt to generate."""
        return self.num_choices

    @property
    def wants_echo(self) -> bool:
        return False

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return (
            self.wants_usage
            and self.stream_options is not None
            and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def wants_accepted_drafts(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_accepted_drafts)


class ChatBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    TABLE: ClassVar[Mapping[str, Field]] = CHAT

    messages: Annotated[list[RequestMessage], NOT_EMPTY]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    chat_template_kwargs: Switches | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    documents: Unread = msgspec.UNSET
    tools: Tools | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Unread = msgspec.UNSET
    function_call: Unread = msgspec.UNSET
    modalities: Unread = msgspec.UNSET
    audio: Unread = msgspec.UNSET
    moderation: Unread = msgspec.UNSET
    prediction: Unread = msgspec.UNSET
    reasoning_effort: Unread = msgspec.UNSET
    verbosity: Unread = msgspec.UNSET
    web_search_options: Unread = msgspec.UNSET
    store: Unread = msgspec.UNSET
    metadata: Unread = msgspec.UNSET
    service_tier: Unread = msgspec.UNSET
    safety_identifier: Unread = msgspec.UNSET
    prompt_cache_key: Unread = msgspec.UNSET
    prompt_cache_options: Unread = msgspec.UNSET
    prompt_cache_retention: Unread = msgspec.UNSET
    chat_template: Unread = msgspec.UNSET

    @property
    def has_answer_head(self) -> bool:
        """Whether the head of an answer follows the messages in the prompt."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"


class CompletionBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    TABLE: ClassVar[Mapping[str, Field]] = COMPLETION

    prompt: Annotated[str | list[str | int | list[int]], NOT_EMPTY] | None = None
    prompt_embeds: Annotated[str | list[str], NOT_EMPTY] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: Unread = msgspec.UNSET

    @property
    def embeds(self) -> list[str]:
        """The prompts that are embeddings, as sent."""
        given = self.prompt_embeds
        return [given] if isinstance(given, str) else given or []

    @property
    def num_tries(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def wants_echo(self) -> bool:
        return bool(self.echo)


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a `prompt`, or a chat's `messages` and `tools`, which the model's template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[RequestMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Switches | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None

    @property
    def has_answer_head(self) -> bool:
        """As of a chat."""
        return self.add_generation_prompt is not False and not self.continue_final_message


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[NotNegative]


def _as_template_call(call: ToolCall) -> dict[str, Any]:
    """A call for chat templates, which expect arguments as an object.

    Arguments that are no JSON stay a string.
    """
    arguments: object = call.function.arguments
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.decode(call.function.arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
