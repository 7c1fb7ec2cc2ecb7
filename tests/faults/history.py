"""Checks what the clients of a run saw against what they were promised. It shares no code with the cluster.

I1   each accepted request has exactly one terminal event, and nothing behind it
I2   its tokens are those of the run without faults, or a strict prefix of them and an error behind
I9   attempts of all requests / requests <= 1.2, and at most 10 more than requests when these are few
I10  nobody waits beyond its deadline and a second
"""

from dataclasses import dataclass

from baton.tests.faults.traffic import Call

MAX_ATTEMPTS_PER_REQUEST = 1.2
GRACE_S = 1.0
RETRYABLE = (429, 502, 503)  # what a client may be told of a fault; other codes are the client's own or a bug


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What this run's clients may expect."""

    deadline_s: float = 30.0
    statuses: tuple[int, ...] = (*RETRYABLE, 504)
    all_finish: bool = False
    spare_attempts: int = 10  # beyond the share, for runs of few requests: the floor of the retry budget


def violations(calls: list[Call], references: dict, promise: Promise) -> list[str]:
    """Every broken promise, in words; the calls must have ended."""
    found = []
    for i, call in enumerate(calls):
        reference = references.get(call.ask.key)
        problems = [*_ending(call, promise), *_tokens(call, reference), *_time(call, promise)]
        found += [f"call {i}: {problem} ({call})" for problem in problems]
    return found + _attempts(calls, promise)


def _ending(call: Call, promise: Promise) -> list[str]:
    found = []
    if len(call.terminals) != 1:
        found.append(f"I1: terminal events {call.terminals}")
    if call.after_end:
        found.append(f"I1: {call.after_end} events behind the end")
    is_cut = call.end in ("cut", "timeout", "done without a finish reason")
    if is_cut and not (call.may_be_cut and call.end == "cut"):
        found.append(f"I1: ended as {call.end!r}")
    if call.end == "error" and not (call.error.get("message") and call.error.get("type")):
        found.append(f"I1: the error says nothing: {call.error}")
    if call.end == "error" and call.status != 200 and call.status not in promise.statuses:
        found.append(f"status {call.status} is not one of {promise.statuses}: {call.error}")
    if call.status in (429, 503) and not call.headers.get("retry-after", "").isdigit():
        found.append(f"{call.status} without Retry-After")
    if promise.all_finish and call.end not in ("finished", "cancelled"):
        found.append(f"should have finished: {call.error or call.end}")
    return found


def _tokens(call: Call, reference: list[int] | None) -> list[str]:
    if reference is None:
        return ["I2: no reference run knows this request"] if call.ids else []
    wanted = reference[: call.ask.max_tokens]
    assert len(wanted) == call.ask.max_tokens, "the reference run was longer"
    if call.ids != wanted[: len(call.ids)]:
        at = next(i for i, (a, b) in enumerate(zip(call.ids, [*wanted, None], strict=False)) if a != b)
        return [f"I2: token {at} is {call.ids[at]}, the run without faults has {wanted[at : at + 1]}"]
    if call.end == "finished" and len(call.ids) != len(wanted):
        return [f"I2: finished after {len(call.ids)} of {len(wanted)} tokens"]
    if call.end == "error" and len(call.ids) == len(wanted):
        return ["I2: an error behind a whole answer"]
    return []


def _time(call: Call, promise: Promise) -> list[str]:
    took = call.ended - call.started
    return (
        [f"I10: took {took:.1f} s of {promise.deadline_s} s"] if took > promise.deadline_s + GRACE_S else []
    )


def _attempts(calls: list[Call], promise: Promise) -> list[str]:
    known = [call.attempts for call in calls if call.attempts]
    allowed = max(MAX_ATTEMPTS_PER_REQUEST * len(known), len(known) + promise.spare_attempts)
    return [f"I9: {sum(known)} attempts for {len(known)} requests"] if sum(known) > allowed else []
