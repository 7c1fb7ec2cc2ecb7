"""The JSON of answers to /v1/completions."""

from collections.abc import Sequence

from msgspec import UNSET, Raw, Struct, UnsetType

from ..errors import ApiError
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


class CompletionLogprobs(Struct):
    """`logprobs` of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """A choice of a completion, whole or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    accepted_drafts: int | UnsetType = UNSET  # in a chunk
    prompt_token_ids: list[int] | UnsetType = UNSET  # in its first chunk
    sgl_ext: SglExt | UnsetType = UNSET  # in its last chunk


class CompletionReply(Struct):
    """A whole answer, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    timeline: Raw | UnsetType = UNSET


class CompletionBuilder:
    """Encodes one completion."""

    end = DONE

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._begun: set[int] = set()  # choices that have their first chunk

    def whole(self, answers: Sequence[Piece], usage: Usage, timeline: AnyTimeline | None) -> bytes:
        """The body of an answer that is not streamed, one piece per choice."""
        choices = [self._choice(index, piece) for index, piece in enumerate(answers)]
        return compact(self._reply(choices, usage, raw_timeline(timeline)))

    def opening(self, index: int) -> bytes:
        """Empty: a completion has no chunk before its text."""
        return b""

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """The chunk for a piece; empty when it adds nothing to the text."""
        has_ids = self._frame.wants_ids and piece.ids
        if not (piece.text or piece.logprobs or piece.finish or has_ids or piece.accepted):
            return b""
        choice = self._choice(index, piece)
        choice.accepted_drafts = piece.accepted if self._frame.wants_accepted else UNSET
        return sse(compact(self._reply([choice], UNSET if usage is None else usage)))

    def closing(self, usage: Usage | None, timeline: AnyTimeline | None) -> bytes:
        """The last chunk, without choices, for usage and timeline; empty without both."""
        if usage is None and timeline is None:
            return b""
        return sse(compact(self._reply([], UNSET if usage is None else usage, raw_timeline(timeline))))

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return sse_error(error)

    def _reply(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType = UNSET,
        timeline: Raw | UnsetType = UNSET,
    ) -> CompletionReply:
        frame = self._frame
        return CompletionReply(
            frame.id, "text_completion", frame.created, frame.model, choices, usage, timeline
        )

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        ids = piece.ids if self._frame.wants_ids else UNSET
        made = CompletionChoice(index, piece.text, self._logprobs(piece), piece.finish or None, ids)
        made.sgl_ext = sgl_ext(piece)
        if self._frame.prompt_ids and index not in self._begun:
            self._begun.add(index)
            made.prompt_token_ids = self._frame.prompt_ids[index // self._frame.num_choices]
        return made

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        num_top, tokens = self._frame.num_top, piece.logprobs
        if num_top < 0 or not tokens:
            return None
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[None if token.logprob is None else finite(token.logprob) for token in tokens],
            top_logprobs=[_top_of(token) for token in tokens] if num_top else None,
            text_offset=[token.at for token in tokens],
        )


def _top_of(token: TokenText) -> dict[str, float] | None:
    """The likeliest tokens, and the chosen token, by name."""
    if token.logprob is None:
        return None
    top = {
        text: finite(value) for text, _, value in reversed(token.top)
    }  # of two tokens with the same name, the likelier one counts
    return top if token.text in top else top | {token.text: finite(token.logprob)}
