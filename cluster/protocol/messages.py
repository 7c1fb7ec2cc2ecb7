"""All messages between baton's processes, as frozen typed structs.

Two planes, one tagged union per direction and plane. `ControlUp` goes from a worker to the router,
`ControlDown` from the router to a worker, `KVUp` from decode to prefill, `KVDown` from prefill to decode.
Each message of a room carries (room, epoch, instance): the room is attempt-independent, the epoch counts
attempts, and the instance is the random id of one process start. Upwards and on the KV plane the instance is
the sender's. Downwards it is the addressed worker's, so that a restarted worker drops messages to its
predecessor. Receivers drop and count stale messages.

Unknown fields are ignored and unknown tags refused, so version N talks to N+1. Numbers are bounded here,
once: a decoded message needs no second check of its ranges.
"""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

from .kv_messages import (
    Abort,
    Announce,
    Attach,
    Block,
    KVDown,
    KVHello,
    KVRefused,
    KVUp,
    KVWelcome,
    Layout,
    Pull,
    Release,
)
from .message_parts import (
    Count,
    Id,
    Message,
    RequestId,
    Small,
    Text,
    TokenId,
    TokenIds,
    TraceParent,
    TraceState,
    Unit,
)

PROTOCOL_MAJOR = 1

# --- parts of messages ------------------------------------------------------------------------------


class Sampling(Struct, frozen=True, kw_only=True):
    """The sampling options, with the fields and meanings of `engine.sampling_params.SamplingParams`."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_k: Small = 0  # 0: off
    top_p: Unit = 1.0
    min_p: Unit = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]] = {}
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 16
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] = []
    min_new_tokens: Small = 0  # no token ends the output before this many
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=-1, le=20)] = -1  # -1: none; 0: the chosen token's; k: also the top k
    prompt_logprobs: Annotated[
        int, Meta(ge=-1, le=20)
    ] = -1  # the same for the prompt's tokens from the second on
    routed_experts: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1  # experts of all rows from this one on
    grammar: Annotated[str, Meta(max_length=131072)] = (
        ""  # grammar of the output in llguidance's form; "": none
    )


# Fields of orders that workers of this protocol version may not know yet, and that change the answer or
# separate tenants' caches. A worker lists those that it obeys in its Hello, and is never sent others.
YOUNG_SAMPLING_FIELDS = ("min_new_tokens", "prompt_logprobs", "routed_experts", "grammar")
YOUNG_FIELDS = (*YOUNG_SAMPLING_FIELDS, "salt", "embeds")

CHANGING_ROLE = "changing role"  # state of a worker that drains and comes back in the other role

PULL_OK, PULL_DECLINED, PULL_LATE, PULL_LOST = PULL_ENDS = ("ok", "declined", "late", "lost")  # of a prefix

CANARY_SALT = "canary "  # the salt of a router's canary begins with it


def is_canary(salt: str) -> bool:
    """Whether an order with this salt is a router's canary and no client's request."""
    return salt.startswith(CANARY_SALT)


class PromptRows(Struct, frozen=True, kw_only=True):
    """The first `count` tokens of a prompt are embeddings, which `PromptEmbeds` messages bring before the
    order.

    Their ids in the order are 0. `digest` (SHA-256) stands for all of them: prefixes are shared only under an
    equal one.
    """

    count: Annotated[int, Meta(ge=1, le=1 << 20)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]


class PrefixPull(Struct, frozen=True, kw_only=True):
    """Where prefill may get the KV of the first `tokens` tokens of a prompt, whole pages of them: from decode
    worker `instance`, at `endpoint`, as room `transfer`. It waits for at most `patience_ms`, then it computes
    what did not come.

    `is_reader`: that worker is the decode worker of the same attempt, so it asks for no features of these
    tokens later. The pages come without features.
    """

    transfer: Id
    instance: Id
    endpoint: Text
    tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    patience_ms: Annotated[int, Meta(ge=1, le=60000)]
    is_reader: bool = False


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """A token's log probability under the raw target distribution, and the top ones as (token, logprob)."""

    logprob: float
    top: list[tuple[TokenId, float]] = []


