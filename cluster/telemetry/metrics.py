"""Counters of the router, and the text of its /metrics: these counters, its condition and its workers'
heartbeats.

`metric_names` and docs/metrics.md list the names.

A client's request counts once, when its last choice has ended, with the outcome of the first failed choice.
Tokens and bytes are summed over its choices, each of which runs through the workers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from . import metric_names as names
from .families import Families, rendered
from .histogram import Histogram
from .metric_names import MetricName
from .worker_metrics import WorkerRecord, worker_families

ROUTES = ("chat", "completions", "responses", "messages")
OUTCOMES = ("ok", "rejected", "cancelled", "failed", "timeout")
PRIORITIES = ("high", "normal", "low")
FULL_POOL, PREEMPTED = "full pool", "preempted"  # reasons of retractions


class RequestClass(Struct, frozen=True):
    """The labels of a request in histograms."""

    route: str = "chat"
    """The endpoint: one of ROUTES, or other."""
    priority: str = "normal"
    """high, normal or low."""


def priority_class(priority: int) -> str:
    """The class of a priority. Below 0, which is served first, is high; above 0 is low."""
    if priority == 0:
        return "normal"
    return "high" if priority < 0 else "low"


USUAL = RequestClass()
Tallies = dict[MetricName, Histogram]


class Handoff(Struct, frozen=True, kw_only=True):
    """The bytes and times of one choice's hand-off."""

    num_bytes: int
    """Bytes of KV and features."""
    seconds: float
    """Seconds from the first announcement to the last block."""


class PromptWork(Struct, frozen=True, kw_only=True):
    """A prefill worker's work for one choice."""

    queue_s: float
    """Seconds in the queue, until the first forward."""
    compute_s: float
    """Seconds from the first forward to token 1."""


class RequestRecord(Struct, frozen=True, kw_only=True):
    """The figures of one ended request."""

    outcome: str
    """One of OUTCOMES."""
    kind: RequestClass = USUAL
    """The class under which its times and lengths count."""
    e2e_s: float
    """Seconds from the read request to its end."""
    ttft_s: float | None = None
    """Seconds to the first token; None when there was none."""
    queued_s: float = 0.0
    """Seconds with none of its choices at a worker."""
    prompt_tokens: int = 0
    """Tokens of the prompt, counted once per choice."""
    cached_tokens: int = 0
    """Prompt tokens that prefill found in its prefix cache."""
    output_tokens: int = 0
    """Tokens sent to the client."""
    verify_steps: int = 0
    """Verifies of drafts."""
    drafted_tokens: int = 0
    """Tokens that the drafter proposed."""
    accepted_tokens: int = 0
    """Proposed tokens that the target accepted."""
    lengths: tuple[tuple[int, int], ...] = ()
    """Prompt and output tokens of each choice that got a token."""
    prompts: tuple[PromptWork, ...] = ()
    """The prefill work of choices that have a report of it."""
    handoffs: tuple[Handoff, ...] = ()
    """The hand-offs of choices with pulled blocks."""


class ClassLoad(Struct, frozen=True, kw_only=True):
    """The requests of one class at one moment."""

    priority: str
    """One of PRIORITIES."""
    queued: int = 0
    """Choices that wait for a place."""
    running: int = 0
    """Choices at the workers."""
    oldest_wait_s: float = 0.0
    """Seconds since the arrival of the first one in line; 0 while none waits."""
    retracted: dict[str, int] = {}
    """Totals of requests whose pages or place went to others, by reason."""


