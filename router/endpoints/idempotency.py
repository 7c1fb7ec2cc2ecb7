"""`Idempotency-Key`: requests with the same key and body within ten minutes share one generation and its
answer.

    running    the first request generates, in a task of its own. Every request with the key reads the answer
               from its beginning. A generation without readers for `ABANDONED_S` is cancelled.
    kept       a complete answer with status 200 is sent again, byte for byte
    forgotten  an answer that failed, was cancelled, grew too long, or is older than `KEEP_S`: the next
               request starts anew

A request without a seed gets one made from key and body, so a restarted router generates the same text again.
Number and bytes of kept answers are bounded: the oldest is dropped first.
"""

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from ..answers.answer import Answer
from ..answers.replies import is_whole_stream
from ..api.body_checks import SEED_MASK
from ..api.request_headers import LONGEST_KEY
from ..errors import ApiError, ErrorBody, bad_request, printable
from ..http.exchange import AnswerSink, RawHeaders, Work

KEEP_S = 600.0
ABANDONED_S = 10.0
MAX_KEPT = 1024  # answers
MAX_BYTES = 64 << 20  # bytes of all kept answers
MAX_ANSWER = 4 << 20  # bytes; a longer one is given once and not kept
STALLED_S = 30.0  # a reader that takes nothing for this long is dropped

Begin = Callable[[], Awaitable[Answer]]


def checked_key(raw: str | None) -> str:
    """The header's value, "" without one. Raises ApiError (400)."""
    if raw is None:
        return ""
    if not 0 < len(raw) <= LONGEST_KEY or not (raw.isascii() and raw.isprintable()):
        raise bad_request(f"Idempotency-Key must be 1 to {LONGEST_KEY} printable ASCII characters")
    return raw


def digest_of(key: str, path: str, body: bytes) -> bytes:
    """A SHA-256 of key, path and body."""
    hasher = hashlib.sha256()
    for part in (key.encode(), path.encode(), body):
        hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.digest()


def seed_of(digest: bytes) -> int:
    """The sampling seed of a request that names none."""
    return int.from_bytes(hashlib.sha256(b"seed" + digest).digest()[:8], "big") & SEED_MASK


class Recording:
    """The answer of one generation as far as it was written, and the number of its readers.

    It is an AnswerSink.
    """

    def __init__(self, digest: bytes, now: float) -> None:
        self.digest = digest
        self.created = now
        self.status = 0
        self.headers: RawHeaders = []
        self.parts: list[bytes] = []
        self._is_ended = False  # the last part of the body was written
        self.num_bytes = 0
        self.work: Callable[[], Work] | None = None  # of the request, once it was accepted
        self.request_id = ""  # of the request as well
        self.num_readers = 0
        self.is_over = False
        self.error: Exception | None = None
        self._on_abandoned: Callable[[], None] | None = None
        self._news = asyncio.Event()
        self._begun = asyncio.Event()

    def __repr__(self) -> str:
        return (
            f"Recording({len(self.parts)} parts, {self.num_readers} "
            f"readers{', over' if self.is_over else ''})"
        )

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete and successful, and may be sent again.

        A failed stream has an error at its end.
        """
        if not self.is_over or self.error is not None or not self._is_ended or self.num_bytes > MAX_ANSWER:
            return False
        is_stream = any(value.startswith(b"text/event-stream") for _, value in self.headers)
        return self.status == 200 and (not is_stream or is_whole_stream(self.parts[-1]))

    def begun(self) -> None:
        """The request was accepted."""
        self._begun.set()

    def when_left(self, callback: Callable[[], None]) -> None:
        """Calls back when the recording is abandoned."""
        self._on_abandoned = callback

    def abandon(self) -> None:
        """There are no readers any more: the generation ends."""
        if self._on_abandoned is not None:
            self._on_abandoned()

    async def start(self, status: int, headers: RawHeaders) -> None:
        """The status and header fields of the answer."""
        self.status, self.headers = status, headers

    async def write(self, data: bytes, *, is_last: bool) -> None:
        """A part of the answer's body."""
        self.parts.append(data)
        self.num_bytes += len(data)
        self._is_ended = is_last
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """The generation has ended, with an error or without."""
        self.is_over, self.error = True, error
        if self.work is not None:
            done = self.work()
            self.work = lambda: done  # without the objects of the answer
        self._on_abandoned = None  # it would keep alive all objects of the answer
        self._begun.set()
        self._wake()

    async def taken(self) -> None:
        """Waits until the request was accepted. Raises the ApiError that refused it."""
        await self._begun.wait()
        if self.error is not None and not self.parts:
            raise self.error

    async def read(self, num_seen: int) -> list[tuple[bytes, bool]]:
        """Waits for parts after the first `num_seen`: pairs (bytes, whether it is the last).

        Empty at the end.
        """
        while num_seen >= len(self.parts) and not self.is_over:
            await self._news.wait()
        num_parts = len(self.parts)
        return [(self.parts[i], self._is_ended and i == num_parts - 1) for i in range(num_seen, num_parts)]

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Replay:
    """An answer that is read from a recording, from its beginning."""

    def __init__(
        self, recording: Recording, left: Callable[[Recording], None], *, is_first: bool = False
    ) -> None:
        self._recording = recording
        self._is_first = is_first
        self._left = left
        recording.num_readers += 1

    @property
    def request_id(self) -> str:
        """Of the request that made the answer; "" if it was refused."""
        return self._recording.request_id

    @property
    def work(self) -> Callable[[], Work] | None:
        """For the access log: the work counts for the first reader only."""
        found = self._recording.work
        return found if self._is_first or found is None else lambda: replayed(found())

    async def serve(self, sink: AnswerSink) -> None:
        """Copies the recording to the end, or until the client leaves."""
        copying = asyncio.create_task(self._copy(sink))

        def leave() -> None:
            copying.cancel()

        sink.when_left(leave)
        try:
            await asyncio.wait({copying})
            if not copying.cancelled():
                copying.result()
        finally:
            copying.cancel()
            self._recording.num_readers -= 1
            self._left(self._recording)

    async def _copy(self, sink: AnswerSink) -> None:
        num_seen = 0
        while parts := await self._recording.read(num_seen):
            if not num_seen:
                await sink.start(self._recording.status, self._recording.headers)
            num_seen += len(parts)
            for data, is_last in parts:
                await asyncio.wait_for(sink.write(data, is_last=is_last), STALLED_S)