class RoutedShape(Struct, frozen=True, kw_only=True):
    """The experts of a model: the numbers of the `layers` that have them, of `num_layers`; each token takes
    `top_k` of them.

    The experts of one row are those of each of `layers` in turn, `top_k` ids each, of `id_bytes` bytes,
    little-endian.
    """

    layers: Annotated[tuple[Small, ...], Meta(min_length=1, max_length=4096)]
    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    top_k: Annotated[int, Meta(ge=1, le=256)]
    id_bytes: Annotated[int, Meta(ge=1, le=2)]

    @property
    def row_bytes(self) -> int:
        """Bytes of all ids of one row."""
        return len(self.layers) * self.top_k * self.id_bytes


class PrefillTimeline(Struct, frozen=True, kw_only=True):
    """Prefill's times for a room, in milliseconds."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0  # in the prefix cache, pulled ones included
    pulled_tokens: Count = 0  # of these, tokens whose KV came from a decode worker for this room
    pull_ms: float = 0.0  # wait for such a pull, also for one that brought nothing; part of `queue_ms`
    chunks: Count = 0
    pull_end: Text = ""  # how it ended, one of PULL_ENDS; "": nothing was pulled, or an older worker
    work_ms: float = 0.0  # of the device, its rows' share of each forward; 0.0: an older worker

    @property
    def busy_ms(self) -> float:
        """Milliseconds for which the prompt kept the device busy. An older worker tells only `prefill_ms`,
        which is a multiple of that under load, since forwards wait behind each other.
        """
        return self.work_ms or self.prefill_ms


class DecodeTimeline(Struct, frozen=True, kw_only=True):
    """Decode's figures for a room: times in milliseconds, bytes on the wire, and draft counts."""

    handoff_ms: float = 0.0  # last blocks ready on prefill to last block landed
    handoff_bytes: Count = 0
    handoff_blocks: Count = 0
    handoff_shm_blocks: Count = 0  # blocks of these that were read from shared memory
    handoff_device_blocks: Count = 0  # blocks of these that were read from the memory of prefill's device
    handoff_nixl_blocks: Count = 0  # blocks of these that were read through NIXL
    have_tokens: Count = 0  # tokens of the prefix that decode already held and did not pull
    draft_prefill_ms: float = 0.0
    queue_ms: float = 0.0  # landed to first decode step
    decode_ms: float = 0.0  # first decode step to last token
    verify_steps: Count = 0
    drafted_tokens: Count = 0
    accepted_tokens: Count = 0


class GraphCounts(Struct, frozen=True, kw_only=True):
    """Captured graphs by kind."""

    prefill: Count = 0
    draft_prefill: Count = 0
    decode: Count = 0
    verify: Count = 0
    draft: Count = 0
    draft_extend: Count = 0


class DraftWidths(Struct, frozen=True, kw_only=True):
    """The sizes of a drafter: feature elements per token, elements of its hidden state, and the shape of a
    step.

    A step has `steps` levels, `topk` children of each expanded draft, and `tokens` tokens in the verify.
    """

    features: Small = 0
    hidden: Small = 0
    steps: Small = 0
    topk: Small = 0
    tokens: Small = 0


class Choice(Struct, frozen=True, kw_only=True):
    """The value of a setting that a worker was given or chose itself, and why."""

    value: Count | Text
    why: Text


class DraftHead(Struct, frozen=True, kw_only=True):
    """The weights that a decode worker drafts with, and its newest order to change them.

    `verifies` and `tokens` count the verifies of streams that began with these weights, and the tokens
    that those committed: tokens / verifies is their accept length.
    """

    path: Text
    fingerprint: Text
    feature_ids: Annotated[tuple[Small, ...], Meta(max_length=64)] = ()  # layers that they read
    verifies: Count = 0
    tokens: Count = 0
    order: Text = ""  # id of the newest SwapDraft; "": none yet
    state: Text = ""  # of that order: busy, checked, other, done, refused or leaving
    fault: Text = ""  # the reason of a refusal, or the difference of an `other` head, in one line
    found: Text = ""  # fingerprint of the checkpoint that the order names, once it was read
    found_ids: Annotated[tuple[Small, ...], Meta(max_length=64)] = ()  # layers that this one reads
    link: Text = ""  # the symbolic link that --draft names; "": it names none
    previous: Text = ""  # fingerprint of the weights that an order may put back; "": none are kept


class Recording(Struct, frozen=True, kw_only=True):
    """The samples of its own traffic that a worker writes."""

    path: Text  # the directory
    is_on: bool = True
    fault: Text = ""  # the reason why recording ended


