"""What clients get: the OpenAI response objects, whole or in chunks, and their bytes.

JSON cannot hold an infinite log probability: -9999 stands for it, as the API has it.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType

from .errors import ApiError
from .generation import Piece, TokenText
from .timeline import Timeline

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
# Line ends for some readers of server-sent events, though not for the standard; JSON may spell them as escapes.
LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


class TopLogprob(Struct):
    """An alternative, in a chat."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Struct):
    """One output token, in a chat."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprobs]
    refusal: None = None


class CompletionLogprobs(Struct):
    """`logprobs` of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class ChatMessage(Struct):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class Delta(Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct):
    """A choice of a chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A choice's part of a chat chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    """A choice of a completion, whole or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class PromptDetails(Struct):
    """`prompt_tokens_details`."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionDetails(Struct):
    """`completion_tokens_details`; a prediction is a draft here."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class Usage(Struct):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChoiceTimelines(Struct):
    """The timelines of an answer with several choices, in order."""

    choices: list[Timeline]


AnyChoice = ChatChoice | ChatChunkChoice | CompletionChoice
AnyTimeline = Timeline | ChoiceTimelines


class Reply(Struct):
    """The outer object of every answer and chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: list[AnyChoice]
    usage: Usage | UnsetType | None = UNSET
    timeline: AnyTimeline | UnsetType = UNSET


class Builder:
    """Makes the objects of one answer; chat and completions differ in their choices only."""

    def __init__(
        self, *, is_chat: bool, reply_id: str, created: int, model: str, num_top: int, wants_ids: bool = False
    ) -> None:
        self._is_chat = is_chat
        self._id = reply_id
        self._created = created
        self._model = model
        self._num_top = num_top  # -1: no log probabilities
        self._wants_ids = wants_ids

    def whole(self, answers: Sequence[Piece], usage: Usage, timeline: AnyTimeline | None) -> bytes:
        """The body of an answer that is not streamed, one piece per choice."""
        choices: list[AnyChoice] = []
        for index, piece in enumerate(answers):
            ids = self._ids(piece)
            if self._is_chat:
                message, logprobs = ChatMessage(piece.text), self._chat_logprobs(piece.logprobs)
                choices.append(ChatChoice(index, message, logprobs, piece.finish, ids))
            else:
                choices.append(self._completion_choice(index, piece))
        kind = "chat.completion" if self._is_chat else "text_completion"
        reply = Reply(self._id, kind, self._created, self._model, choices, usage, timeline or UNSET)
        return msgspec.json.encode(reply)

    def opening(self, index: int) -> bytes:
        """The first chunk of a choice: who speaks. Empty for completions."""
        return self._chunk([ChatChunkChoice(index, Delta("assistant", ""))]) if self._is_chat else b""

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """The chunk of one piece, with the usage so far where it is given; empty when there is nothing to say."""
        if not piece.text and not piece.logprobs and not piece.finish and not (self._wants_ids and piece.ids):
            return b""
        finish, so_far = piece.finish or None, UNSET if usage is None else usage
        if self._is_chat:
            delta = Delta(content=piece.text) if piece.text or not finish else Delta()
            logprobs = self._chat_logprobs(piece.logprobs)
            return self._chunk([ChatChunkChoice(index, delta, logprobs, finish, self._ids(piece))], so_far)
        return self._chunk([self._completion_choice(index, piece)], so_far)

    def closing(self, usage: Usage | None, timeline: AnyTimeline | None) -> bytes:
        """The last chunk, which has no choices; empty when nobody asked for what it holds."""
        if usage is None and timeline is None:
            return b""
        return self._chunk([], UNSET if usage is None else usage, timeline or UNSET)

    def _chunk(
        self, choices: list[AnyChoice], usage: Usage | UnsetType = UNSET, timeline: AnyTimeline | UnsetType = UNSET
    ) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return sse(msgspec.json.encode(Reply(self._id, kind, self._created, self._model, choices, usage, timeline)))

    def _completion_choice(self, index: int, piece: Piece) -> CompletionChoice:
        logprobs = self._completion_logprobs(piece.logprobs)
        return CompletionChoice(index, piece.text, logprobs, piece.finish or None, self._ids(piece))

    def _ids(self, piece: Piece) -> list[int] | UnsetType:
        return piece.ids if self._wants_ids else UNSET

    def _chat_logprobs(self, tokens: Sequence[TokenText]) -> ChatLogprobs | None:
        if self._num_top < 0 or not tokens:
            return None
        return ChatLogprobs([_chat_token(token, self._num_top) for token in tokens])

    def _completion_logprobs(self, tokens: Sequence[TokenText]) -> CompletionLogprobs | None:
        if self._num_top < 0 or not tokens:
            return None
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[None if token.logprob is None else _finite(token.logprob) for token in tokens],
            top_logprobs=[_completion_top(token) for token in tokens] if self._num_top else None,
            text_offset=[token.at for token in tokens],
        )


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    for raw, escaped in LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


def sse_error(error: ApiError) -> bytes:
    """The last event of a stream that failed."""
    return sse(error.encode())


def _chat_token(token: TokenText, num_top: int) -> TokenLogprobs:
    assert token.logprob is not None, "only a prompt has a token with nothing before it"
    top = [TopLogprob(text, _finite(value), list(data)) for text, data, value in token.top[:num_top]]
    return TokenLogprobs(token.text, _finite(token.logprob), list(token.data), top)


def _completion_top(token: TokenText) -> dict[str, float] | None:
    """The likeliest tokens, and the one that stands there."""
    if token.logprob is None:
        return None
    top = {text: _finite(value) for text, _, value in reversed(token.top)}  # of two with one name the likelier counts
    return top if token.text in top else top | {token.text: _finite(token.logprob)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also for NaN, which compares false
