"""The dispatcher's state of the requests: a request with its choices, and the room of each choice.

A request has one or several choices, and each choice has a room of its own. Queue time and the figures of
/metrics belong to the request. A choice that waits for its own siblings does not count as waiting. A request
with eight choices counts once.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from ...cluster.protocol.messages import Cancel, OfferPrefix, Prefill, PromptEmbeds, Reserve, Sampling
from ...cluster.protocol.prompt_embeds import cache_salt
from ...cluster.telemetry.metrics import (
    USUAL,
    Handoff,
    PromptWork,
    RequestClass,
    RequestRecord,
    priority_class,
)
from ...cluster.telemetry.tracing import OpenSpan, Passing
from ..api.prompt_embeds import Embeddings
from ..http.exchange import Work
from ..http.rate_limits import ANYONE, Caller
from ..rooms.attempt import DEADLINE_EXCEEDED, GRAMMARS_OVERDUE
from ..rooms.attempt_log import AttemptTrace
from ..rooms.room import Room
from ..rooms.timeline import Account, Timeline, account_of
from ..workers.eligibility import Need
from ..workers.registry import Worker
from .inbox import Inbox
from .output_estimates import claim_of
from .prefixes import SeenPrompt
from .request_limits import young_fields

OUTCOMES = {
    "QueueTimeout": "rejected",
    "Overloaded": "rejected",
    "NoWorkers": "rejected",
    "Refused": "rejected",
    GRAMMARS_OVERDUE: "rejected",
    "Timeout": "timeout",
    DEADLINE_EXCEEDED: "timeout",
}  # outcomes by kind of a Failure; "failed" for any other


class Job(Struct, frozen=True, kw_only=True, dict=True):  # dict: for cached properties
    """One requested choice."""

    prompt_ids: list[int]
    sampling: Sampling
    arrived: float  # monotonic seconds
    tokenize_s: float
    timeout_s: float = 0.0  # the client's limit; 0: none
    priority: int = 0  # lower goes first
    route: str = "chat"  # the endpoint, as metrics name it
    caller: Caller = ANYONE
    cache_salt: str = ""  # the client's own; see `salt_of`
    embeds: Embeddings | None = None  # of the first tokens of the prompt, whose ids are 0
    may_record: bool = False  # the caller does not object to a record of its tokens for training

    @property
    def answers_like(self) -> tuple[str, str]:
        """The key of answers that are about as long: the caller's and the endpoint's."""
        return self.caller.id, self.route

    @cached_property
    def salt(self) -> str:
        """The salt of its prompt in the workers' prefix caches."""
        return cache_salt(self.order_salt, self.embeds.rows if self.embeds is not None else None)

    @cached_property
    def order_salt(self) -> str:
        """The salt in its orders: the tenant's, and below it the client's own."""
        return salt_of(self.caller.salt, self.cache_salt)

    @property
    def embeds_bytes(self) -> int:
        """Bytes of its embeddings."""
        return len(self.embeds.data) if self.embeds is not None else 0

    @cached_property
    def need(self) -> Need:
        """The requirements of its first attempt on workers."""
        asks = young_fields(self.sampling, self.order_salt, has_embeds=self.embeds is not None)
        return Need(len(self.prompt_ids), self.sampling.max_new_tokens, asks=asks)


@dataclass(frozen=True, kw_only=True)
class Tag:
    """The data that observers attach to a request."""

    reply_id: str = ""  # id of the answer
    request_id: str = ""  # the client's, else the id of the answer
    span: OpenSpan = field(default_factory=Passing)
    # called when its last choice has ended
    on_end: Callable[["ClientRequest", float], None] = lambda request, now: None