class RoomCounts(Struct, frozen=True, kw_only=True):
    """Rooms of a worker by what happens to them."""

    running: Count = 0
    queued: Count = 0
    transferring: Count = 0


class ResourceUsage(Struct, frozen=True, kw_only=True):
    """The use of a machine by a worker process. The GPU's figures are those of all processes on it."""

    cpu_cores: float = 0.0  # CPU seconds per second, recent average
    num_cores: Count = 0  # cores that the process may use
    memory_bytes: Count = 0  # of the process, in RAM
    gpu_busy: float | None = None  # share of the time with a kernel on the GPU; None: no GPU, or not known
    gpu_memory_bytes: Count = 0  # in use on the GPU
    gpu_memory_total: Count = 0  # 0: no GPU, or not known


class TierStats(Struct, frozen=True, kw_only=True):
    """A tier of a worker's KV cache below its pool: bytes of stored pages, and their bound."""

    name: Text  # host, disk
    used: Count
    total: Count


class WorkerStats(Struct, frozen=True, kw_only=True):
    """One worker's condition, made by its scheduler loop."""

    state: Text = "serving"  # starting, serving, draining, changing role
    pages_total: Count = 0
    pages_free: Count = 0  # free now or evictable from the prefix cache
    pages_cached: Count = 0  # free pages that hold a reusable prefix
    running: Count = 0
    queued: Count = 0
    transferring: Count = 0
    canaries: RoomCounts = RoomCounts()  # of these, requests of routers that show that the pair serves
    usage: ResourceUsage | None = None  # None: not measured yet, or a worker that does not report it
    graphs: GraphCounts = GraphCounts()
    accept_length: float | None = (
        None  # tokens committed per verify, recent average; None without a drafter or history
    )
    spec_steps: Small | None = None  # draft steps of the newest verify; None without a drafter
    phase: Text = ""  # phase of the engine's lifecycle; "": not reported
    weights_hash: Text = ""  # sha256 of every byte of the weights; "": not known yet
    draft: DraftHead | None = None  # None: no drafter with weights, or a worker that does not report it
    recording: Recording | None = None  # None: it records nothing
    pages_promised: Count = 0  # pages that its rooms count on beyond those that they hold
    window_pages_total: Count = 0  # of layers with windows; 0: no pages of their own
    window_pages_free: Count = 0  # free now or evictable
    tiers: Annotated[list[TierStats], Meta(max_length=8)] = []  # below the pool, from fast to slow
    role_fault: Text = ""  # why the newest ChangeRole was refused
    prefix_news: Count = 0  # HeldPrefixes messages that were sent before this one
    counters: dict[Text, float] = {}  # monotonic; name -> total


def clients_rooms(stats: WorkerStats) -> tuple[int, int, int]:
    """The running, queued and transferring rooms of a worker without the routers' canaries."""
    canaries = stats.canaries
    return (
        max(0, stats.running - canaries.running),
        max(0, stats.queued - canaries.queued),
        max(0, stats.transferring - canaries.transferring),
    )


