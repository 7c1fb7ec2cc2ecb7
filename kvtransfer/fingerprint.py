"""Which workers fit together: one hash over everything that makes KV of one side mean something on the other."""

import hashlib
from collections.abc import Sequence

from ..cluster.protocol.messages import PROTOCOL_MAJOR


def pair_fingerprint(
    model_fingerprint: str,
    *,
    dtype: str,
    page_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    feature_ids: Sequence[int],
    feature_width: int,
) -> str:
    """sha256 hex. Workers of equal fingerprint may be paired; the KV handshake then compares the layouts themselves."""
    parts = [
        f"protocol={PROTOCOL_MAJOR}",
        f"model={model_fingerprint}",
        f"dtype={dtype}",
        f"page_size={page_size}",
        f"heads={num_layers}x{num_kv_heads}x{head_dim}",
        f"features={','.join(map(str, feature_ids))}x{feature_width}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
