"""Keys and values stored in 8-bit floating point (e4m3), with a scale per layer and KV head.

A stored key is the key divided by its scale. Attention is linear in both, so the scale of the keys is
multiplied into the queries and that of the values into the result, and the kernels know of none. The scales
are the checkpoint's (`k_scale`, `v_scale`), or 1. Both workers of a pair read them from equal checkpoints,
whose bytes are in the fingerprint, so a page means the same on either side. Scales measured at start would
differ between the two.

Legend: T tokens, N query heads, K key/value heads, D head dimension.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from ....kernels.attention_form import AttentionForm
from ....kernels.fp8_scales import FP8
from .projection import NamedTensors

FP8_KV = "fp8_e4m3"
KV_DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType({"auto": None, FP8_KV: FP8})
KV_SCALE_SUFFIXES = (".self_attn.k_scale", ".self_attn.v_scale")


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of stored keys and values for the setting `name`; "auto" is the model's `dtype`.

    Raises ValueError for an unknown name.
    """
    if name not in KV_DTYPES:
        raise ValueError(f"kv_dtype {name!r}: use one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name] or dtype


class KVScales:
    """The scales of one layer, float32 `[K]` for keys and for values."""

    def __init__(self, num_kv_heads: int, device: torch.device | str) -> None:
        self.keys = torch.empty(num_kv_heads, dtype=torch.float32, device=device)
        self.values = torch.empty(num_kv_heads, dtype=torch.float32, device=device)

    def attend(
        self,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, AttentionForm], torch.Tensor],
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        form: AttentionForm,
    ) -> torch.Tensor:
        """`attend` of `layer` and `form` with `q` `[T, N, D]`, `k`, `v` `[T, K, D]`, stored by scale -> `[T,
        N, D]`.
        """
        group = q.shape[1] // k.shape[1]
        by_key, by_value = (each[None, :, None] for each in (self.keys, self.values))
        scaled = (q * by_key.repeat_interleave(group, dim=1)).to(q.dtype)
        stored_k, stored_v = (k / by_key).to(k.dtype), (v / by_value).to(v.dtype)
        found = attend(layer, scaled, stored_k, stored_v, form)
        return (found * by_value.repeat_interleave(group, dim=1)).to(q.dtype)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's names under `prefix`; one value stands for all heads."""
        yield f"{prefix}k_scale", self.keys
        yield f"{prefix}v_scale", self.values