@dataclass(eq=False)
class ClientRequest:
    """The common state of the choices of one client request."""

    arrived: float
    waiting_since: float | None  # None while a choice is at the workers
    waited_s: float = 0.0  # seconds of earlier waits during which no choice was at the workers
    excused_s: float = 0.0  # of these, seconds in which the router or a worker that they wait for stood still
    priority: int = 0  # lower goes first
    kind: RequestClass = USUAL
    caller: Caller = ANYONE
    may_record: bool = False  # as in `Job`
    num_placed: int = 0  # number of choices at the workers
    entries: list["Entry"] = field(default_factory=list)
    outcomes: dict[int, str] = field(default_factory=dict)  # outcomes by choice
    is_warned: bool = False
    tag: Tag = field(default_factory=Tag)

    @property
    def outcome(self) -> str | None:
        """The outcome: the first one other than ok, else ok; None while a choice runs."""
        if len(self.outcomes) < len(self.entries):
            return None
        for outcome in self.outcomes.values():
            if outcome != "ok":
                return outcome
        return "ok"

    def waited(self, now: float) -> float:
        """Seconds during which none of the choices was at the workers."""
        return self.waited_s + (max(0.0, now - self.waiting_since) if self.waiting_since is not None else 0.0)

    def note_phase(self, entry: "Entry", now: float) -> None:
        """Updates the wait after an event of a choice, which may have gone to the workers or left them."""
        if entry.room.is_at_workers == entry.is_placed:
            return
        entry.is_placed = not entry.is_placed
        self.num_placed += 1 if entry.is_placed else -1
        if self.num_placed and self.waiting_since is not None:
            self.waited_s, self.waiting_since = self.waited(now), None
        elif not self.num_placed:
            self.waiting_since = now

    def end(self, index: int, outcome: str, now: float) -> bool:
        """Notes the outcome of a choice; a second call changes nothing. True for the last choice to end."""
        if index in self.outcomes:
            return False
        self.outcomes[index] = outcome
        if self.outcome is None:
            return False
        self.tag.on_end(self, now)
        return True

    def record(self, now: float) -> RequestRecord:
        """The figures of a request whose choices have all ended."""
        first = ended = None  # the earliest first token and the latest end
        num_prompt = num_cached = num_output = num_verifies = num_drafted = num_accepted = 0
        lengths: list[tuple[int, int]] = []
        prompts: list[PromptWork] = []
        handoffs: list[Handoff] = []
        for entry in self.entries:
            room, stamps = entry.room, entry.room.stamps
            if stamps.first_token is not None:
                first = stamps.first_token if first is None else min(first, stamps.first_token)
            if stamps.ended is not None:
                ended = stamps.ended if ended is None else max(ended, stamps.ended)
            num_prompt += room.num_prompt
            num_cached += room.cached_tokens
            num_output += room.num_output
            if room.num_output:
                lengths.append((room.num_prompt, room.num_output))
            if (prefill := room.prefill_timeline) is not None:
                prompts.append(
                    PromptWork(queue_s=prefill.queue_ms / 1000, compute_s=prefill.prefill_ms / 1000)
                )
            if (decode := room.decode_timeline) is not None:
                num_verifies += decode.verify_steps
                num_drafted += decode.drafted_tokens
                num_accepted += decode.accepted_tokens
                if decode.handoff_bytes:
                    handoffs.append(Handoff(num_bytes=decode.handoff_bytes, seconds=decode.handoff_ms / 1000))
        ended = now if ended is None else ended
        return RequestRecord(
            outcome=self.outcome or "ok",
            kind=self.kind,
            e2e_s=ended - self.arrived,
            ttft_s=first - self.arrived if first is not None else None,
            prompt_tokens=num_prompt,
            cached_tokens=num_cached,
            output_tokens=num_output,
            verify_steps=num_verifies,
            drafted_tokens=num_drafted,
            accepted_tokens=num_accepted,
            queued_s=self.waited(ended),
            lengths=tuple(lengths),
            prompts=tuple(prompts),
            handoffs=tuple(handoffs),
        )


