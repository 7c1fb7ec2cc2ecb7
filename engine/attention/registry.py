"""The registry of attention backends by name."""

from types import MappingProxyType

from ..kv.layouts import MLALayout
from ..kv.pool import KVPool
from ..kv.sparse_layout import SparseLayout
from ..kv.window_pool import WindowedPool
from .backend import AttentionBackend, PagedAttention
from .invariant_attention import InvariantAttention
from .latent_attention import LatentAttention
from .sparse_attention import SparseAttention
from .torch_attention import TorchAttention
from .triton_attention import TritonAttention
from .windowed_attention import WindowedAttention

INVARIANT = "invariant"
BACKENDS = MappingProxyType[str, type[PagedAttention]](
    {"triton": TritonAttention, "torch": TorchAttention, INVARIANT: InvariantAttention}
)


def attention_for(
    pool: KVPool, name: str = "", *, scale: float | None = None, max_context: int = 0
) -> AttentionBackend:
    """The backend `name` over `pool`, by default the one for the pool's layout and device.

    `scale` and `max_context` as in `PagedAttention`.

    Raises ValueError for an unknown name, listing the known ones, and for any name if the pool has side
    caches or latents, which one backend alone knows.
    """
    if isinstance(pool.layout, MLALayout):
        if name:
            raise ValueError(f"attention backend {name!r} reads no latents; this pool holds them")
        return LatentAttention(pool, scale, max_context=max_context)
    if isinstance(pool.layout, SparseLayout):
        if name:
            raise ValueError(f"attention backend {name!r} writes no side caches; this pool has them")
        return SparseAttention(pool, scale, max_context=max_context)
    name = name or ("triton" if pool.device.type == "cuda" else "torch")
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: use one of {', '.join(BACKENDS)}")
    if isinstance(pool, WindowedPool):
        return WindowedAttention(pool, BACKENDS[name], scale, max_context=max_context)
    return BACKENDS[name](pool, scale, max_context=max_context)
