"""One hash over everything that makes the KV of one worker mean something on another.

Feature layers are not in it: prefill offers features, and decode takes those of its head, or none; see `layout.agree`.
"""

import hashlib

from ...cluster.protocol.messages import PROTOCOL_MAJOR


def pair_fingerprint(
    model_fingerprint: str,
    *,
    dtype: str,
    page_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
) -> str:
    """sha256 hex. Workers of equal fingerprint may be paired; the KV handshake then compares their layouts."""
    parts = [
        f"protocol={PROTOCOL_MAJOR}",
        f"model={model_fingerprint}",
        f"dtype={dtype}",
        f"page_size={page_size}",
        f"heads={num_layers}x{num_kv_heads}x{head_dim}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