@dataclass(eq=False)
class Entry:
    """One choice: its room, and the router's own state of it."""

    room: Room
    job: Job
    request: ClientRequest
    inbox: Inbox
    index: int  # index of the choice within the client's request
    queued_at: float
    queued_s: float = 0.0  # seconds over all waits
    not_before: float = 0.0
    pairless_since: float | None = None  # the time since which no pair could ever hold it
    is_placed: bool = False  # whether its request has counted it as placed
    is_waiting: bool = False  # whether it is in the waiting list
    number: int = 0  # order of joining the waiting list; 0: not yet
    fingerprint: str = ""  # fingerprint of the last attempt's pair
    weights_hash: str = ""  # weights of the last attempt's pair
    last_arrival: float = 0.0
    begun_epoch: int = -1  # epoch of the newest attempt that has given tokens
    shown_epoch: int = -1  # epoch of the attempt that has shown its pair to work
    quiet_until: float = 0.0  # the room's value at its last tick; 0 after events other than tokens
    trace: AttemptTrace = field(default_factory=AttemptTrace)
    expected_output: int = 0  # tokens to count on for the whole answer; 0: all that it may have
    placed_output: int = 0  # output tokens before the current attempt
    granted: int = 0  # tokens of the current attempt whose pages decode does not take back
    _prompt: SeenPrompt | None = None

    @property
    def need(self) -> Need:
        """The requirements of the next attempt on workers. Output so far counts as prompt."""
        need, num_output = self.job.need, self.room.num_output
        if not num_output:
            return replace(need, expected=self.claim[0])
        left = need.max_new - num_output
        return Need(
            need.prompt + num_output,
            left,
            self.fingerprint,
            need.asks,
            self.weights_hash,
            expected=self.claim[0],
        )

    @property
    def claim(self) -> tuple[int, int]:
        """What the next attempt, or the current one at its start, counts on: see `claim_of`."""
        room = self.room
        remaining = room.sampling.max_new_tokens - room.num_output
        return claim_of(self.expected_output, room.num_output, remaining, room.num_retractions)

    @property
    def unused_tokens(self) -> int:
        """Of the tokens that it was charged with: output that it did not get, and the prompt if no worker had
        it."""
        num_prompt = self.job.need.prompt if self.trace.attempts else 0
        return max(0, self.job.need.total - num_prompt - self.room.num_output)

    @property
    def prompt(self) -> SeenPrompt:
        """The tokens that the next attempt computes first, or the current attempt did."""
        if self._prompt is None:
            self._prompt = SeenPrompt([*self.room.prompt_ids, *self.room.output_ids], self.job.salt)
        return self._prompt

    def requeue(self, now: float, not_before: float) -> None:
        """Requeues the entry after a failed attempt. The next attempt continues after the output so far."""
        self.queued_at, self.not_before, self._prompt = now, not_before, None
        self.pairless_since = None

    def account(self, now: float) -> Account:
        """A snapshot of its figures, without tokens."""
        room, until = self.room, now
        if room.pair is None and room.stamps.ended is not None:  # the room never got a pair
            until = room.stamps.ended
        waiting = until - self.queued_at if room.pair is None else 0.0
        return account_of(
            room,
            arrived=self.job.arrived,
            tokenize_s=self.job.tokenize_s,
            queued_s=self.queued_s + waiting,
            now=now,
            trace=self.trace,
        )

    def timeline(self, now: float) -> Timeline:
        return self.account(now).timeline()


def new_request(jobs: Sequence[Job], now: float, tag: Tag | None = None) -> ClientRequest:
    """A request whose choices have no rooms yet."""
    if not jobs:
        return ClientRequest(arrived=now, waiting_since=now, tag=tag or Tag())
    arrived = jobs[0].arrived
    for job in jobs:
        arrived = min(arrived, job.arrived)
    return ClientRequest(
        arrived=arrived,
        waiting_since=now,
        priority=jobs[0].priority,
        kind=RequestClass(route=jobs[0].route, priority=priority_class(jobs[0].priority)),
        caller=jobs[0].caller,
        may_record=jobs[0].may_record,
        tag=tag or Tag(),
    )


def salt_of(tenant: str, own: str) -> str:
    """The salt of a tenant's request with a salt `own` of the client; equal for equal pairs only."""
    return f"{tenant}\0own {hashlib.sha256(own.encode()).hexdigest()}" if own else tenant


