"""The JSON of chat answers: chat.completion and chat.completion.chunk objects."""

from collections.abc import Sequence

from msgspec import UNSET, Raw, Struct, UnsetType

from ..errors import ApiError
from ..formats.parts import CallPart
from .generation import Piece, TokenText
from .replies import (
    DONE,
    AnyTimeline,
    Frame,
    SglExt,
    Usage,
    compact,
    finite,
    raw_timeline,
    sgl_ext,
    sse,
    sse_error,
)


class TopLogprob(Struct):
    """An alternative to a token, in `top_logprobs`."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Struct):
    """One output token, in `logprobs.content`."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprobs]
    refusal: None = None


class Called(Struct):
    """The `function` of a call; in a chunk, a part of it."""

    arguments: str
    name: str | UnsetType = UNSET


class MessageCall(Struct):
    """A call in a message."""

    id: str
    function: Called
    type: str = "function"


class DeltaCall(Struct):
    """A chunk's part of a call. The first part has the id and name of the call."""

    index: int
    function: Called
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct):
    """The assistant's message."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[MessageCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, by its newer name


class Delta(Struct):
    """A chunk's part of the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct):
    """A choice of a chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET
    sgl_ext: SglExt | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A choice's part of a chat chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    accepted_drafts: int | UnsetType = UNSET
    sgl_ext: SglExt | UnsetType = UNSET  # in its last chunk


class ChatReply(Struct):
    """A whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType = UNSET
    timeline: Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """A chunk of an answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    timeline: Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk


class ChatBuilder:
    """Encodes one chat answer."""

    end = DONE

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def whole(self, answers: Sequence[Piece], usage: Usage, timeline: AnyTimeline | None) -> bytes:
        """The body of an answer that is not streamed, one piece per choice."""
        choices = [
            ChatChoice(
                index,
                _message_of(piece),
                self._logprobs(piece),
                piece.finish,
                self._ids(piece),
                sgl_ext(piece),
            )
            for index, piece in enumerate(answers)
        ]
        frame = self._frame
        return compact(
            ChatReply(
                frame.id,
                "chat.completion",
                frame.created,
                frame.model,
                choices,
                usage,
                raw_timeline(timeline),
                self._prompt_ids(),
            )
        )

    def opening(self, index: int) -> bytes:
        """The chunk with the role."""
        ids = UNSET if index else self._prompt_ids()
        return self._chunk([ChatChunkChoice(index, Delta("assistant", ""))], prompt_ids=ids)

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """The chunks for a piece; empty when it adds nothing to the message.

        A chunk never has parts of two calls, since the API never sends such chunks and clients read only the
        first.
        """
        if not (
            piece.text
            or piece.calls
            or piece.logprobs
            or piece.finish
            or piece.reasoning
            or (self._frame.wants_ids and piece.ids)
            or piece.accepted
        ):
            return b""
        has_more = piece.finish or piece.calls or piece.reasoning
        delta = Delta(content=piece.text) if piece.text or not has_more else Delta()
        before = b""
        if piece.reasoning:
            thought = Delta(reasoning_content=piece.reasoning, reasoning=piece.reasoning)
            if piece.text or piece.calls:
                before = self._chunk([ChatChunkChoice(index, thought)])
            else:
                delta = thought
        if piece.calls:
            *others, last = _deltas_of(piece.calls)
            for other in others:
                before += self._chunk(
                    [ChatChunkChoice(index, Delta(content=delta.content, tool_calls=[other]))]
                )
                delta = Delta()
            delta.tool_calls = [last]
        finish = piece.finish or None
        choice = ChatChunkChoice(index, delta, self._logprobs(piece), finish, self._ids(piece))
        choice.accepted_drafts = piece.accepted if self._frame.wants_accepted else UNSET
        choice.sgl_ext = sgl_ext(piece)
        return before + self._chunk([choice], UNSET if usage is None else usage)

    def closing(self, usage: Usage | None, timeline: AnyTimeline | None) -> bytes:
        """The last chunk, without choices, for usage and timeline; empty without both."""
        if usage is None and timeline is None:
            return b""
        return self._chunk([], UNSET if usage is None else usage, raw_timeline(timeline))

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return sse_error(error)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType = UNSET,
        timeline: Raw | UnsetType = UNSET,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        frame = self._frame
        kind = "chat.completion.chunk"
        chunk = ChatChunk(frame.id, kind, frame.created, frame.model, choices, usage, timeline, prompt_ids)
        return sse(compact(chunk))

    def _prompt_ids(self) -> list[int] | UnsetType:
        return self._frame.prompt_ids[0] if self._frame.prompt_ids else UNSET

    def _ids(self, piece: Piece) -> list[int] | UnsetType:
        return piece.ids if self._frame.wants_ids else UNSET

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        num_top = self._frame.num_top
        if num_top < 0 or not piece.logprobs:
            return None
        return ChatLogprobs([chat_logprobs(token, num_top) for token in piece.logprobs])


def _message_of(piece: Piece) -> ChatMessage:
    calls = [MessageCall(call.id, Called(call.arguments, call.name)) for call in piece.whole_calls]
    message = ChatMessage(piece.text)
    if calls:
        message.tool_calls = calls
    if piece.reasoning:
        message.reasoning_content = message.reasoning = piece.reasoning
    if calls or piece.reasoning:
        message.content = piece.text or None
    return message


def _deltas_of(parts: Sequence[CallPart]) -> list[DeltaCall]:
    """A chunk's parts of each call, in order."""
    deltas: list[DeltaCall] = []
    for part in parts:
        if part.id:
            deltas.append(DeltaCall(part.index, Called(part.arguments, part.name), part.id, "function"))
        elif deltas and deltas[-1].index == part.index:
            deltas[-1].function.arguments += part.arguments
        else:
            deltas.append(DeltaCall(part.index, Called(part.arguments)))
    return deltas


def chat_logprobs(token: TokenText, num_top: int) -> TokenLogprobs:
    """A token with its alternatives."""
    assert token.logprob is not None, "only a prompt has a token with nothing before it"
    top = [TopLogprob(text, finite(value), list(data)) for text, data, value in token.top[:num_top]]
    return TokenLogprobs(token.text, finite(token.logprob), list(token.data), top)
