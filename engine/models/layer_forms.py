"""What the layers of a family have that a Llama's do not: windows, caps, norms, gates, scales and names.

`read_forms` reads it from a config.json with the rules and defaults of the family's class in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from .config_reader import ConfigReader
from .layer_windows import FULL, SLIDING, layer_windows, unturned_layers
from .rope import RopeConfig, read_rope_config


class NormPlaces(Enum):
    """Where a layer has norms: in front of attention and MLP, behind them, or both."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"


PARTIAL = ("phi3", "glm4_moe")  # families whose heads may turn in part
NORMS: Mapping[str, NormPlaces] = MappingProxyType(
    {"gemma2": NormPlaces.SANDWICH, "gemma3_text": NormPlaces.SANDWICH, "olmo2": NormPlaces.POST}
)
NORM_OFFSETS: Mapping[str, float] = MappingProxyType(
    {"gemma2": 1.0, "gemma3_text": 1.0, "olmo2": 0.0, "gpt_oss": 0.0}
)


@dataclass(frozen=True, kw_only=True)
class LayerForms:
    """Switches of the layers of a model; the defaults are a Llama's.

    `windows`: of each layer's attention in tokens, 0 for all tokens; empty: no layer has one. `softcap` of
    the scores and `final_softcap` of the logits, 0.0 for none. `scale` of the scores, 0.0 for the default of
    the head dimension. `has_sinks`: each head has a sink. `unturned`: the layers whose q and k are not
    rotated. `local_rope`: the rotation of layers with a window, None for that of all. `norms` and
    `norm_offset`, the latter as in `kernels.rms_norm`. `has_whole_norm`: q and k are normed over all heads
    together, `whole_heads` of q and k on all ranks, None with one rank. `is_gelu`: of the gate of the MLP.
    `embed_scale`: a factor of the embeddings. `is_fused`: q, k and v, as well as gate and up, are one matrix
    in the checkpoint.
    """

    windows: tuple[int, ...] = ()
    softcap: float = 0.0
    final_softcap: float = 0.0
    scale: float = 0.0
    has_sinks: bool = False
    unturned: frozenset[int] = frozenset()
    local_rope: RopeConfig | None = None
    norms: NormPlaces = NormPlaces.PRE
    norm_offset: float | None = None
    has_whole_norm: bool = False
    whole_heads: tuple[int, int] | None = None
    is_gelu: bool = False
    embed_scale: float = 1.0
    is_fused: bool = False

    def window(self, layer: int) -> int:
        """The window of a layer, 0 for none."""
        return self.windows[layer] if self.windows else 0

    @property
    def common_window(self) -> int:
        """The longest window, if every layer has one; otherwise 0: some layer reads every token."""
        return max(self.windows) if self.windows and all(self.windows) else 0


PLAIN_LAYERS = LayerForms()


def read_forms(reader: ConfigReader, family: str) -> tuple[LayerForms, RopeConfig]:
    """The forms of the layers of `family`, a model_type, and the rotation of all layers or of those without a
    window. The config of `reader` has the family's defaults for absent keys.

    Raises CheckpointError, naming file, key, value and remedy, for what is not supported.
    """
    raw, windows = reader.raw, layer_windows(reader, family)
    local: RopeConfig | None = None
    if family == "gemma3_text":
        raw, local = _local_rope(reader)
    rope = read_rope_config(raw, reader.source, allows_partial=family in PARTIAL)
    is_gemma = family in ("gemma2", "gemma3_text")
    forms = LayerForms(
        windows=windows,
        softcap=_cap(reader, "attn_logit_softcapping") if family == "gemma2" else 0.0,
        final_softcap=_cap(reader, "final_logit_softcapping") if is_gemma else 0.0,
        scale=float(reader.count("query_pre_attn_scalar", 256)) ** -0.5 if is_gemma else 0.0,
        has_sinks=family == "gpt_oss",
        unturned=unturned_layers(reader) if family == "smollm3" else frozenset(),
        local_rope=local,
        norms=NORMS.get(family, NormPlaces.PRE),
        norm_offset=NORM_OFFSETS.get(family),
        has_whole_norm=family == "olmo2",
        is_gelu=is_gemma,
        embed_scale=float(reader.count("hidden_size")) ** 0.5 if is_gemma else 1.0,
        is_fused=family == "phi3",
    )
    return forms, rope


def _cap(reader: ConfigReader, key: str) -> float:
    """A soft cap, 0.0 for none."""
    if reader.raw.get(key) is None:
        return 0.0
    cap = reader.number(key, 0.0)
    if cap <= 0:
        raise reader.error(key, "a positive number is required here, or null")
    return cap


def _local_rope(reader: ConfigReader) -> tuple[Mapping[str, object], RopeConfig]:
    """The rotary keys of the layers without a window in Gemma 3, and the rotation of those with one.

    Both spellings: `rope_parameters` by layer type, and `rope_theta`, `rope_local_base_freq`, `rope_scaling`.
    """
    raw, both = reader.raw, reader.raw.get("rope_parameters") or {}
    if not isinstance(both, Mapping) or set(both) - {SLIDING, FULL}:
        raise reader.error("rope_parameters", f"it must have the keys {FULL} and {SLIDING}")
    full, sliding = (dict(both.get(kind) or {}) for kind in (FULL, SLIDING))
    scaling = raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise reader.error("rope_scaling", "it must be an object with rope_type and its parameters")
    full.update(scaling)
    full.setdefault("rope_theta", raw.get("rope_theta", 1e6))
    sliding.setdefault("rope_theta", raw.get("rope_local_base_freq", 1e4))
    shared = {k: v for k, v in raw.items() if k not in ("rope_parameters", "rope_scaling", "rope_theta")}
    return shared | {"rope_parameters": full}, read_rope_config(
        shared | {"rope_parameters": sliding}, reader.source
    )