# --- control plane: worker -> router ------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """A worker registers. Resent after every reconnect until a Welcome arrives.

    `generation` grows each time this worker gives the router up and drops all its rooms, so a router that
    sees it grow must not wait for those rooms. `missed` counts this router's messages that arrived damaged.
    When it grows, the router resends the orders that this worker has not answered.
    """

    generation: Count = 0
    missed: Count = 0
    role: Annotated[str, Meta(pattern="^(prefill|decode)$")]
    instance: Id
    protocol: Small
    fingerprint: Text
    feature_ids: Annotated[tuple[Small, ...], Meta(max_length=64)] = ()  # as in `Layout`
    feature_width: Small = 0
    draft_widths: DraftWidths | None = None  # None: no drafter
    model: Text  # served model directory or name, for display only
    kv_endpoint: Text = ""  # endpoint at which a prefill worker answers pulls
    pages_total: Count
    page_size: Annotated[int, Meta(ge=1, le=4096)]
    max_context: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    max_running: Count
    spec_tokens: Count = 0  # extra slots that a running request needs for unverified tokens
    vocab_size: Count = 0
    pid: Small = 0
    host: Text = ""
    device: Text = "cpu"
    card: Text = ""  # the GPU of `device`: its id in CUDA_VISIBLE_DEVICES and its name; for display only
    transport: Text = ""
    takes: tuple[Text, ...] = ()  # the YOUNG_FIELDS that it obeys
    embeds_width: Small = 0  # elements of a prompt embedding; 0: it takes none
    embeds_fault: Text = ""  # why it takes no prompt embeddings
    takes_batches: bool = False  # accepts frames of several messages
    takes_goodbye: bool = False  # knows RouterGoodbye
    local_prefill: bool = False  # a decode worker that accepts a Reserve without a prefill worker
    aggregated: bool = False  # it also prefers such orders where they are cheaper, at any length
    grows: bool = False  # a decode worker whose rooms take pages as their tokens come
    ahead_tokens: Small = 0  # output beyond the next step whose pages such a room takes with it
    changes_role: bool = False  # knows ChangeRole
    shares_prompts: bool = False  # a decode worker that obeys `shares` of a Reserve
    experts: RoutedShape | None = None  # what it returns for `routed_experts`; None: nothing
    preempts: bool = False  # a decode worker that retracts less urgent rooms for a Reserve without a place
    chosen: dict[Text, Choice] = field(default_factory=dict)  # by setting; for display only
    prefix_endpoint: Text = ""  # endpoint at which a decode worker offers prefixes; "": it offers none
    pulls_prefixes: bool = False  # a prefill worker that obeys `pull` of a Prefill
    tells_prefixes: bool = False  # sends HeldPrefixes, and knows TellPrefixes
    metrics_port: Small = 0  # port of its own /metrics; 0: none, or a worker that does not tell
    group: Text = ""  # workers of one group step together, and end together; "": it is alone


class Heartbeat(Message, frozen=True, kw_only=True):
    """A worker's state, sent by its scheduler loop and not by an I/O thread, so that a hung loop is
    detected."""

    instance: Id
    stats: WorkerStats


class HeldPrefixes(Message, frozen=True, kw_only=True):
    """Pages of prefixes that the worker holds from now on, or does not hold any more.

    `added`, `removed`: names of 16 bytes each, as `engine.kv.page_names` computes them from `root`,
    `lookahead` and the page size. `seq` counts these messages from 0. With `is_first` all that was told
    before is void, but it counts until the next message with `is_last`: only then all was told anew. A router
    that misses a number asks with TellPrefixes for an `is_first` one. Only routers with `takes_prefixes` in
    their Welcome get these messages. Older workers send no `is_last`: to them every message is.
    """

    instance: Id
    seq: Count
    root: Annotated[bytes, Meta(min_length=32, max_length=32)]
    lookahead: Annotated[int, Meta(ge=0, le=64)] = 0
    is_first: bool = False
    is_last: bool = True
    added: Annotated[bytes, Meta(max_length=1 << 18)] = b""
    removed: Annotated[bytes, Meta(max_length=1 << 18)] = b""


class Reserved(Message, frozen=True, kw_only=True):
    """Decode holds pages and a slot. Its first `have` prompt tokens need not be pulled."""

    room: Id
    epoch: Count
    instance: Id
    have: Count = 0


class Refused(Message, frozen=True, kw_only=True):
    """The worker refuses this room for now (retry_after_ms > 0) or for good (0)."""

    room: Id
    epoch: Count
    instance: Id
    reason: Text
    retry_after_ms: Count = 0


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """Log probabilities of prompt tokens `start`, `start` + 1, ...; sent in order from 1 on, before the
    room's token 1."""

    room: Id
    epoch: Count
    instance: Id
    start: Count
    items: Annotated[list[TokenLogprob], Meta(min_length=1, max_length=1024)]


class RoutedExperts(Message, frozen=True, kw_only=True):
    """The experts of prompt rows `start`, `start` + 1, ... (`RoutedShape`); sent in order, before the room's
    token 1.
    """

    room: Id
    epoch: Count
    instance: Id
    start: Count
    count: Annotated[int, Meta(ge=1, le=1 << 20)]
    ids: Annotated[bytes, Meta(min_length=1, max_length=1 << 19)]


class FirstToken(Message, frozen=True, kw_only=True):
    """Token 1, sampled by prefill, sent before the hand-off ends.

    With `finish` the request ends without decode.
    """

    room: Id
    epoch: Count
    instance: Id
    token: TokenId
    logprob: TokenLogprob | None = None
    finish: Text = ""  # "", "stop" or "length"
    timeline: PrefillTimeline = PrefillTimeline()


