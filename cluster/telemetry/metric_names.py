"""The name, type, labels and meaning of every metric; docs/metrics.md shows the same table.

Every metric but those of the build has the label `model_name`. A process serves one model, so the label adds
no series. `route` and `priority` add some: a histogram has its buckets once for each pair that had a request.
There are at most five routes and three priorities, and a client cannot make up others.
"""

from dataclasses import dataclass

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
WAIT_BUCKETS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
HANDOFF_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
PROMPT_BUCKETS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # tokens
OUTPUT_BUCKETS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens
RATE_BUCKETS = (1e6, 1e7, 5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 5e10, 1e11)  # bytes per second
MODEL = "model_name"
CLASS = ("route", "priority")
WORKER = ("role", "worker")  # not `instance`, a label that Prometheus sets itself
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclass(frozen=True, kw_only=True, eq=False)  # each is one of a kind: found by identity, which is quick
class MetricName:
    """One metric. A counter's series end in `_total`, a histogram's in `_bucket`, `_sum` and `_count`."""

    name: str
    """The name without the suffix of its series."""
    kind: str
    """COUNTER, GAUGE or HISTOGRAM."""
    text: str
    """The metric's meaning."""
    labels: tuple[str, ...] = (MODEL,)
    buckets: tuple[float, ...] = ()
    """The upper bounds of a histogram's buckets."""


def _counter(name: str, text: str, *labels: str) -> MetricName:
    return MetricName(name=f"baton_{name}", kind=COUNTER, text=text, labels=(MODEL, *labels))


def _gauge(name: str, text: str, *labels: str) -> MetricName:
    return MetricName(name=f"baton_{name}", kind=GAUGE, text=text, labels=(MODEL, *labels))


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> MetricName:
    return MetricName(
        name=f"baton_{name}", kind=HISTOGRAM, text=text, labels=(MODEL, *labels), buckets=buckets
    )


def _build(name: str, text: str) -> MetricName:
    return MetricName(name=name, kind=GAUGE, text=text, labels=("version", "role"))


BUILD = _build("baton_build_info", "The release; always 1.")
OLD_BUILD = _build("baton_build", "The former name of baton_build_info, to be removed in the next release.")

REQUESTS = _counter("requests", "Requests that ended, with all their choices.", "outcome")
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens, once for every choice.")
CACHED_TOKENS = _counter("cached_prompt_tokens", "Prompt tokens of a prefix cache, or pulled from decode.")
OUTPUT_TOKENS = _counter("output_tokens", "Tokens sent to clients.")
VERIFY_STEPS = _counter("verify_steps", "Verifies of drafts.")
DRAFTED_TOKENS = _counter("drafted_tokens", "Tokens proposed by the drafter.")
ACCEPTED_TOKENS = _counter("accepted_tokens", "Proposed tokens accepted by the target.")
HANDOFF_BYTES = _counter("handoff_bytes", "KV and feature bytes pulled.")
TTFT = _histogram("time_to_first_token_seconds", "Request read to first token.", TTFT_BUCKETS, *CLASS)
GAP = _histogram("inter_token_seconds", "Mean gap of the tokens of one message.", GAP_BUCKETS, *CLASS)
REQUEST_SECONDS = _histogram("request_seconds", "Request read to last token.", REQUEST_BUCKETS, *CLASS)
QUEUE_WAIT = _histogram(
    "queue_wait_seconds", "Time of a request with none of its choices at a worker.", WAIT_BUCKETS, *CLASS
)
PROMPT_LENGTH = _histogram(
    "request_prompt_tokens", "Prompt length of choices that got a token.", PROMPT_BUCKETS, *CLASS
)
OUTPUT_LENGTH = _histogram(
    "request_output_tokens", "Output length of choices that got a token.", OUTPUT_BUCKETS, *CLASS
)
PREFILL_QUEUE = _histogram(
    "prefill_queue_seconds", "Prompt at its prefill worker to its first forward.", WAIT_BUCKETS
)
PREFILL = _histogram("prefill_seconds", "First forward of a prompt to its first token.", TTFT_BUCKETS)
HANDOFF_SECONDS = _histogram("handoff_seconds", "Last blocks ready to all landed.", HANDOFF_BUCKETS)
HANDOFF_RATE = _histogram("handoff_bytes_per_second", "Bytes of a hand-off by its time.", RATE_BUCKETS)
QUEUED = _gauge("queued_requests", "Waiting for a free worker.")
RUNNING = _gauge("running_requests", "At the workers.")
RESPONSES = _counter("http_responses", "Answers over HTTP, of any address.", "status")
WORKER_DEATHS = _counter("worker_deaths", "Workers that died, hung or could not be reached.")
EJECTIONS = _counter("ejections", "Times that a worker failed too often and was avoided for a while.")
RETRIES = _counter("retries", "Attempts that another pair went on with.")
ROUTER_EVENTS = _counter("router_events", "Rarer things.", "event")
RETRACTIONS = _counter("retractions", "Requests whose pages or place went to others.", "priority", "reason")
CLASS_REQUESTS = _gauge("class_requests", "Choices that wait or are at the workers.", "priority", "state")
CLASS_WAIT = _gauge("class_oldest_wait_seconds", "Wait of the first in line.", "priority")
REGISTERED = _gauge("registered_workers", "Workers that this router knows.", "role", "state")
READY = _gauge("ready", "Whether /ready says so.")
LACKS_PREFILL = _gauge(
    "lacks_prefill", "Whether decode workers serve that have no prefill worker and are not aggregated."
)
CANARIES = _counter("canaries", "Tiny requests of the router's own.", "outcome")
FAILING_PAIRS = _gauge(
    "failing_pairs", "Canaries in a row that failed on a pair.", "prefill", "decode", "kind"
)