def work_of(entries: Sequence[Entry]) -> Work:
    """What the choices of a request cost so far, for the access log."""
    first, request = entries[0], entries[0].request
    num_prompt = num_cached = num_output = num_gaps = num_verifies = num_accepted = 0
    starts: list[float] = []
    gaps_s = 0.0
    for entry in entries:
        room, stamps = entry.room, entry.room.stamps
        num_prompt += room.num_prompt
        num_cached += room.cached_tokens
        num_output += room.num_output
        if stamps.first_token is not None:
            starts.append(stamps.first_token)
            if stamps.last_token is not None and room.num_output > 1:
                num_gaps += room.num_output - 1
                gaps_s += stamps.last_token - stamps.first_token
        if (decode := room.decode_timeline) is not None:
            num_verifies += decode.verify_steps
            num_accepted += decode.accepted_tokens
    last = first.trace.last
    return Work(
        room=first.room.room,
        outcome=request.outcome or "running",
        num_prompt=num_prompt,
        num_cached=num_cached,
        num_output=num_output,
        ttft_s=min(starts) - request.arrived if starts else None,
        tpot_s=gaps_s / num_gaps if num_gaps else None,
        accept_length=round(1 + num_accepted / num_verifies, 4) if num_verifies else None,
        prefill=last.prefill if last is not None else "",
        decode=last.decode if last is not None else "",
    )


def reserved_workers(on_probation: Iterable[Entry], room: Room) -> set[str]:
    """The workers on which `room` may not be placed now.

    These are the workers of rooms that must be alone. If `room` itself has a record of deaths, the workers of
    all rooms on probation belong to them, too.
    """
    pairs = [
        entry.room.pair
        for entry in on_probation
        if entry.room.alone_on or (room.deaths and entry.room.is_on_probation)
    ]
    return {instance for pair in pairs if pair is not None for instance in pair.instances}


def addressed(
    message: Reserve | Prefill | OfferPrefix | Cancel, entry: Entry, now: float
) -> Reserve | Prefill | OfferPrefix | Cancel:
    """An order with the class and the wait of its request, the tenant's salt, the embeddings, the trace
    context and the id. Decode's also has the output to count on and the consent to record it. Embeddings have
    no ids that could be recorded."""
    if isinstance(message, Cancel):
        return message
    salt, embeds, trace = entry.job.order_salt, entry.job.embeds, entry.request.tag.span.context
    request_id, priority = entry.request.tag.request_id, entry.request.priority
    waited_ms = max(0, round((now - entry.job.arrived) * 1000))
    if isinstance(message, Reserve):
        may_record = entry.request.may_record and embeds is None
        expected, granted = entry.claim
        message = replace(
            message,
            may_record=may_record,
            expected_output=expected,
            granted_output=granted,
            priority=priority,
            waited_ms=waited_ms,
        )
    elif isinstance(message, Prefill):
        keeps_pages = entry.room.num_retractions > 0
        message = replace(message, priority=priority, waited_ms=waited_ms, keeps_pages=keeps_pages)
    if not (salt or embeds or trace or request_id):
        return message
    rows = embeds.rows if embeds is not None else None
    if isinstance(message, OfferPrefix):
        return message if message.room is not None else replace(message, salt=salt, embeds=rows)
    return replace(
        message,
        salt=salt,
        embeds=rows,
        traceparent=trace.parent,
        tracestate=trace.state,
        request_id=request_id,
    )


def embeds_before(
    message: Reserve | Prefill | OfferPrefix | Cancel, entry: Entry, worker: Worker
) -> Iterable[PromptEmbeds]:
    """The messages that `worker` needs before an order. Decode needs none for a prompt that it does not
    compute, unless its drafter reads rows of the prompt."""
    embeds = entry.job.embeds
    if embeds is None or isinstance(message, (Cancel, OfferPrefix)):
        return ()
    is_computed = isinstance(message, Prefill) or message.prefill_instance is None
    return embeds.parts_before(message) if is_computed or worker.hello.feature_width else ()
