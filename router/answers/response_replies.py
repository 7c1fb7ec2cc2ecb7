"""Answers of /v1/responses: one object, or a stream of events. The order of the events:

response.created, response.in_progress
per item     response.output_item.added ... response.output_item.done
reasoning    response.content_part.added, response.reasoning_text.delta ... .done, response.content_part.done
a message    response.content_part.added, response.output_text.delta ... .done, response.content_part.done
a call       response.function_call_arguments.delta ... .done
response.completed, or response.incomplete at max_output_tokens, or response.failed
"""

import secrets
from collections.abc import Sequence

from msgspec import UNSET, Raw, Struct, UnsetType

from ..api.response_bodies import Told
from ..errors import ApiError, ErrorBody
from ..formats.parts import CallPart
from .chat_replies import TokenLogprobs, chat_logprobs
from .generation import Piece
from .replies import AnyTimeline, DraftDetails, Frame, Usage, compact, raw_timeline, sse


class OutputText(Struct):
    """The text of a message, or of reasoning."""

    text: str
    logprobs: list[TokenLogprobs] | UnsetType = []
    annotations: list[None] | UnsetType = []
    type: str = "output_text"


class OutputItem(Struct, omit_defaults=True):
    """Reasoning, a message, or a function call."""

    id: str
    type: str
    status: str
    role: str = ""
    content: list[OutputText] | UnsetType = UNSET
    call_id: str = ""
    name: str = ""
    arguments: str | UnsetType = UNSET
    summary: list[None] | UnsetType = UNSET  # of reasoning: none is made


class InputDetails(Struct):
    """`input_tokens_details`."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """`output_tokens_details`."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """`usage`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    draft_tokens_details: DraftDetails


class Incomplete(Struct):
    """The reason of an answer's early end."""

    reason: str = "max_output_tokens"


class Reasoning(Struct, frozen=True):
    """`reasoning`: none."""

    effort: None = None
    summary: None = None