WORKER_UP = _gauge("worker_up", "Always 1.", *WORKER, "state")
WORKER_INFO = _gauge("worker_info", "Always 1.", *WORKER, "host", "device", "card", "fingerprint")
WORKER_PAGES = _gauge("worker_pages", "KV pages.", *WORKER, "kind")
WORKER_TIER_BYTES = _gauge("worker_tier_bytes", "The KV cache below the pool.", *WORKER, "tier", "kind")
WORKER_TIER_HITS = _counter(
    "worker_tier_hit_tokens", "Prompt tokens that came back from below the pool.", *WORKER, "tier"
)
WORKER_TIER_MOVED = _counter(
    "worker_tier_moved_bytes", "Bytes of pages copied.", *WORKER, "tier", "direction"
)
WORKER_REQUESTS = _gauge("worker_requests", "Requests at a worker.", *WORKER, "kind")
WORKER_GRAPHS = _gauge("worker_graphs", "Captured graphs.", *WORKER, "kind")
WORKER_ACCEPT_LENGTH = _gauge("worker_accept_length", "Tokens committed per verify, of late.", *WORKER)
WORKER_SPEC_STEPS = _gauge("worker_spec_steps", "Draft steps of the newest verify.", *WORKER)
WORKER_GRAPH_REPLAYS = _counter("worker_graph_replays", "Forwards that replayed a graph.", *WORKER, "kind")
WORKER_GRAPH_PADDING = _counter(
    "worker_graph_pad_rows", "Rows that graphs computed for nobody.", *WORKER, "kind"
)
WORKER_GRAPH_FALLBACKS = _counter(
    "worker_graph_fallbacks", "Forwards that ran eagerly.", *WORKER, "kind", "reason"
)
WORKER_COMPILATIONS = _counter(
    "worker_compilations_after_ready", "Kernel variants compiled while serving.", *WORKER
)
WORKER_CAPTURES = _counter("worker_captures_after_ready", "Graphs captured while serving.", *WORKER)
WORKER_ALLOCATIONS = _counter(
    "worker_allocations_after_ready", "Blocks of memory taken from the GPU's driver while serving.", *WORKER
)
WORKER_EVENTS = _counter("worker_events", "A worker's own counters.", *WORKER, "event")

# metrics of the router's events
OF_EVENT = {"worker_lost": WORKER_DEATHS, "breaker_opened": EJECTIONS, "requeued": RETRIES}
# Series of RESPONSES, and below of ROUTER_EVENTS, that are 0 before the first event: PromQL sees no increase
# from nothing.
KNOWN_STATUSES = (200, 400, 401, 403, 404, 429, 500, 502, 503, 504)
KNOWN_EVENTS = (
    "client_stalled", "control_denied", "control_handshakes_failed", "control_malformed", "control_oversized",
    "damaged_message", "damaged_order", "grammar_cut", "idempotent_attached", "idempotent_replayed",
    "local_prefill", "orphan_message", "paused", "preempted", "prefix_compute",
    "prefix_news_lost", "prefix_pull", "quarantined", "resumed", "retracted", "retry_denied",
    "role_moved", "shared_prompt", "spans_dropped",
    "stale_hello", "stale_message", "template_cut", "template_worker_lost", "tls_failed", "unknown_worker",
    "unshared",
    "worker_dropped_rooms", "worker_stalled",
)  # fmt: skip
COUNTED = (
    PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS, VERIFY_STEPS, DRAFTED_TOKENS, ACCEPTED_TOKENS, HANDOFF_BYTES
)  # fmt: skip
OF_CLASS = (
    TTFT,
    GAP,
    REQUEST_SECONDS,
    QUEUE_WAIT,
    PROMPT_LENGTH,
    OUTPUT_LENGTH,
)  # histograms with route and priority
OF_ALL = (PREFILL_QUEUE, PREFILL, HANDOFF_SECONDS, HANDOFF_RATE)  # histograms without
OF_CANARIES = (READY, LACKS_PREFILL, CANARIES, FAILING_PAIRS)
OF_BUILD = (BUILD, OLD_BUILD)
OF_ROUTER = (
    REQUESTS,
    *COUNTED,
    *OF_CLASS,
    *OF_ALL,
    QUEUED,
    RUNNING,
    RESPONSES,
    *OF_EVENT.values(),
    ROUTER_EVENTS,
    RETRACTIONS,
    CLASS_REQUESTS,
    CLASS_WAIT,
    REGISTERED,
    *OF_CANARIES,
)
ROUTER_NAMES = (*OF_BUILD, *OF_ROUTER)
WORKER_NAMES = (
    WORKER_UP, WORKER_INFO, WORKER_PAGES, WORKER_TIER_BYTES, WORKER_TIER_HITS, WORKER_TIER_MOVED,
    WORKER_REQUESTS, WORKER_GRAPHS, WORKER_ACCEPT_LENGTH,
    WORKER_SPEC_STEPS, WORKER_GRAPH_REPLAYS, WORKER_GRAPH_PADDING, WORKER_GRAPH_FALLBACKS,
    WORKER_COMPILATIONS, WORKER_CAPTURES, WORKER_ALLOCATIONS, WORKER_EVENTS,
)  # fmt: skip
