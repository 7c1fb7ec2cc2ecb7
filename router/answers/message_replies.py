"""Answers of /v1/messages, Anthropic's Messages API: one object, or a stream of events in this order:

message_start, ping
per block   content_block_start, content_block_delta ..., content_block_stop
message_delta with the reason of the end and the usage, message_stop

Blocks are reasoning (thinking), text and tool_use, in the order of the model. After a failure the last event
is error.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ..errors import ApiError, MessageError
from ..formats.parts import CallPart
from .generation import Piece
from .replies import AnyTimeline, Frame, Usage, compact, raw_timeline, sse

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ContentBlock(Struct, omit_defaults=True):
    """A block of content. Its type determines which fields are set."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


class ThinkingDetails(Struct, frozen=True):
    """`output_tokens_details`."""

    thinking_tokens: int = 0


class MessageUsage(Struct):
    """`usage`. Tokens of the prefix cache are not among `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: ThinkingDetails = ThinkingDetails()


class Message(Struct, kw_only=True):
    """The body of an answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    timeline: Raw | UnsetType = UNSET


class MessageDelta(Struct, omit_defaults=True):
    """What a block grows by; at the end of a message, the reason of its end."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, omit_defaults=True):
    """Any event. Its type determines which fields are set."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    timeline: Raw | UnsetType = UNSET


class TokenCount(Struct):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageBuilder:
    """Encodes one message, which has one choice, as one body or as events."""

    end = b""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._is_started = False
        self._open = ""  # type of the block that is open
        self._num_blocks = 0
        self._end: tuple[str | None, str | None] = (None, None)  # stop reason and stop sequence

    def whole(self, answers: Sequence[Piece], usage: Usage, timeline: AnyTimeline | None) -> bytes:
        """The body of an answer that is not streamed."""
        [piece] = answers
        blocks = [ContentBlock("thinking", thinking=piece.reasoning, signature="")] if piece.reasoning else []
        blocks += [ContentBlock("text", text=piece.text)] if piece.text else []
        for call in piece.whole_calls:
            made = ContentBlock("tool_use", id=_call_id(call), name=call.name, input=_object(call.arguments))
            blocks.append(made)
        end = _end_of(piece)
        return compact(self._message(blocks, end, usage, timeline))

    def opening(self, index: int) -> bytes:
        """Nothing: the first event has the usage, which comes with the first piece."""
        return b""

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """The events for a piece."""
        events = b""
        if not self._is_started:
            assert usage is not None, "a stream of messages asks for its usage"
            self._is_started = True
            started = self._message([], self._end, usage, None)
            events += _event("message_start", message=started) + _event("ping")
        if piece.reasoning:
            events += self._block("thinking", thinking="", signature="")
            events += self._delta("thinking_delta", thinking=piece.reasoning)
        if piece.text:
            events += self._block("text", text="") + self._delta("text_delta", text=piece.text)
        for call in piece.calls:
            events += self._call(call)
        if piece.finish:
            self._end = _end_of(piece)
            events += self._close()
        return events

    def closing(self, usage: Usage | None, timeline: AnyTimeline | None) -> bytes:
        """The last events."""
        assert usage is not None, "a stream of messages asks for its usage"
        delta = MessageDelta(stop_reason=self._end[0] or "end_turn", stop_sequence=self._end[1])
        told = {"delta": delta, "usage": _usage_of(usage), "timeline": raw_timeline(timeline)}
        return _event("message_delta", **told) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return sse(MessageError.of(error).encode(), "error")

    # --- blocks ---------------------------------------------------------------------------------------------

    def _block(self, kind: str, **fields: object) -> bytes:
        """The events up to an open block of this type; calls always open another one."""
        if self._open == kind and kind != "tool_use":
            return b""
        events = self._close()
        self._open = kind
        made = ContentBlock(kind, **fields)  # type: ignore[arg-type]
        return events + _event("content_block_start", index=self._num_blocks, content_block=made)

    def _call(self, part: CallPart) -> bytes:
        events = b""
        if part.id:
            events = self._block("tool_use", id=_call_id(part), name=part.name, input=Raw(b"{}"))
        if part.arguments:
            events += self._delta("input_json_delta", partial_json=part.arguments)
        return events

    def _delta(self, kind: str, **fields: object) -> bytes:
        delta = MessageDelta(kind, **fields)  # type: ignore[arg-type]
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        events = self._delta("signature_delta", signature="") if self._open == "thinking" else b""
        events += _event("content_block_stop", index=self._num_blocks)
        self._open = ""
        self._num_blocks += 1
        return events

    def _message(
        self,
        blocks: list[ContentBlock],
        end: tuple[str | None, str | None],
        usage: Usage,
        timeline: AnyTimeline | None,
    ) -> Message:
        return Message(
            id=self._frame.id,
            model=self._frame.model,
            content=blocks,
            stop_reason=end[0],
            stop_sequence=end[1],
            usage=_usage_of(usage),
            timeline=raw_timeline(timeline),
        )


def _event(kind: str, **fields: object) -> bytes:
    return sse(compact(MessageEvent(kind, **fields)), kind)  # type: ignore[arg-type]


def _end_of(piece: Piece) -> tuple[str, str | None]:
    """The stop reason, and the stop sequence if one was found."""
    if piece.stop:
        return "stop_sequence", piece.stop
    return STOP_REASONS.get(piece.finish, "end_turn"), None


def _usage_of(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
        output_tokens_details=ThinkingDetails(usage.completion_tokens_details.reasoning_tokens),
    )


def _call_id(call: CallPart) -> str:
    return f"toolu_{call.id.removeprefix('call_')}"


def _object(arguments: str) -> Raw:
    """The arguments of a call, `{}` for those that the end of the answer cut off."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError):
        return Raw(b"{}")
    return Raw(arguments.encode())
