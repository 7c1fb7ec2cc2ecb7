"""What a worker says of itself: its KV layout to the other side, its Hello to the router."""

import os
import socket
from collections.abc import Sequence

from ..cluster.net.transport_names import ZMQ_BLOCKS
from ..cluster.protocol.kv_messages import block_bytes_of
from ..cluster.protocol.messages import PROTOCOL_MAJOR, YOUNG_FIELDS, Hello, Layout
from ..engine.kv_pool import FeaturePlane, KVPool
from .fingerprint import pair_fingerprint
from .transport import Planes


def layout_of(
    pool: KVPool, *, model_fingerprint: str, feature_ids: Sequence[int], feature_width: int
) -> Layout:
    """The wire layout of the pool's pages, with the fingerprint that the router pairs by."""
    dtype = str(pool.dtype).removeprefix("torch.")
    fingerprint = pair_fingerprint(
        model_fingerprint,
        dtype=dtype,
        page_size=pool.page_size,
        num_layers=pool.num_layers,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        feature_ids=feature_ids,
        feature_width=feature_width,
    )
    token_bytes = pool.page_bytes // pool.page_size + feature_width * pool.dtype.itemsize
    return Layout(
        fingerprint=fingerprint,
        dtype=dtype,
        page_size=pool.page_size,
        num_layers=pool.num_layers,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        feature_ids=list(feature_ids),
        feature_width=feature_width,
        block_bytes=block_bytes_of(token_bytes),
    )


def planes_of(pool: KVPool, features: FeaturePlane | None) -> Planes:
    """The pages as bytes. Decode has no feature plane: a room's features land in its own staging tensor."""
    return Planes(kv=pool.byte_view(), features=None if features is None else features.byte_view())


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
) -> Hello:
    """The worker's registration with the router."""
    return Hello(
        role=role,
        instance=instance,
        protocol=PROTOCOL_MAJOR,
        fingerprint=layout.fingerprint,
        model=model,
        kv_endpoint=kv_endpoint,
        pages_total=pool.num_pages - 1,  # page 0 is the padding sink
        page_size=pool.page_size,
        max_context=max_context,
        max_running=max_running,
        spec_tokens=spec_tokens,
        takes=YOUNG_FIELDS,
        takes_batches=True,
        local_prefill=local_prefill,
        vocab_size=vocab_size,
        pid=os.getpid(),
        host=socket.gethostname(),
        device=str(pool.device),
        transport=",".join(transports),
    )
