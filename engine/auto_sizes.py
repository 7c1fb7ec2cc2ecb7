"""The sizes of an engine: chosen from the card, the model and the settings. Pure, and without torch, so that
`baton doctor` and `baton plan` choose as a worker does.

On a CPU the sizes are constants. On a GPU:

    chunk_size            tokens of a forward that lasts PREFILL_FORWARD_S without experts, a power of two
    max_batch             a request per CHUNK_PER_REQUEST tokens of the chunk
    local_prefill_tokens  the same, also with experts, but from MIN_LOCAL tokens on: running streams wait
    KV memory             share of the card - context - weights - workspace - context buffers - slabs
    max_running           the largest of RUNNING whose requests of REQUEST_TOKENS tokens fit the KV pool
    max_context           the model's, or what the KV pool holds

A setting that is given is kept, or refused with the number that would fit. Sizes are bytes and tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TypeVar

from ..kernels.invariant_splits import MAX_PARTIAL_BYTES, num_splits, partial_bytes
from .errors import CheckpointError
from .graphs.buckets import batch_buckets, with_middles
from .kv.budget import WINDOW_SLACK, PageBudget, WindowBudget
from .kv.window_sizes import CHUNK_SHARE, chunk_of
from .prompt_budget import BUFFER_CAPABILITY, WHOLE_PROMPT_ROWS, alone_tokens, buffer_rows, graph_tokens

MIB = 1 << 20
PAGE_SIZE = 16  # one number for all cards: workers of different cards pair only if it is equal
GPU_SHARE = 0.9
CONTEXT_BYTES = 960 * MIB  # of a CUDA context with all kernels, which no allocator counts

CPU_CHUNK, CPU_BATCH, CPU_RUNNING, CPU_LOCAL_TOKENS = 256, 8, 16, 128
CPU_KV_BYTES, CPU_SLAB, CPU_DEVICE_SLAB = 1024 * MIB, 256 * MIB, 1024 * MIB

PREFILL_FORWARD_S = 0.045
MIN_CHUNK, MAX_CHUNK = 2048, 8192
CHUNK_PER_REQUEST = 64
MIN_BATCH, MAX_BATCH = 8, 128
MIN_LOCAL = 256
RUNNING = (256, 192, 128, 96, 64, 48, 32, 16)
# Steps without drafts whose rows a drafter observes in one forward: for many requests, its weights are then
# read once for so many steps.
LATE_ROWS = 8
REQUEST_TOKENS = 1536  # prompt and output of a request that max_running counts on
MIN_SLAB, MAX_SLAB, SLAB_STEP = 256 * MIB, 1024 * MIB, 64 * MIB
SLAB_CHUNKS = 4
MIN_DEVICE_SLAB, MAX_DEVICE_SLAB = 384 * MIB, 4096 * MIB
SLAB_SHARE = 0.03  # of the card, for slabs on it

GRAPH_ROWS = 7  # outputs of the breakable and full prefill graphs of all buckets, in rows of the largest
UNREAD_PARTS = 2  # forwards over prompts on decode whose features are kept until the first is read
BUFFER_ALIGNMENT = 128  # at least that of the rows of context buffers
GRAPH_BYTES = 1 * MIB  # of one captured step in the driver
LOGIT_COPIES = 7  # of a step's logits at once, in float32: those of graphs and those of an eager step
PART_COPIES = 2  # of the parts of a step's invariant attention: those of graphs and those of an eager step
GIVEN, CPU = "given", "on CPU"

# Dense bfloat16 products by compute capability, FLOP/s as measured, not as advertised.
RATES: Mapping[tuple[int, int], float] = MappingProxyType(
    {
        (8, 0): 250e12,
        (8, 6): 70e12,
        (8, 9): 150e12,
        (9, 0): 750e12,
        (10, 0): 1500e12,
        (10, 3): 1500e12,
        (12, 0): 200e12,
    }
)
OTHER_RATE = 60e12
# Of these rates, what forwards over prompts of models with experts reach: 0.55 to 0.65 on an H200, with 2048
# to 4096 tokens of gpt-oss-20b, Qwen3-30B-A3B and DeepSeek-V2-Lite.
EXPERTS_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class Card:
    """The device of an engine. A CPU has no `total`.

    `free` is what this process may still take, its CUDA context already taken off; of a card that is only
    looked at, the whole free memory.
    """

    name: str = "cpu"
    total: int = 0
    free: int = 0
    capability: tuple[int, int] = (0, 0)

    @property
    def is_gpu(self) -> bool:
        return self.total > 0

    def __str__(self) -> str:
        return f"{self.name}, {self.total // MIB} MiB" if self.is_gpu else self.name

    @property
    def rate(self) -> float:
        """Dense bfloat16 products, FLOP/s."""
        return RATES.get(self.capability, OTHER_RATE)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The target's shape. `weight_bytes` include a draft head's; `num_weights` are those that a row of a
    forward is multiplied with. `intermediate_size`: of an MLP with as large activations, if it has experts.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    dtype_bytes: int
    num_layers: int
    num_weights: int
    weight_bytes: int
    has_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineRole:
    """The work of an engine. `is_decode`: it takes decode steps; otherwise it computes prompts for others.

    `num_nodes`: verified tokens per request and step. `num_shapes`: draft shapes that a step may have.
    `spare_slots`: slots behind a request's tokens. `num_features`: target layers whose outputs are kept per
    token (prefill) or read by the head (decode). `is_aggregated`: a decode engine that computes all its
    prompts, with graphs. `is_deterministic`: its attention is batch-invariant. `late_rows`: rows of a request
    that wait for its drafter at most.
    """

    is_decode: bool
    is_aggregated: bool = False
    is_deterministic: bool = False
    num_features: int = 0
    num_nodes: int = 1
    num_shapes: int = 1
    spare_slots: int = 1
    late_rows: int = 0


G = TypeVar("G", bound="GivenSizes")


@dataclass(frozen=True, kw_only=True)
class GivenSizes:
    """The settings of a role. 0, "auto" and a negative `chunk_size` leave the choice; 0 there asks for whole
    prompts.
    """

    graphs: str = "auto"
    page_size: int = 0
    pages: int = 0
    window_pages: int = 0
    kv_memory_mb: int = 0
    gpu_memory_share: float = 0.0
    max_context: int = 0
    chunk_size: int = -1
    max_batch: int = 0
    max_running: int = 0
    local_prefill_tokens: int = 0
    slab_mb: int = 0
    device_slab_mb: int = 0
    prefix_slab_mb: int = 0

    @classmethod
    def of(cls: type[G], settings: object) -> G:
        """The equally named attributes of `settings`; those that it lacks keep their defaults."""
        return cls(**{f.name: getattr(settings, f.name) for f in fields(cls) if hasattr(settings, f.name)})


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """The chosen sizes. `num_pages` and `num_window_pages` (0: none) include page 0. `reserved`: bytes beside
    weights and KV. `prompt_graph_tokens`: rows of the largest prefill graph of a decode engine that computes
    its prompts.

    `reasons`: why, by the name of a setting, for the settings of the role.
    """

    has_graphs: bool
    page_size: int
    num_pages: int
    num_window_pages: int
    max_context: int
    chunk_size: int
    max_batch: int
    max_running: int
    local_prefill_tokens: int
    prompt_graph_tokens: int
    slab_bytes: int
    device_slab_bytes: int
    reserved: int
    kv_bytes: int
    reasons: Mapping[str, str]

    def values(self) -> dict[str, int | str]:
        """The sizes of `reasons` under the names of their settings."""
        every: dict[str, int | str] = {
            "graphs": "on" if self.has_graphs else "off",
            "page_size": self.page_size,
            "chunk_size": self.chunk_size,
            "max_batch": self.max_batch,
            "max_running": self.max_running,
            "local_prefill_tokens": self.local_prefill_tokens,
            "slab_mb": self.slab_bytes // MIB,
            "device_slab_mb": self.device_slab_bytes // MIB,
            "kv_memory_mb": self.kv_bytes // MIB,
            "window_pages": self.num_window_pages - 1,
            "max_context": self.max_context,
        }
        return {name: every[name] for name in self.reasons}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value} ({self.reasons[name]})" for name, value in self.values().items())


def choose_sizes(
    card: Card, model: ModelSizes, role: EngineRole, per_token: PageBudget, given: GivenSizes
) -> EngineSizes:
    """The sizes of an engine of `role`. `per_token`: the budget of pages of one token.

    Raises CheckpointError, naming what would fit, for weights or given sizes that do not.
    """
    return _Choice(card=card, model=model, role=role, per_token=per_token, given=given).sizes()


def workspace_of(
    model: ModelSizes,
    role: EngineRole,
    *,
    chunk: int,
    max_batch: int,
    max_running: int,
    local: int,
    graphed: int,
) -> int:
    """Bytes of activations, graphs and state beside weights, KV, context buffers and slabs; an upper bound.

    `graphed`: rows of the largest prefill graph of a decode engine that computes all its prompts.
    """
    row = model.dtype_bytes * (
        3 * model.intermediate_size
        + 8 * model.hidden_size
        + 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    )
    logits = 4 * model.vocab_size
    outputs = GRAPH_ROWS * (1 + role.num_features) * model.hidden_size
    bridge = 2 * model.num_heads * model.head_dim
    graph_row = row + model.dtype_bytes * (outputs + bridge)
    if not role.is_decode:
        rows = chunk or WHOLE_PROMPT_ROWS
        return rows * (row + graph_row) + LOGIT_COPIES * max_batch * logits + parts_of(model, role, rows)
    rows = max_running * role.num_nodes
    steps = rows * (row + LOGIT_COPIES * logits)
    edits = (max_running + 1) * logits  # token counts for penalties
    buckets = batch_buckets(max_running)
    graphs = GRAPH_BYTES * role.num_shapes * (len(buckets) + 2 * len(with_middles(buckets)))
    prompt_graphs = graphed * graph_row if role.is_aggregated else 0
    feature_row = role.num_features * model.hidden_size * model.dtype_bytes
    late = 2 * (max_running + 1) * role.late_rows * feature_row  # kept, and gathered for the drafter
    prompts = alone_tokens(local) * (row + UNREAD_PARTS * feature_row)
    parts = PART_COPIES * parts_of(model, role, max(rows, alone_tokens(local)))
    return steps + edits + graphs + prompt_graphs + late + prompts + parts


def parts_of(model: ModelSizes, role: EngineRole, rows: int) -> int:
    """The most bytes of the parts of invariant attention in a forward of `rows` rows; 0 in the default
    mode.
    """
    if not role.is_deterministic:
        return 0
    splits = num_splits(model.max_context)
    return min(MAX_PARTIAL_BYTES, partial_bytes(splits, rows * model.num_heads, model.head_dim))


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The inputs of one choice. `per_token`: the memory of a token in all pools."""

    card: Card
    model: ModelSizes
    role: EngineRole
    per_token: PageBudget
    given: GivenSizes

    def sizes(self) -> EngineSizes:
        """The sizes. Raises CheckpointError."""
        given, is_gpu, reasons = self.given, self.card.is_gpu, dict[str, str]()

        def take(name: str, chosen: tuple[int, str]) -> int:
            wanted = int(getattr(given, name))
            is_auto = wanted < 0 if name == "chunk_size" else wanted == 0
            value, reasons[name] = chosen if is_auto else (wanted, GIVEN)
            return value

        reasons["graphs"] = GIVEN if given.graphs != "auto" else "a GPU" if is_gpu else CPU
        page_size = take("page_size", (PAGE_SIZE, "equal on all cards"))
        chunk, max_batch, max_running, local, graphed = self._chunk()[0], 0, 0, 0, 0
        slab_mb = device_slab_mb = 0
        if self.role.is_decode:
            local = take("local_prefill_tokens", self._local_tokens())
            graphed = self._graph_tokens(local)
            max_running = take("max_running", self._max_running(page_size, local))
            device_slab_mb = given.prefix_slab_mb if is_gpu else 0
        else:
            chunk = take("chunk_size", self._chunk())
            max_batch = take("max_batch", self._max_batch(chunk))
            slab_mb = take("slab_mb", self._slab_mb(chunk))
            device_slab_mb = take("device_slab_mb", self._device_slab_mb())
        reserved = self._reserved(chunk, max_batch, max_running, local, device_slab_mb * MIB)
        budget = self._budget(page_size)
        kv_bytes, reasons["kv_memory_mb"] = self._kv_bytes(budget, reserved)
        num_pages = self._num_pages(budget, kv_bytes)
        num_window_pages = budget.num_window_pages(num_pages)
        if budget.windows is not None:
            take("window_pages", (num_window_pages - 1, f"for windows of {budget.windows.window} tokens"))
            fitting, graphed = (_fitting(rows, num_window_pages, budget.windows) for rows in (chunk, graphed))
            if fitting < chunk:
                chunk, reasons["chunk_size"] = fitting, "half of the window pages"
        max_context, reasons["max_context"] = self._max_context(budget, page_size, num_pages)
        return EngineSizes(
            has_graphs=given.graphs == "on" or (given.graphs == "auto" and is_gpu),
            page_size=page_size,
            num_pages=num_pages,
            num_window_pages=num_window_pages,
            max_context=max_context,
            chunk_size=chunk,
            max_batch=max_batch,
            max_running=max_running,
            local_prefill_tokens=local,
            prompt_graph_tokens=graphed,
            slab_bytes=slab_mb * MIB,
            device_slab_bytes=device_slab_mb * MIB,
            reserved=reserved,
            kv_bytes=kv_bytes,
            reasons=MappingProxyType(reasons),
        )

    # --- compute ------------------------------------------------------------------------------------------

    def _chunk(self) -> tuple[int, str]:
        if not self.card.is_gpu:
            return CPU_CHUNK, CPU
        # As many tokens as for a dense model: experts get more rows each, and on prefill no stream waits.
        chunk = min(MAX_CHUNK, max(MIN_CHUNK, self._timed_tokens(self.card.rate)))
        return chunk, self._forward_time(chunk)

    @property
    def _prompt_rate(self) -> float:
        """What a forward over prompts computes, FLOP/s."""
        return self.card.rate * (EXPERTS_SHARE if self.model.has_experts else 1.0)

    def _timed_tokens(self, rate: float) -> int:
        """The tokens of a forward of PREFILL_FORWARD_S at `rate` FLOP/s, as a power of two."""
        tokens = int(rate * PREFILL_FORWARD_S / (2 * max(1, self.model.num_weights)))
        return 1 << max(0, tokens.bit_length() - 1)

    def _forward_time(self, tokens: int) -> str:
        return f"{1e3 * 2 * tokens * self.model.num_weights / self._prompt_rate:.0f} ms a forward"

    def _max_batch(self, chunk: int) -> tuple[int, str]:
        if not self.card.is_gpu:
            return CPU_BATCH, CPU
        tokens = chunk or WHOLE_PROMPT_ROWS
        return min(MAX_BATCH, max(MIN_BATCH, tokens // CHUNK_PER_REQUEST)), "by the chunk"

    def _graph_tokens(self, local: int) -> int:
        if not self.card.is_gpu:
            return local
        return graph_tokens(self.model.num_weights, self.model.num_layers, self.card.rate)

    def _local_tokens(self) -> tuple[int, str]:
        if not self.card.is_gpu:
            return CPU_LOCAL_TOKENS, CPU
        tokens = min(MAX_CHUNK, max(MIN_LOCAL, self._timed_tokens(self._prompt_rate)))
        return tokens, self._forward_time(tokens)

    def _slab_mb(self, chunk: int) -> tuple[int, str]:
        if not self.card.is_gpu:
            return CPU_SLAB // MIB, CPU
        windows = self.per_token.windows
        token = self.per_token.kv_bytes + self.per_token.feature_bytes + (windows.kv_bytes if windows else 0)
        slab = min(MAX_SLAB, max(MIN_SLAB, SLAB_CHUNKS * (chunk or WHOLE_PROMPT_ROWS) * token))
        return slab // SLAB_STEP * SLAB_STEP // MIB, f"{slab / token:.0f} tokens"

    def _device_slab_mb(self) -> tuple[int, str]:
        if not self.card.is_gpu:
            return CPU_DEVICE_SLAB // MIB, CPU
        slab = min(MAX_DEVICE_SLAB, max(MIN_DEVICE_SLAB, int(SLAB_SHARE * self.card.total)))
        return slab // MIB, "by the card"

    def _max_running(self, page_size: int, local: int) -> tuple[int, str]:
        if not self.card.is_gpu:
            return CPU_RUNNING, CPU
        budget = self._budget(page_size)
        for count in RUNNING:
            kv_bytes = self._wanted_kv(budget) or self._left(self._reserved(0, 0, count, local))
            num_pages = budget.num_pages(max(0, kv_bytes))
            if num_pages * page_size < count * REQUEST_TOKENS:
                continue
            if budget.windows is None:
                break
            held = min(REQUEST_TOKENS, budget.windows.window + WINDOW_SLACK)
            if budget.num_window_pages(num_pages) * page_size >= count * held:
                break
        return count, f"requests of {REQUEST_TOKENS} tokens in the KV pool"

    # --- memory -------------------------------------------------------------------------------------------

    def _reserved(self, chunk: int, max_batch: int, max_running: int, local: int, slabs: int = 0) -> int:
        """Bytes of a GPU for all but context, weights and KV."""
        if not self.card.is_gpu:
            return 0
        workspace = workspace_of(
            self.model,
            self.role,
            chunk=chunk,
            max_batch=max_batch,
            max_running=max_running,
            local=local,
            graphed=self._graph_tokens(local),
        )
        return workspace + slabs + self._context_buffers(workspace + slabs)

    def _context_buffers(self, reserved: int) -> int:
        """Bytes of the buffers for one layer of the longest context beside `reserved` bytes; an upper
        bound.
        """
        if self.card.capability < BUFFER_CAPABILITY:
            return 0
        model = self.model
        num_slots = self.per_token.num_pages(max(0, self._left(reserved)))
        rows = buffer_rows(self.given.max_context or model.max_context, num_slots, BUFFER_ALIGNMENT)
        return 2 * rows * model.num_kv_heads * model.head_dim * model.dtype_bytes

    def _left(self, reserved: int) -> int:
        """Bytes for the KV pool; negative if weights and workspace alone are too large."""
        return usable_memory(self.card, self.given.gpu_memory_share) - self.model.weight_bytes - reserved

    def _wanted_kv(self, budget: PageBudget) -> int:
        """Bytes of the given KV pool; 0 if none is given."""
        if self.given.pages:
            return budget.total(self.given.pages + 1)
        return self.given.kv_memory_mb * MIB

    def _kv_bytes(self, budget: PageBudget, reserved: int) -> tuple[int, str]:
        wanted = self._wanted_kv(budget)
        if not self.card.is_gpu:
            return (wanted, GIVEN) if wanted else (CPU_KV_BYTES, CPU)
        left, share = self._left(reserved), self.given.gpu_memory_share
        if left < budget.total(2):
            raise CheckpointError(_too_heavy(self.card, share, self.model.weight_bytes, reserved))
        if wanted > left:
            most = budget.num_pages(left) - 1 if self.given.pages else left // MIB
            name = "pages" if self.given.pages else "kv_memory_mb"
            raise CheckpointError(
                f"{name} {getattr(self.given, name)}: of {_limit(self.card, share)} weights take "
                f"{self.model.weight_bytes // MIB} MiB and the workspace {reserved // MIB} MiB; "
                f"give at most {most}"
            )
        return (wanted, GIVEN) if wanted else (left, f"the rest of {_limit(self.card, share)}")

    def _num_pages(self, budget: PageBudget, kv_bytes: int) -> int:
        if self.given.pages:
            return self.given.pages + 1
        count = budget.num_pages(kv_bytes)
        if count < 2:
            need = budget.total(2 + self.model.max_context * self.per_token.page_bytes // budget.page_bytes)
            raise CheckpointError(
                f"kv_memory_mb {kv_bytes // MIB}: one page costs {budget.page_bytes} bytes; give at least "
                f"{-(-need // MIB)} for one request of the full context"
            )
        return count

    def _budget(self, page_size: int) -> PageBudget:
        """The budget of pages of `page_size` tokens, with the given number of window pages."""
        budget = self.per_token.times(page_size)
        if budget.windows is None or not self.given.window_pages:
            return budget
        return replace(budget, windows=replace(budget.windows, given=self.given.window_pages))

    def _max_context(self, budget: PageBudget, page_size: int, num_pages: int) -> tuple[int, str]:
        given, limit, holds = self.given.max_context, self.model.max_context, (num_pages - 1) * page_size
        if given > limit:
            raise CheckpointError(
                f"max_context {given}: the model allows at most {limit} tokens; lower it to {limit}"
            )
        if given > holds:
            need = -(-budget.total(1 - (-given // page_size)) // MIB)
            raise CheckpointError(
                f"max_context {given}: the KV pool of {num_pages - 1} pages holds {holds} tokens; "
                f"lower it to at most {holds}, or give the pool {need} MiB"
            )
        if given or not self.card.is_gpu:
            return given or limit, GIVEN if given else "the model's"
        fits = max(1, holds - self.role.spare_slots)
        return min(limit, fits), "the model's" if limit <= fits else "what the KV pool holds"


def _fitting(rows: int, num_window_pages: int, windows: WindowBudget) -> int:
    """`rows` of a forward over prompts, or as many as the window pages allow; 0 stays: whole prompts."""
    return chunk_of(
        rows,
        num_window_pages=num_window_pages - 1,
        window=windows.window,
        page_size=windows.page_size,
        share=CHUNK_SHARE,
    )


def usable_memory(card: Card, share: float) -> int:
    """Bytes that an engine may allocate on a GPU for everything but its CUDA context.

    `share` of the card's memory, 0: automatic.
    """
    return min(int(card.total * (share or GPU_SHARE)) - CONTEXT_BYTES, card.free)


def check_weights(card: Card, share: float, weight_bytes: int) -> None:
    """Raises CheckpointError if the weights exceed the memory that `share` of the GPU leaves."""
    if weight_bytes >= usable_memory(card, share):
        raise CheckpointError(_too_heavy(card, share, weight_bytes, 0))


def _limit(card: Card, share: float) -> str:
    """The memory that is usable, with its reason."""
    usable, share = usable_memory(card, share), share or GPU_SHARE
    why = "that are free" if usable == card.free else f"that are {share:g} of the card without its context"
    return f"{usable // MIB} MiB {why}"


def _too_heavy(card: Card, share: float, weight_bytes: int, reserved: int) -> str:
    usable, need = usable_memory(card, share), weight_bytes + reserved
    part = (need + CONTEXT_BYTES) / card.total
    remedies = ["a smaller model or a card with more memory"]
    if usable == card.free:
        remedies.insert(0, "end the other processes on the card")
    elif part < 0.98 and need < card.free:
        remedies.insert(0, f"--gpu-memory-share of more than {part + 0.005:.2f}")
    workspace = f" and a workspace of {reserved // MIB} MiB" if reserved else ""
    return (
        f"weights of {weight_bytes // MIB} MiB{workspace} do not fit on {card.name}: there are "
        f"{_limit(card, share)}; use {', or '.join(remedies)}"
    )
