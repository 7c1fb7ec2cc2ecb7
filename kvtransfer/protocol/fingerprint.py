"""The pairing fingerprint: one hash over everything that makes KV of one worker valid on another.

Feature layers are not part of it. Prefill offers features, and decode takes the layers of its drafter or
none; see `layout.agree`.
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
    window_layers: int = 0,
) -> str:
    """sha256 (hex) of the arguments.

    The router pairs only workers with equal fingerprints. The KV handshake then compares their layouts.
    """
    parts = [
        f"protocol={PROTOCOL_MAJOR}",
        f"model={model_fingerprint}",
        f"dtype={dtype}",
        f"page_size={page_size}",
        f"heads={num_layers}x{num_kv_heads}x{head_dim}",
        *([f"window_layers={window_layers}"] if window_layers else []),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