class TokenItem(Struct, frozen=True, kw_only=True, gc=False):
    """Tokens seq .. seq+len(ids)-1 of a room's output. Prefill's token has seq 0; decode continues at 1.

    `experts`: those of the rows behind which the tokens were chosen, if the room asks. Token 0 has none here:
    its row is the last one of the prompt.
    """

    room: Id
    epoch: Count
    seq: Count
    ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)]
    logprobs: list[TokenLogprob] = []
    experts: bytes | UnsetType = UNSET


class Tokens(Message, frozen=True, kw_only=True):
    """All tokens of one decode step for this router."""

    instance: Id
    items: Annotated[list[TokenItem], Meta(max_length=65536)]


class Finished(Message, frozen=True, kw_only=True):
    """Terminal: decode has completed the room. All its Tokens were sent before.

    Prefill sends it with no output tokens when the output of earlier attempts was the whole answer.
    """

    room: Id
    epoch: Count
    instance: Id
    reason: Annotated[str, Meta(pattern="^(stop|length)$")]
    output_tokens: Count  # prefill's token included
    timeline: DecodeTimeline = DecodeTimeline()
    prefill: PrefillTimeline | None = None  # set when decode computed the prompt itself


class Failed(Message, frozen=True, kw_only=True):
    """Terminal for this attempt. `is_preempted`: of kind "Retracted", for a more urgent request."""

    room: Id
    epoch: Count
    instance: Id
    kind: Text  # a class name of errors.py, such as TransferTimeout
    message: Text
    retryable: bool
    is_preempted: bool = False


class Gone(Message, frozen=True, kw_only=True):
    """The answer to Cancel, also for unknown rooms: this worker holds no attempt of the room up to `epoch`
    any more.

    `timeline` has decode's figures for the room until then; None if it held no such room.
    """

    room: Id
    epoch: Count
    instance: Id
    timeline: DecodeTimeline | None = None


class Goodbye(Message, frozen=True, kw_only=True):
    """The worker drains: it accepts no new rooms and finishes the running ones."""

    instance: Id


ControlUp = (
    Hello
    | Heartbeat
    | HeldPrefixes
    | Reserved
    | Refused
    | PromptLogprobs
    | RoutedExperts
    | FirstToken
    | Tokens
    | Finished
    | Failed
    | Gone
    | Goodbye
)


