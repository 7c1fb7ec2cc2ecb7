"""The answer to one generation request: a JSON object, or server-sent events.

One task serves a request. It waits on its inbox, turns all waiting events into one write, and ends when every
choice has ended, when the request failed, or when the client left. When a stop string ends a choice, its text
goes out at once; only the usage at the end of the answer waits briefly for the decode worker's token counts.
"""

import asyncio
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ..api.body_reader import header_of
from ..errors import (
    RETRY_AFTER_S,
    ApiError,
    ErrorBody,
    bad_request,
    deadline_exceeded,
    overloaded,
    unavailable,
    upstream,
)
from ..http.exchange import AnswerSink, Work
from ..rooms.attempt import BAD_EMBEDS, BAD_GRAMMAR, DEADLINE_EXCEEDED, GRAMMARS_OVERDUE
from ..rooms.effects import Deliver, Failure, Settled
from ..rooms.quarantine import QUARANTINED
from ..scheduling.admission_queue import OVERLOADED
from ..scheduling.dispatcher import Dispatcher
from ..scheduling.inbox import Disconnected, Inbox, InboxEvent
from ..scheduling.request_state import Entry, work_of
from .generation import Choice, Piece
from .replies import (
    AnyTimeline,
    Builder,
    ChoiceTimelines,
    CompletionDetails,
    DraftDetails,
    PromptDetails,
    Usage,
)

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx passes the events on at once
}
JSON_HEADERS = {"content-type": "application/json"}
RAW_SSE = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]
RAW_JSON = [(name.encode(), value.encode()) for name, value in JSON_HEADERS.items()]


IGNORED_FIELDS = b"x-baton-ignored-fields"


class ClientLeft(Exception):
    """The client left while the answer was generated."""


class AnswerOptions(Struct, frozen=True, kw_only=True, gc=False):
    """The form of answer that a request asked for."""

    is_stream: bool
    wants_usage: bool
    wants_timeline: bool
    num_choices: int  # per prompt
    num_tries: int  # per prompt; the best `num_choices` of them are the answer
    wants_usage_always: bool = False
    wants_accepted: bool = False  # accepted drafts come in chunks of their own
    ignored: tuple[str, ...] = ()  # the fields of the request that were left out