class Response(Struct, kw_only=True):
    """The body of an answer, and of the events about the whole response."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
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
    usage: ResponseUsage | None = None
    error: ErrorBody | None = None
    incomplete_details: Incomplete | None = None
    object: str = "response"
    background: bool = False
    previous_response_id: None = None
    reasoning: Reasoning = Reasoning()
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"
    user: None = None
    timeline: Raw | UnsetType = UNSET


class Event(Struct, omit_defaults=True):
    """Any event. Its type determines which fields are set."""

    type: str
    sequence_number: int | None = None
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str = ""
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str = ""
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprobs] | UnsetType = UNSET


class ResponseBuilder:
    """Encodes one response, which has one choice, as one body or as events."""

    end = b""

    def __init__(self, frame: Frame, told: Told) -> None:
        self._frame = frame
        self._told = told
        self._num_events = 0
        self._items: list[OutputItem] = []  # the last one is open while `_is_open`
        self._is_open = False
        self._finish = ""

    def whole(self, answers: Sequence[Piece], usage: Usage, timeline: AnyTimeline | None) -> bytes:
        """The body of an answer that is not streamed."""
        self.chunk(0, answers[0])
        return compact(self._ended(usage, timeline))

    def opening(self, index: int) -> bytes:
        """The first events, with an empty response."""
        made = self._response("in_progress")
        return self._event("response.created", response=made) + self._event(
            "response.in_progress", response=made
        )

    def chunk(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """The events for a piece."""
        events = self._add_reasoning(piece.reasoning) if piece.reasoning else b""
        if piece.text or (piece.logprobs and not self._is_in("reasoning")):
            events += self._add_text(piece)
        for call in piece.calls:
            events += self._add_call(call)
        if piece.finish:
            self._finish = piece.finish
            if not self._items:
                events += self._add_text(Piece(""))
            events += self._close_item()
        return events

    def closing(self, usage: Usage | None, timeline: AnyTimeline | None) -> bytes:
        """The last events, with the complete response."""
        made = self._ended(usage, timeline)
        return self._event(f"response.{made.status}", response=made)

    def failed(self, error: ApiError) -> bytes:
        """The response with its error."""
        made = self._response("failed")
        made.error = error.body
        return self._event("response.failed", response=made)

    # --- items ----------------------------------------------------------------------------------------------

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self._items[-1].type == kind

    def _add_reasoning(self, text: str) -> bytes:
        events = b""
        if not self._is_in("reasoning"):
            made = OutputItem(_id("rs"), "reasoning", "in_progress", content=[], summary=[])
            events = self._open_item(made)
            events += self._event("response.content_part.added", **self._place(), part=_reasoning_text(""))
            made.content = [_reasoning_text("")]
        item = self._items[-1]
        assert item.content is not UNSET
        item.content[0].text += text
        return events + self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _add_text(self, piece: Piece) -> bytes:
        events = b""
        if not self._is_in("message"):
            made = OutputItem(_id("msg"), "message", "in_progress", "assistant", [])
            events = self._open_item(made)
            events += self._event("response.content_part.added", **self._place(), part=OutputText(""))
            made.content = [OutputText("")]
        item = self._items[-1]
        assert item.content is not UNSET
        content, logprobs = (
            item.content[0],
            [chat_logprobs(token, self._frame.num_top) for token in piece.logprobs],
        )
        content.text += piece.text
        content.logprobs = [*(content.logprobs or ()), *logprobs]
        if piece.text or logprobs:
            events += self._event(
                "response.output_text.delta", **self._place(), delta=piece.text, logprobs=logprobs
            )
        return events

    def _add_call(self, part: CallPart) -> bytes:
        events = b""
        if part.id:
            made = OutputItem(_id("fc"), "function_call", "in_progress", "", UNSET, part.id, part.name, "")
            events = self._open_item(made)
        item = self._items[-1]
        assert item.arguments is not UNSET
        item.arguments += part.arguments
        if part.arguments:
            place = {"item_id": item.id, "output_index": len(self._items) - 1}
            events += self._event("response.function_call_arguments.delta", **place, delta=part.arguments)
        return events

    def _open_item(self, item: OutputItem) -> bytes:
        events = self._close_item()
        self._items.append(item)
        self._is_open = True
        return events + self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item
        )

    def _close_item(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item, events = self._items[-1], b""
        item.status = "incomplete" if self._finish == "length" else "completed"
        if item.content is not UNSET:
            content = item.content[0]
            part = {"text": content.text, "logprobs": content.logprobs}
            events = self._event(f"response.{content.type}.done", **self._place(), **part)
            events += self._event("response.content_part.done", **self._place(), part=content)
        else:
            place = {"item_id": item.id, "output_index": len(self._items) - 1, "name": item.name}
            events = self._event("response.function_call_arguments.done", **place, arguments=item.arguments)
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, object]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1, "content_index": 0}

    # --- objects --------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: object) -> bytes:
        event = Event(kind, self._num_events, **fields)  # type: ignore[arg-type]
        self._num_events += 1
        return sse(compact(event), kind)

    def _ended(self, usage: Usage | None, timeline: AnyTimeline | None) -> Response:
        made = self._response("incomplete" if self._finish == "length" else "completed")
        made.incomplete_details = Incomplete() if self._finish == "length" else None
        made.timeline = raw_timeline(timeline)
        if usage is not None:
            made.usage = ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputDetails(usage.completion_tokens_details.reasoning_tokens),
                total_tokens=usage.total_tokens,
                draft_tokens_details=usage.draft_tokens_details,
            )
        return made

    def _response(self, status: str) -> Response:
        frame, told = self._frame, self._told
        return Response(
            id=frame.id,
            created_at=frame.created,
            model=frame.model,
            status=status,
            output=self._items,
            **{name: getattr(told, name) for name in told.__struct_fields__},
        )


def _reasoning_text(text: str) -> OutputText:
    return OutputText(text, UNSET, UNSET, "reasoning_text")


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