# --- control plane: router -> worker ------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """Registration accepted for the generation that the router knows.

    A worker of a newer generation ignores it.
    """

    instance: Id  # the worker's instance, echoed
    router: Id
    generation: Count | None = None  # None: from a router that does not send it
    heartbeat_ms: Annotated[int, Meta(ge=50, le=60000)] = 500
    takes_batches: bool = False  # accepts frames of several messages
    takes_prefixes: bool = False  # knows HeldPrefixes


class Rejected(Message, frozen=True, kw_only=True):
    """Registration refused. The worker logs the reason and tries again later."""

    instance: Id
    reason: Text


class Reserve(Message, frozen=True, kw_only=True):
    """To decode: hold pages and a slot, then attach to the room at `prefill_endpoint` and pull.

    Without a `prefill_instance` decode computes the prompt itself, and its Tokens begin at seq 0. Only
    workers with `local_prefill` in their Hello get such an order.

    With `shares` decode shares the prompt's pages of that room, which has the same prompt, and computes the
    last tokens of the prompt only. A Failed of kind "Unshared" says that the room has none to share any more.
    Only workers with `shares_prompts` in their Hello get such an order.
    """

    room: Id
    epoch: Count
    instance: Id
    prompt_ids: TokenIds
    num_output: Count = 0  # of these, the last ones are output of earlier attempts
    sampling: Sampling
    deadline_ms: Count  # remaining; 0: none
    salt: Text = ""  # prefixes are shared only under an equal salt
    embeds: PromptRows | None = None  # the beginning of the prompt has no ids
    traceparent: TraceParent = ""  # W3C trace context of the router's span, if the request is traced
    tracestate: TraceState = ""  # W3C trace state, as the client sent it
    prefill_endpoint: Text = ""
    prefill_instance: Id | None = None
    shares: Id | None = None  # a room at this worker with the same prompt
    may_record: bool = False  # the caller does not object to a record of its tokens for training
    request_id: RequestId = ""  # of the client's request, for log lines
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # of the request's class; lower is more urgent
    expected_output: Count = 0  # output tokens of this attempt to count on; 0: all that `sampling` allows
    granted_output: Count = 0  # of these, those whose pages decode holds from the start and never takes back
    waited_ms: Count = 0  # since the request came to the router, for an objective of its first token


class Prefill(Message, frozen=True, kw_only=True):
    """To prefill: run the prompt, sample token 1, offer the KV."""

    room: Id
    epoch: Count
    instance: Id
    prompt_ids: TokenIds
    num_output: Count = 0  # of these, the last ones are output of earlier attempts
    sampling: Sampling
    deadline_ms: Count
    salt: Text = ""  # this and the next four as in Reserve
    embeds: PromptRows | None = None
    traceparent: TraceParent = ""
    tracestate: TraceState = ""
    request_id: RequestId = ""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # as in Reserve
    waited_ms: Count = 0  # as in Reserve
    keeps_pages: bool = False  # its pages were taken back before: they go to no other request any more
    pull: PrefixPull | None = None  # only to workers with `pulls_prefixes` in their Hello
    wants_features: bool = True  # decode reads features of the prompt tokens that it lacks


class OfferPrefix(Message, frozen=True, kw_only=True):
    """To decode: offer the first `tokens` tokens of a prompt, which are cached there, as room `transfer` at
    its `prefix_endpoint`.

    With `room`, the prompt is that of this attempt, which must have found all these tokens in the cache.
    Without, it is `prompt_ids`. A worker that lacks them ends the transfer at once. Only workers with a
    `prefix_endpoint` in their Hello get it.
    """

    instance: Id
    transfer: Id
    tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    room: Id | None = None
    epoch: Count = 0
    prompt_ids: TokenIds = field(default_factory=list)
    salt: Text = ""  # as in Reserve, also the next one
    embeds: PromptRows | None = None


class TellPrefixes(Message, frozen=True, kw_only=True):
    """To a worker with `tells_prefixes`: the next HeldPrefixes is to be an `is_first` one."""

    instance: Id


class PromptEmbeds(Message, frozen=True, kw_only=True):
    """To either: rows `start`, `start` + 1, ... of a prompt's embeddings, in order, before the order itself.

    `data`: whole rows of `width` elements each, little-endian. A worker that lacks rows of an order refuses
    the order for now. Only workers with "embeds" among the fields that they take get it.
    """

    room: Id
    epoch: Count
    instance: Id
    start: Count
    width: Annotated[int, Meta(ge=1, le=1 << 16)]
    dtype: Annotated[str, Meta(pattern="^(F32|F16|BF16)$")]
    data: Annotated[bytes, Meta(min_length=2, max_length=1 << 20)]


class Cancel(Message, frozen=True, kw_only=True):
    """To either: end every attempt up to `epoch`, also one whose order is still in transit.

    Legal in every state, idempotent, and repeated until answered with Gone.
    """

    room: Id
    epoch: Count
    instance: Id


class SwapDraft(Message, frozen=True, kw_only=True):
    """To decode: check the draft weights at `path`, take them, or take back the previous ones.

    "restart" drains the worker and ends it with an exit code at which its supervisor starts it again; its
    --draft must lead to `path` by then. `path` is an absolute directory on the worker's host, empty for
    "back". Only workers with a `DraftHead` in their heartbeats get it, and the newest one there tells the
    result.
    """

    instance: Id
    order: Id  # a repeated order is ignored
    action: Annotated[str, Meta(pattern="^(check|swap|back|restart)$")]
    path: Text = ""


class ChangeRole(Message, frozen=True, kw_only=True):
    """To either: drain, and come back in the other role.

    Running requests go on elsewhere after `drain_ms`, or after the worker's own drain time if it is shorter.
    A worker whose settings do not allow the role stays, and says why in `role_fault` of its heartbeats. Only
    workers with `changes_role` in their Hello get it.
    """

    instance: Id
    order: Id  # a repeated order is ignored
    role: Annotated[str, Meta(pattern="^(prefill|decode)$")]
    drain_ms: Count


class RouterGoodbye(Message, frozen=True, kw_only=True):
    """The router ends as it was asked to: it has no requests left.

    The worker answers with a Hello of the next generation, as after any loss of a router. The router does not
    welcome it, and closes the connection when all have answered. Only workers with `takes_goodbye` get it.
    """

    instance: Id


ControlDown = (
    Welcome
    | Rejected
    | Reserve
    | Prefill
    | OfferPrefix
    | TellPrefixes
    | PromptEmbeds
    | Cancel
    | SwapDraft
    | ChangeRole
    | RouterGoodbye
)