class Answer:
    """The answer of one request. `entries` are the rooms of its choices, in order."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        clock: Callable[[], float],
        entries: Sequence[Entry],
        inbox: Inbox,
        choices: Sequence[Choice],
        builder: Builder,
        options: AnswerOptions,
    ) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._entries = entries
        self._inbox = inbox
        self._choices = choices
        self._builder = builder
        self._options = options
        self.request_id = entries[0].request.tag.request_id  # an ID of /requests/ID
        self._named = [(b"x-request-id", self.request_id.encode())]
        if options.ignored:
            self._named.append((IGNORED_FIELDS, header_of(options.ignored)))

    async def serve(self, sink: AnswerSink) -> None:
        """Writes the answer to its end.

        Every room of the request is closed afterwards, also after an error.
        """
        self._inbox.own()
        sink.when_left(lambda: self._inbox.put(0, Disconnected()))
        try:
            await (self._stream(sink) if self._options.is_stream else self._collect(sink))
        except ClientLeft:
            pass
        except asyncio.CancelledError:
            if not self._inbox.is_cut:
                raise
        finally:
            for entry in self._entries:
                self._dispatcher.client_left(entry)

    def work(self) -> Work:
        """What the request cost so far, for the access log."""
        return work_of(self._entries)

    # --- the two forms --------------------------------------------------------------------------------------

    async def _collect(self, sink: AnswerSink) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        try:
            while not self._is_done:
                for index, piece in self._absorb(await self._inbox.take()):
                    pieces[index].append(piece)
            await self._settle()
        except ApiError as error:
            return await self._send_error(sink, error)
        whole = [Piece.joined(pieces[index]) for index in self._best()]
        timeline = self._timeline() if self._options.wants_timeline else None
        await sink.start(200, RAW_JSON + self._named)
        await sink.write(self._builder.whole(whole, self._usage(), timeline), is_last=True)

    async def _stream(self, sink: AnswerSink) -> None:
        """Streams the answer.

        Headers go out with the first tokens, so that an early failure still sets the HTTP status.
        """
        is_open = [False] * len(self._choices)
        is_started = is_done = is_last = False
        try:
            while not is_done:
                data = b""
                for index, piece in self._absorb(await self._inbox.take()):
                    if not is_open[index]:
                        is_open[index] = True
                        data += self._builder.opening(index)
                    usage = self._usage() if self._options.wants_usage_always else None
                    data += self._builder.chunk(index, piece, usage)
                if not is_started:
                    is_started = True
                    await sink.start(200, RAW_SSE + self._named)
                if is_done := self._is_done:
                    is_last = not (self._wants_accounts and self._is_settling)
                    data += self._closing() if is_last else b""
                if data:
                    await sink.write(data, is_last=is_last)
            if not is_last:
                await self._settle()
                await sink.write(self._closing(), is_last=True)
        except ApiError as error:
            if not is_started:
                return await self._send_error(sink, error)
            await sink.write(self._builder.failed(error), is_last=True)

    async def _send_error(self, sink: AnswerSink, error: ApiError) -> None:
        more = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await sink.start(error.status, RAW_JSON + more + self._named)
        await sink.write(error.encode(), is_last=True)

    def _closing(self) -> bytes:
        usage = self._usage() if self._options.wants_usage else None
        return (
            self._builder.closing(usage, self._timeline() if self._options.wants_timeline else None)
            + self._builder.end
        )

    def _best(self) -> list[int]:
        """The indices of the tries to answer with: per prompt those with the highest mean log probability."""
        options = self._options
        if options.num_tries == options.num_choices:
            return list(range(len(self._choices)))
        best: list[int] = []
        for first in range(0, len(self._choices), options.num_tries):
            tries = range(first, first + options.num_tries)
            best += sorted(tries, key=lambda i: -self._choices[i].mean_logprob)[: options.num_choices]
        return best

    # --- events ---------------------------------------------------------------------------------------------

    @property
    def _is_done(self) -> bool:
        return all([choice.finish for choice in self._choices])

    @property
    def _wants_accounts(self) -> bool:
        return self._options.wants_usage or self._options.wants_timeline

    @property
    def _is_settling(self) -> bool:
        return any([entry.room.is_settling for entry in self._entries])

    async def _settle(self) -> None:
        """Waits for the decode worker's token counts of choices that ended at a stop string.

        The rooms bound the wait.
        """
        while self._is_settling:
            self._absorb(await self._inbox.take())

    def _absorb(self, events: Sequence[tuple[int, InboxEvent]]) -> list[tuple[int, Piece]]:
        """The pieces of a batch of events. Raises ApiError for a failure and ClientLeft."""
        pieces = []
        for index, event in events:
            if isinstance(event, Deliver):
                pieces += [(index, piece) for piece in self._pieces_of(index, event)]
            elif isinstance(event, Disconnected):
                raise ClientLeft
            elif isinstance(event, Failure):
                if not self._choices[index].finish:
                    raise error_of(event)
            elif not isinstance(event, Settled):
                pieces.append((index, self._end(index, event.reason)))
        return pieces

    def _pieces_of(self, index: int, event: Deliver) -> list[Piece]:
        """The pieces of one decode step: one, or accepted drafts and the target's own token apart."""
        if not self._options.wants_accepted or len(event.ids) < 2:
            return [self._add(index, event)]
        before = self._choices[index].num_tokens
        drafts = self._add(index, Deliver(event.ids[:-1], event.logprobs[:-1], event.prompt, event.experts))
        num_accepted = self._choices[index].num_tokens - before  # less after a stop string
        own = self._add(index, Deliver(event.ids[-1:], event.logprobs[-1:]))
        return [replace(drafts, accepted=num_accepted), own]

    def _end(self, index: int, reason: str) -> Piece:
        try:
            return self._choices[index].end(reason)
        except ValueError:  # a worker sent no experts
            raise _failed() from None

    def _add(self, index: int, event: Deliver) -> Piece:
        choice = self._choices[index]
        try:
            piece = choice.add(event)
        except ValueError:  # a worker sent no log probabilities, or no experts
            raise _failed() from None
        if piece.finish:
            self._dispatcher.stopped(self._entries[index])
        return piece

    # --- accounts -------------------------------------------------------------------------------------------

    def _usage(self) -> Usage:
        num_prompt = num_output = num_reasoning = drafted = accepted = cached = 0
        for number, (entry, choice) in enumerate(zip(self._entries, self._choices, strict=True)):
            room = entry.room
            num_output += choice.num_tokens
            num_reasoning += choice.num_reasoning
            if number % self._options.num_tries == 0:  # the choices of a prompt share it
                num_prompt += room.num_prompt
                cached += room.cached_tokens
            if (decode := room.decode_timeline) is not None:
                drafted += decode.drafted_tokens
                accepted += decode.accepted_tokens
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
            completion_tokens_details=CompletionDetails(reasoning_tokens=num_reasoning),
            draft_tokens_details=DraftDetails(drafted_tokens=drafted, accepted_tokens=accepted),
        )

    def _timeline(self) -> AnyTimeline:
        now = self._clock()
        timelines = [entry.timeline(now) for entry in self._entries]
        return timelines[0] if len(timelines) == 1 else ChoiceTimelines(timelines)


def error_of(event: Failure) -> ApiError:
    """The client's error for a failure.

    Each kind has a fixed message, since a worker's own message may name its host.
    """
    if event.kind == "NoWorkers" or event.kind == "Shutdown":
        return unavailable(event.message)
    if event.kind in ("QueueTimeout", OVERLOADED):
        return overloaded(event.message, max(RETRY_AFTER_S, event.retry_after_s))
    if event.kind == "Refused":
        return bad_request("No worker takes this request: " + event.message[:200])
    if event.kind == BAD_GRAMMAR:
        message = "No worker can follow the schema, the grammar or the tools of this request. Ask for less."
        return bad_request(message, code="grammar_too_costly")
    if event.kind == BAD_EMBEDS:
        message = "The model's logits for these prompt_embeds are not finite. Send others."
        return bad_request(message, param="prompt_embeds")
    if event.kind == GRAMMARS_OVERDUE:
        return overloaded("The workers compile too many schemas already. Try again later.")
    if event.kind == QUARANTINED:
        message = "Workers were lost while they served this request, so it is not tried again."
        return ApiError(500, ErrorBody(message, "server_error", None, "request_quarantined"))
    if event.kind == "PeerLost":
        return upstream("A worker was lost while it served this request. Try again.", "worker_lost")
    if event.kind == DEADLINE_EXCEEDED:
        return deadline_exceeded()
    if event.kind == "Timeout":
        return upstream("A worker made no progress with this request. Try again.", "worker_timeout")
    return _failed()


def _failed() -> ApiError:
    return upstream("A worker failed to serve this request. Try again.", "worker_failed")
