"""The identity of a worker: its KV layout for the other side, its Hello for the router."""

import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from ..cluster.config.roles import DecodeConfig, WorkerConfig
from ..cluster.net.transport_names import ZMQ_BLOCKS
from ..cluster.protocol.kv_messages import block_bytes_of
from ..cluster.protocol.messages import (
    PROTOCOL_MAJOR,
    YOUNG_FIELDS,
    Choice,
    DraftWidths,
    Hello,
    Layout,
    RoutedShape,
)
from ..cluster.telemetry.worker_metrics import WorkerFacts
from ..engine.auto_sizes import EngineSizes
from ..engine.kv.layouts import MHALayout, PageLayout
from ..engine.kv.pool import FeaturePlane, KVPool
from ..engine.kv.window_layout import WindowedLayout
from ..engine.kv.window_pool import WindowedPool
from ..engine.runner.routed_experts import ExpertShape
from ..kvtransfer.protocol.fingerprint import pair_fingerprint
from ..kvtransfer.transport import Planes
from .prompt_embeds import OFF, EmbedsInbox

NOTHING_CHOSEN: Mapping[str, Choice] = MappingProxyType({})


def layout_of(
    pool: KVPool,
    *,
    model_fingerprint: str,
    feature_ids: Sequence[int],
    feature_width: int,
    weights_hash: str = "",
    whole: PageLayout | None = None,
    window_margin: int = 0,
) -> Layout:
    """The wire layout of the pool's pages, with the fingerprint by which the router pairs workers.

    `whole`: the pages of all ranks together, if the pool has a part of them; both pair alike.

    `feature_ids`: the layers that prefill offers, or that decode's drafter reads, in the order of its input.
    `feature_width`: elements per token over all of them, 0 without features. `weights_hash`: sha256 (hex) of
    all weights, "" while unknown. `window_margin`: last rows of a prompt whose window is handed over, too.
    """
    dtype, of_rows = (str(each).removeprefix("torch.") for each in (pool.dtype, pool.row_dtype))
    pages = pool.layout if whole is None else whole
    if isinstance(pool.layout, WindowedLayout) and isinstance(pages, MHALayout):
        pages = WindowedLayout(whole=pages, windows=pool.layout.windows)
    num_kv_heads, head_dim = pages.wire_heads
    windowed = pages if isinstance(pages, WindowedLayout) else None
    window_layers = 0 if windowed is None else windowed.num_windowed
    fingerprint = pair_fingerprint(
        model_fingerprint,
        dtype=dtype,
        page_size=pool.page_size,
        num_layers=pool.num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window_layers=window_layers,
    )
    kv_bytes = pages.bytes_per_token if windowed is None else windowed.whole.bytes_per_token
    token_bytes = kv_bytes + feature_width * pool.row_dtype.itemsize
    return Layout(
        fingerprint=fingerprint,
        dtype=dtype,
        page_size=pool.page_size,
        num_layers=pool.num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        feature_ids=list(feature_ids),
        feature_width=feature_width,
        block_bytes=block_bytes_of(token_bytes),
        feature_dtype="" if of_rows == dtype else of_rows,
        window_layers=window_layers,
        window=0 if windowed is None else windowed.window,
        window_margin=0 if windowed is None else window_margin,
        weights_hash=weights_hash,
    )


def planes_of(pool: KVPool, features: FeaturePlane | None) -> Planes:
    """The pages of a pool, and of the feature plane, as bytes.

    Decode has no feature plane: the features of a room land in the room's own staging tensor.
    """
    feature_bytes = None if features is None else features.byte_view()
    window = pool.part.byte_view() if isinstance(pool, WindowedPool) else None
    return Planes(kv=pool.byte_view(), features=feature_bytes, order=pool.order, window=window)


