"""The running requests and the last ended ones: their figures, never their content.

A request is kept whole while any of its rooms is open, since workers may still report its cost. Then only its
figures stay, for the last `KEPT` requests, and views are computed on demand. An API key sees its own
requests, an operator's key sees all.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from msgspec import Struct

from ..http.rate_limits import Caller
from ..rooms.room import RoomPhase
from ..rooms.timeline import Account, Timeline
from ..rooms.waterfall import WaterfallPart, waterfall_of
from .request_state import ClientRequest, Entry

KEPT = 256
SHORT = 8  # digits of an id that are shown and that find a request


class RequestRow(Struct, frozen=True, kw_only=True):
    """One request in a list. Times are milliseconds, null if unknown.

    For several choices it has sums, and the times of the first choice.
    """

    id: str
    """The first digits of its first room, as in log lines."""
    arrived: float
    """Unix seconds."""
    state: str
    """queued, prefilling, streaming or ended."""
    outcome: str | None
    """As in baton_requests_total; null while it runs."""
    choices: int
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    handoff_ms: float | None
    handoff_bytes: int | None
    accept_length: float | None
    e2e_ms: float
    prefill: str | None
    """First digits of the prefill worker of the last attempt; the next field is decode's."""
    decode: str | None


class RequestList(Struct, frozen=True, kw_only=True):
    """The body of /requests, the newest first."""

    now: float
    """Unix seconds."""
    requests: list[RequestRow]


class ChoiceView(Struct, frozen=True, kw_only=True):
    """One choice of a request."""

    room: str
    state: str
    prompt_tokens: int
    output_tokens: int
    timeline: Timeline
    waterfall: list[WaterfallPart]


class RequestView(Struct, frozen=True, kw_only=True):
    """The body of /requests/{id}."""

    id: str
    """The id in the answer; empty for a request without an answer."""
    arrived: float
    """Unix seconds."""
    state: str
    outcome: str | None
    choices: list[ChoiceView]


class Kept(Struct, frozen=True, kw_only=True):
    """The kept figures of one request."""

    caller_id: str
    reply_id: str
    request_id: str
    arrived: float  # Unix seconds
    state: str
    outcome: str | None
    accounts: list[Account]  # figures of its choices

    def is_named(self, name: str) -> bool:
        ids = (self.reply_id, self.request_id)
        return _is_named(name, ids, [account.room for account in self.accounts])

    def view(self) -> RequestView:
        """The body of /requests/{id}."""
        choices = [_choice(account) for account in self.accounts]
        return RequestView(
            id=self.reply_id, arrived=self.arrived, state=self.state, outcome=self.outcome, choices=choices
        )

    def row(self) -> RequestRow:
        """The row of the request in the list."""
        return _row(self, [account.timeline() for account in self.accounts])


class History:
    """Filled by the dispatcher. `wall` gives Unix seconds, `clock` monotonic seconds."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall
        self._open: dict[int, ClientRequest] = {}  # by id(), valid while the request is in this table
        self._num_open_rooms: dict[int, int] = {}
        self._ended: deque[Kept] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"History({len(self._open)} open, {len(self._ended)} ended)"

    def begun(self, request: ClientRequest) -> None:
        """Adds a request that starts. All its rooms exist."""
        self._open[id(request)] = request
        self._num_open_rooms[id(request)] = len(request.entries)

    def closed(self, entry: Entry) -> None:
        """Notes that a room is closed: no worker holds anything of it any more."""
        key = id(entry.request)
        self._num_open_rooms[key] -= 1
        if not self._num_open_rooms[key]:
            del self._num_open_rooms[key]
            request = self._open.pop(key)
            self._ended.append(self._keep(request))
            request.entries = []  # breaks a reference cycle

    def recent(self, caller: Caller, limit: int) -> RequestList:
        """The newest requests that `caller` may see, running ones first."""
        running = (request for request in reversed(self._open.values()) if caller.may_see(request.caller.id))
        rows = [self._keep(request).row() for request in islice(running, limit)]
        ended = (kept.row() for kept in reversed(self._ended) if caller.may_see(kept.caller_id))
        return RequestList(now=round(self._wall(), 3), requests=rows + list(islice(ended, limit - len(rows))))

    def find(self, name: str, caller: Caller) -> RequestView | None:
        """The newest request that matches an answer's id, a request's id, or at least the first 8 digits of a
        room."""
        for request in reversed(self._open.values()):
            rooms = [entry.room.room for entry in request.entries]
            ids = (request.tag.reply_id, request.tag.request_id)
            if caller.may_see(request.caller.id) and _is_named(name, ids, rooms):
                return self._keep(request).view()
        for kept in reversed(self._ended):
            if caller.may_see(kept.caller_id) and kept.is_named(name):
                return kept.view()
        return None

    def _keep(self, request: ClientRequest) -> Kept:
        now = self._clock()
        return Kept(
            caller_id=request.caller.id,
            reply_id=request.tag.reply_id,
            request_id=request.tag.request_id,
            arrived=round(self._wall() - (now - request.arrived), 3),
            state=state_of(request),
            outcome=request.outcome,
            accounts=[entry.account(now) for entry in request.entries],
        )


def _is_named(name: str, ids: Sequence[str], rooms: Sequence[str]) -> bool:
    if name and name in ids:
        return True
    return len(name) >= SHORT and any(room.startswith(name) for room in rooms)


def state_of(request: ClientRequest) -> str:
    """The state of the choice that is furthest on."""
    if request.outcome is not None:
        return "ended"
    phases = {entry.room.phase for entry in request.entries}
    for phase in (RoomPhase.STREAMING, RoomPhase.PREFILLING, RoomPhase.QUEUED):
        if phase in phases:
            return str(phase.value)
    return "ended"  # only workers' figures are awaited


def _choice(account: Account) -> ChoiceView:
    return ChoiceView(
        room=account.room,
        state=account.phase,
        prompt_tokens=account.num_prompt,
        output_tokens=account.num_output,
        timeline=account.timeline(),
        waterfall=waterfall_of(account),
    )


def _row(kept: Kept, timelines: list[Timeline]) -> RequestRow:
    first, accounts = timelines[0], kept.accounts
    handed = [t.handoff_bytes for t in timelines if t.handoff_bytes is not None]
    return RequestRow(
        id=accounts[0].room[:SHORT],
        arrived=kept.arrived,
        state=kept.state,
        outcome=kept.outcome,
        choices=len(accounts),
        attempts=sum(t.attempts for t in timelines),
        prompt_tokens=sum(account.num_prompt for account in accounts),
        cached_tokens=sum(account.cached_tokens for account in accounts),
        output_tokens=sum(account.num_output for account in accounts),
        queue_ms=first.queue_ms,
        ttft_ms=first.ttft_ms,
        tpot_ms=first.tpot_ms,
        handoff_ms=first.handoff_ms,
        handoff_bytes=sum(handed) if handed else None,
        accept_length=first.accept_length,
        e2e_ms=max(t.e2e_ms for t in timelines),
        prefill=_short(first.prefill_instance),
        decode=_short(first.decode_instance),
    )


def _short(instance: str | None) -> str | None:
    return instance[:SHORT] if instance else None