class Idempotency:
    """The recordings by key. Used on one event loop; `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float], events: Counter[str]) -> None:
        self._clock = clock
        self._events = events
        self._recordings: OrderedDict[str, Recording] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Idempotency({len(self._recordings)} keys, {len(self._tasks)} running)"

    async def answer(self, key: str, digest: bytes, begin: Begin) -> Replay:
        """The answer to a request, whose generation `begin` starts unless one with the key runs or is kept.

        Raises ApiError: 422 when the key was used with another body, else what `begin` raises.
        """
        self._sweep()
        recording = self._recordings.get(key)
        is_first = recording is None
        if recording is None:
            recording = self._recordings[key] = Recording(digest, self._clock())
            self._start(self._run(key, recording, begin))
        elif recording.digest != digest:
            raise _reused(key)
        else:
            self._events["idempotent_replayed" if recording.is_over else "idempotent_attached"] += 1
        replay = Replay(recording, self._reader_left, is_first=is_first)
        try:
            await recording.taken()
        except BaseException:
            recording.num_readers -= 1
            raise
        return replay

    def close(self) -> None:
        """Cancels running generations."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, key: str, recording: Recording, begin: Begin) -> None:
        error: Exception | None = None
        try:
            answer = await begin()
            recording.work, recording.request_id = answer.work, answer.request_id
            recording.begun()
            await answer.serve(recording)
        except Exception as raised:
            error = raised
        finally:
            recording.end(error)
            if not recording.is_whole and self._recordings.get(key) is recording:
                del self._recordings[key]

    def _reader_left(self, recording: Recording) -> None:
        if not recording.is_over and not recording.num_readers:
            self._start(self._abandon(recording))

    async def _abandon(self, recording: Recording) -> None:
        await asyncio.sleep(ABANDONED_S)
        if not recording.num_readers:
            recording.abandon()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sweep(self) -> None:
        """Drops finished answers that are too old or too many, the oldest first.

        The router's queue bounds running ones.
        """
        now = self._clock()
        kept = [(key, known) for key, known in self._recordings.items() if known.is_over]
        count, size = len(kept), sum(known.num_bytes for _, known in kept)
        for key, known in kept:
            if now - known.created < KEEP_S and count < MAX_KEPT and size <= MAX_BYTES:
                return
            del self._recordings[key]
            count, size = count - 1, size - known.num_bytes


def replayed(work: Work) -> Work:
    """The work of a request that reads the answer of an earlier one: none of its own."""
    return replace(
        work, outcome="replayed", num_prompt=0, num_cached=0, num_output=0, ttft_s=None, tpot_s=None,
        accept_length=None,
    )  # fmt: skip


def _reused(key: str) -> ApiError:
    key = key.partition(" ")[2]  # without the owner's id
    message = (
        f"The Idempotency-Key {printable(key)} was used with another request within ten minutes; "
        "use a new one."
    )
    return ApiError(422, ErrorBody(message, "invalid_request_error", None, "idempotency_key_reused"))