def card_of(device: torch.device, env: Mapping[str, str]) -> str:
    """The GPU of a device as its id in CUDA_VISIBLE_DEVICES, else its number, and its name; "" for a CPU."""
    if device.type != "cuda":
        return ""
    at = device.index or 0
    visible = [entry.strip() for entry in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    name = torch.cuda.get_device_name(device)
    return f"{visible[at] if at < len(visible) else at}: {name}"


def small_pool_warning(hello: Hello) -> str:
    """A warning that the KV pool holds less than one request of the full context; "" where it does not."""
    holds = hello.pages_total * hello.page_size - hello.spec_tokens
    if holds >= hello.max_context:
        return ""
    return (
        f"the KV pool holds {holds} tokens, but --max-context is {hello.max_context}: longer requests are "
        f"refused; give more --kv-memory-mb or --pages, or --max-context {max(1, holds)}"
    )


def facts_of(layout: Layout, pool: KVPool) -> WorkerFacts:
    """What the worker's metrics say of it."""
    return WorkerFacts(
        host=socket.gethostname(),
        device=str(pool.device),
        card=card_of(pool.device, os.environ),
        fingerprint=layout.fingerprint,
    )


def hello_of(
    layout: Layout,
    pool: KVPool,
    *,
    role: str,
    instance: str,
    model: str,
    max_context: int,
    max_running: int,
    vocab_size: int,
    kv_endpoint: str = "",
    spec_tokens: int = 0,
    transports: Sequence[str] = (ZMQ_BLOCKS,),
    local_prefill: bool = False,
    aggregated: bool = False,
    grows: bool = False,
    ahead_tokens: int = 0,
    shares_prompts: bool = False,
    preempts: bool = False,
    draft_widths: DraftWidths | None = None,
    chosen: Mapping[str, Choice] = NOTHING_CHOSEN,
    embeds: EmbedsInbox | None = None,
    experts: ExpertShape | None = None,
    metrics_port: int = 0,
    tells_prefixes: bool = False,
    pulls_prefixes: bool = False,
    prefix_endpoint: str = "",
    group: str = "",
) -> Hello:
    """The worker's registration with a router. `max_context` in tokens; `embeds`: None takes none; `experts`:
    those that it returns for requests that ask.
    """
    takes_embeds = embeds is not None and not embeds.fault
    left_out = {"embeds": not takes_embeds, "routed_experts": experts is None}
    return Hello(
        role=role,
        instance=instance,
        protocol=PROTOCOL_MAJOR,
        fingerprint=layout.fingerprint,
        feature_ids=tuple(layout.feature_ids),
        feature_width=layout.feature_width,
        draft_widths=draft_widths,
        model=model,
        kv_endpoint=kv_endpoint,
        pages_total=pool.num_pages - 1,  # page 0 is the padding sink
        page_size=pool.page_size,
        max_context=max_context,
        max_running=max_running,
        spec_tokens=spec_tokens,
        takes=tuple(name for name in YOUNG_FIELDS if not left_out.get(name)),
        experts=None if experts is None else routed_shape_of(experts),
        embeds_width=embeds.width if embeds is not None and takes_embeds else 0,
        embeds_fault=OFF if embeds is None else embeds.fault,
        takes_batches=True,
        takes_goodbye=True,
        changes_role=True,
        local_prefill=local_prefill,
        aggregated=aggregated,
        grows=grows,
        ahead_tokens=ahead_tokens,
        shares_prompts=shares_prompts,
        preempts=preempts,
        vocab_size=vocab_size,
        pid=os.getpid(),
        host=socket.gethostname(),
        device=str(pool.device),
        card=card_of(pool.device, os.environ),
        transport=",".join(transports),
        chosen=dict(chosen),
        metrics_port=metrics_port,
        tells_prefixes=tells_prefixes,
        pulls_prefixes=pulls_prefixes,
        prefix_endpoint=prefix_endpoint,
        group=group,
    )


def routed_shape_of(shape: ExpertShape) -> RoutedShape:
    """As a message has it."""
    return RoutedShape(
        layers=shape.layers, num_layers=shape.num_layers, top_k=shape.top_k, id_bytes=shape.id_bytes
    )


def objectives_of(config: WorkerConfig) -> dict[str, Choice]:
    """The objectives that a worker was given, as a router shows them; nothing of those that it was not."""
    given = {"slo_ttft_ms": config.slo_ttft_ms}
    if isinstance(config, DecodeConfig):
        given["slo_itl_ms"] = config.slo_itl_ms
    return {name: Choice(value=f"{value:g}", why="given") for name, value in given.items() if value}


def chosen_of(sizes: EngineSizes) -> dict[str, Choice]:
    """The sizes of an engine by the names of their settings, as a router shows them."""
    return {name: Choice(value=value, why=sizes.reasons[name]) for name, value in sizes.values().items()}
