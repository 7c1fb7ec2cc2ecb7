"""The common parts of answers of all APIs: usage, timelines, and their encoding as JSON or server-sent
events.

JSON cannot represent an infinite log probability: -9999 stands for it, as in the OpenAI API.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ..errors import ApiError
from ..rooms.timeline import Timeline
from .generation import Piece

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
# Line ends for some readers of server-sent events, though not for the standard; JSON may spell them as
# escapes.
LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


class PromptDetails(Struct):
    """`prompt_tokens_details`."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionDetails(Struct):
    """`completion_tokens_details`; predictions are those of a client (`prediction`), and there are none."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class DraftDetails(Struct):
    """`draft_tokens_details`: tokens that the drafter proposed, and those of them that became output."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Usage(Struct):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    draft_tokens_details: DraftDetails


class ChoiceTimelines(Struct):
    """The timelines of an answer with several choices, in order."""

    choices: list[Timeline]


class TokenizeReply(Struct):
    """POST /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Struct):
    """POST /detokenize."""

    prompt: str


class SglExt(Struct):
    """`sgl_ext` of a choice: what SGLang adds to the API."""

    routed_experts: str


AnyTimeline = Timeline | ChoiceTimelines


class Frame(Struct, frozen=True, kw_only=True):
    """The fields that all objects of one answer share."""

    id: str
    created: int  # Unix seconds
    model: str
    num_top: int = -1  # log probabilities; -1: none
    wants_ids: bool = False
    prompt_ids: tuple[list[int], ...] = ()  # of each prompt, if the client wants ids
    num_choices: int = 1  # per prompt
    wants_accepted: bool = False  # chunks say how many of their tokens are accepted drafts


class Builder(Protocol):
    """Encodes one answer, as one body or as events."""

    end: bytes  # the bytes after the last event

    def whole(self, answers: Sequence[Piece], usage: Usage, timeline: AnyTimeline | None) -> bytes:
        """The body of an answer that is not streamed, one piece per choice."""

    def opening(self, index: int) -> bytes:
        """The first events of a choice."""

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """The events of one piece, with the usage so far if given; empty when the piece adds nothing."""

    def closing(self, usage: Usage | None, timeline: AnyTimeline | None) -> bytes:
        """The last events; empty when the request asked for none of their content."""

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""


def sse(data: bytes, event: str = "") -> bytes:
    """One server-sent event, with a name where it is given."""
    for raw, escaped in LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + data + b"\n\n"


def sse_error(error: ApiError) -> bytes:
    """The last event of a stream that failed."""
    return sse(error.encode())


def is_whole_stream(last: bytes) -> bool:
    """Whether the last bytes of a stream mark it as complete."""
    return (
        last.endswith(DONE)
        or b"event: response.completed\n" in last
        or b"event: response.incomplete\n" in last
        or b"event: message_stop\n" in last
    )


def compact(value: object) -> bytes:
    """JSON of a struct."""
    return msgspec.json.encode(value)


def sgl_ext(piece: Piece) -> SglExt | UnsetType:
    """The experts of a choice that has ended; unset unless the request asked for them."""
    return UNSET if piece.experts is None else SglExt(piece.experts)


def raw_timeline(timeline: AnyTimeline | None) -> Raw | UnsetType:
    """A timeline as a field of an answer; unset unless the request asked for it."""
    return UNSET if timeline is None else Raw(compact(timeline))


def finite(logprob: float) -> float:
    """A log probability that JSON can represent."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also for NaN, which compares false
