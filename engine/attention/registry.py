"""Attention backends by name."""

from types import MappingProxyType

from ..kv.pool import KVPool
from .backend import PagedAttention
from .torch_attention import TorchAttention
from .triton_attention import TritonAttention

BACKENDS = MappingProxyType[str, type[PagedAttention]]({"triton": TritonAttention, "torch": TorchAttention})


def attention_for(pool: KVPool, name: str = "", *, scale: float | None = None) -> PagedAttention:
    """The backend `name` over `pool`; without a name that of the pool's device. `scale` as in `PagedAttention`.

    Raises ValueError naming the backends for an unknown name.
    """
    name = name or ("triton" if pool.device.type == "cuda" else "torch")
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: use one of {', '.join(BACKENDS)}")
    return BACKENDS[name](pool, scale)