@dataclass(frozen=True, kw_only=True)
class RouterRecord:
    """The router's condition at the moment of a scrape."""

    queued: int
    """Requests waiting for a free worker."""
    running: int
    """Requests at the workers."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Totals of rare events by name."""
    responses: Mapping[int, int] = field(default_factory=dict)
    """Answers over HTTP by status."""
    registered: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Registered workers by role and state."""
    is_ready: bool = False
    """Whether /ready answers 200."""
    lacks_prefill: bool = False
    """Whether decode workers compute prompts because there is no prefill worker."""
    canaries: Mapping[str, int] = field(default_factory=dict)
    """Totals by outcome."""
    failing_pairs: tuple[tuple[str, str, str, int], ...] = ()
    """Tuples of prefill's and decode's instance, kind of the last failure, consecutive failed probes."""
    classes: tuple[ClassLoad, ...] = ()
    """The requests by class."""


class RouterMetrics:
    """The counters and histograms of a router that serves the model `model`; used by one thread."""

    def __init__(self, model: str) -> None:
        self.model = model
        # a rate needs the value 0 before the first event; series of other priorities begin with a request
        self._requests = dict.fromkeys(OUTCOMES, 0)
        self._totals = dict.fromkeys(names.COUNTED, 0)
        self._tallies = {name: Histogram(name) for name in names.OF_ALL}
        self._of_class: dict[RequestClass, Tallies] = {}
        for route in ROUTES:
            self._tallies_of(RequestClass(route))

    def __repr__(self) -> str:
        return f"RouterMetrics({sum(self._requests.values())} requests)"

    def request_ended(self, record: RequestRecord) -> None:
        """Counts a request once, at its end."""
        assert record.outcome in OUTCOMES, record.outcome
        self._requests[record.outcome] += 1
        totals, tallies = self._totals, self._tallies
        totals[names.PROMPT_TOKENS] += record.prompt_tokens
        totals[names.CACHED_TOKENS] += record.cached_tokens
        totals[names.VERIFY_STEPS] += record.verify_steps
        totals[names.DRAFTED_TOKENS] += record.drafted_tokens
        totals[names.ACCEPTED_TOKENS] += record.accepted_tokens
        totals[names.OUTPUT_TOKENS] += record.output_tokens
        of_class = self._tallies_of(record.kind)
        of_class[names.REQUEST_SECONDS].observe(record.e2e_s)
        of_class[names.QUEUE_WAIT].observe(record.queued_s)
        if record.ttft_s is not None:
            of_class[names.TTFT].observe(record.ttft_s)
        for num_prompt, num_output in record.lengths:
            of_class[names.PROMPT_LENGTH].observe(num_prompt)
            of_class[names.OUTPUT_LENGTH].observe(num_output)
        for prompt in record.prompts:
            tallies[names.PREFILL_QUEUE].observe(prompt.queue_s)
            tallies[names.PREFILL].observe(prompt.compute_s)
        for handoff in record.handoffs:
            totals[names.HANDOFF_BYTES] += handoff.num_bytes
            tallies[names.HANDOFF_SECONDS].observe(handoff.seconds)
            if handoff.seconds > 0:
                tallies[names.HANDOFF_RATE].observe(handoff.num_bytes / handoff.seconds)

    def tokens_arrived(self, kind: RequestClass, gap_s: float, num_tokens: int) -> None:
        """Observes the `num_tokens` of one message, `gap_s` seconds after the previous message."""
        assert num_tokens > 0
        self._tallies_of(kind)[names.GAP].observe(gap_s / num_tokens)

    def render(self, router: RouterRecord, workers: Iterable[WorkerRecord]) -> bytes:
        """The body of /metrics."""
        families = Families(self.model, names.OF_ROUTER)
        self._add_totals(families)
        add_router(families, router)
        return rendered("router", families, worker_families(self.model, workers))

    def _tallies_of(self, kind: RequestClass) -> Tallies:
        """The histograms of a class. Routes and priorities are few, so there are few classes."""
        found = self._of_class.get(kind)
        if found is None:
            found = self._of_class[kind] = {name: Histogram(name) for name in names.OF_CLASS}
        return found

    def _add_totals(self, families: Families) -> None:
        for outcome, total in self._requests.items():
            families.add(names.REQUESTS, (outcome,), total)
        for name, total in self._totals.items():
            families.add(name, (), total)
        for name, tally in self._tallies.items():
            families.add_histogram(name, (), tally)
        for kind, tallies in self._of_class.items():
            for name, tally in tallies.items():
                families.add_histogram(name, (kind.route, kind.priority), tally)


def add_router(families: Families, router: RouterRecord) -> None:
    """Adds the router's condition. Events with a metric of their own are left out of the other events."""
    families.add(names.READY, (), router.is_ready)
    families.add(names.LACKS_PREFILL, (), router.lacks_prefill)
    for outcome, total in sorted(router.canaries.items()):
        families.add(names.CANARIES, (outcome,), total)
    for prefill, decode, kind, num_failures in router.failing_pairs:
        families.add(names.FAILING_PAIRS, (prefill, decode, kind), num_failures)
    families.add(names.QUEUED, (), router.queued)
    families.add(names.RUNNING, (), router.running)
    for one in router.classes:
        families.add(names.CLASS_REQUESTS, (one.priority, "queued"), one.queued)
        families.add(names.CLASS_REQUESTS, (one.priority, "running"), one.running)
        families.add(names.CLASS_WAIT, (one.priority,), one.oldest_wait_s)
        for reason in (FULL_POOL, PREEMPTED):
            families.add(names.RETRACTIONS, (one.priority, reason), one.retracted.get(reason, 0))
    for (role, state), num_workers in sorted(router.registered.items()):
        families.add(names.REGISTERED, (role, state), num_workers)
    responses = dict.fromkeys(names.KNOWN_STATUSES, 0) | dict(router.responses)
    for status, total in sorted(responses.items()):
        families.add(names.RESPONSES, (str(status),), total)
    for event, name in names.OF_EVENT.items():
        families.add(name, (), router.events.get(event, 0))
    events = dict.fromkeys(names.KNOWN_EVENTS, 0) | dict(router.events)
    for event, total in sorted(events.items()):
        if event not in names.OF_EVENT:
            families.add(names.ROUTER_EVENTS, (event,), total)
