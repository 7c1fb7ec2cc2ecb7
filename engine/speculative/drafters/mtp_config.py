"""The config of multi-token-prediction (MTP) modules, and the names of their tensors in each dialect.

A module is one decoder layer over a projection of two streams: the embedding of the next token, and the
hidden of the target or of another module. Checkpoints keep the modules beside the target's own layers, so the
config is that of the target, with a count of modules. A prefill engine reads the config only: every family
takes the last layer's output as its feature. Decode applies the target's final norm where a family wants it.

Four dialects name the same network:

    qwen      mtp.*                    Qwen3-Next, Qwen3.5: one module
    deepseek  model.layers.N.*         DeepSeek-V3, GLM-4.5, Kimi: behind the last layer of the target
    mimo      model.mtp_layers.N.*     MiMo-7B: the hidden stream comes first
    mimo_v2   model.mtp.layers.N.*     MiMo-V2: the hidden before the target's final norm
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ...errors import CheckpointError
from ...models.config import ModelConfig
from ...models.config_reader import ConfigReader, read_json
from ...models.registry import load_model_config
from .mtp_names import COUNT_KEYS, UNCOUNTED
from .spec_config import AuxSpec, DraftDims

CHAIN_KEY = "chain_mtp_hidden_states"
# Keys of networks whose modules have parts that no engine here runs.
_UNSUPPORTED = MappingProxyType(
    {
        "num_experts": "routed experts",
        "num_local_experts": "routed experts",
        "linear_num_value_heads": "the hidden of a target with linear attention",
        "attn_output_gate": "gated attention",
        "swa_num_attention_heads": "sliding-window attention",
        "mtp_use_dedicated_embeddings": "embeddings of their own",
        "speculators_model_type": "the layout of the speculators library",
    }
)


@dataclass(frozen=True, kw_only=True)
class MtpDialect:
    """Names of tensors, and the switches that a family's checkpoints do not state.

    `parts` maps our names to the checkpoint's, `layer` is the prefix of the decoder layer, `renamed` maps
    parts of that layer. In each name `{module}` is the number of the module, and `{layer}` that number behind
    the target's layers. `hidden_first`: the projection reads the hidden before the embedding. `is_normed`:
    the hidden input is taken behind the final norm, that of the target or that of the module which computed
    it. `is_chained`: module k takes the hidden of module k-1 instead of the target's. `max_modules` 0: any
    number.
    """

    name: str
    parts: Mapping[str, str]
    layer: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    hidden_first: bool = False
    is_normed: bool = True
    is_chained: bool = False
    max_modules: int = 0

    def checkpoint_name(self, name: str, module: int, num_layers: int) -> str:
        """The checkpoint's name of tensor `name` of a module of a target with `num_layers` layers.

        `name` is ours: a key of `parts`, or "layer." and a part of the decoder layer, each with ".weight" or
        ".bias".
        """
        part, kind = name.rsplit(".", 1)
        if part.startswith("layer."):
            inner = part.removeprefix("layer.")
            stem = self.layer + self.renamed.get(inner, inner)
        else:
            stem = self.parts[part]
        return f"{stem.format(module=module, layer=num_layers + module)}.{kind}"


DIALECTS = (
    MtpDialect(
        name="qwen",
        parts={
            "fc": "mtp.fc",
            "embed_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "norm": "mtp.norm",
        },
        layer="mtp.layers.{module}.",
        max_modules=1,
    ),
    MtpDialect(
        name="deepseek",
        parts={
            "fc": "model.layers.{layer}.eh_proj",
            "embed_norm": "model.layers.{layer}.enorm",
            "hidden_norm": "model.layers.{layer}.hnorm",
            "norm": "model.layers.{layer}.shared_head.norm",
            "lm_head": "model.layers.{layer}.shared_head.head",
            "embed_tokens": "model.layers.{layer}.embed_tokens",
        },
        layer="model.layers.{layer}.",
        is_chained=True,
    ),
    MtpDialect(
        name="mimo",
        parts={
            "fc": "model.mtp_layers.{module}.input_proj",
            "embed_norm": "model.mtp_layers.{module}.token_layernorm",
            "hidden_norm": "model.mtp_layers.{module}.hidden_layernorm",
            "norm": "model.mtp_layers.{module}.final_layernorm",
        },
        layer="model.mtp_layers.{module}.",
        hidden_first=True,
    ),
    MtpDialect(
        name="mimo_v2",
        parts={
            "fc": "model.mtp.layers.{module}.eh_proj",
            "embed_norm": "model.mtp.layers.{module}.enorm",
            "hidden_norm": "model.mtp.layers.{module}.hnorm",
            "norm": "model.mtp.layers.{module}.final_layernorm",
        },
        layer="model.mtp.layers.{module}.",
        renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
        is_normed=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """The modules of one checkpoint. `layer` has the sizes of a module's decoder layer.

    `num_modules` counts the modules of the checkpoint. `is_chained` overrides the dialect; None: as the
    dialect says.
    """

    path: Path
    layer: ModelConfig
    num_modules: int
    is_chained: bool | None
    target_layers: int
    aux: AuxSpec
    dims: DraftDims

    def __repr__(self) -> str:
        return (
            f"<MtpConfig {self.num_modules} modules, hidden {self.layer.hidden_size}, layer output "
            f"{self.aux.ids[0]}>"
        )


def load_mtp_config(path: Path, target: ModelConfig, *, dtype: str | None = None) -> MtpConfig:
    """Reads `path`/config.json for the modules of `target`, which runs in `dtype` (None: its checkpoint's).

    Raises CheckpointError naming file, key, value and remedy for modules that do not fit or cannot run.
    """
    file = Path(path) / "config.json"
    raw = read_json(file)
    reader = ConfigReader(raw, file)
    for key, what in _UNSUPPORTED.items():
        if raw.get(key):
            raise reader.error(
                key,
                f"the MTP modules need {what}, which baton does not run; use modules of dense layers, or no "
                "draft",
            )
    layer = load_model_config(path)
    for name, value, wanted in (
        ("hidden_size", layer.hidden_size, target.hidden_size),
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("num_hidden_layers", layer.num_layers, target.num_layers),
    ):
        if value != wanted:
            raise reader.error(
                name, f"the target has {wanted}; use the modules that were trained for this target"
            )
    running = target.dtype if dtype is None else dtype
    counted = next((key for key in COUNT_KEYS if raw.get(key)), COUNT_KEYS[0])
    return MtpConfig(
        path=Path(path),
        layer=layer,
        num_modules=reader.count(counted, UNCOUNTED),
        is_chained=None if raw.get(CHAIN_KEY) is None else reader.flag(CHAIN_KEY, False),
        target_layers=target.num_layers,
        aux=AuxSpec(ids=(target.num_layers - 1,), convention="default", dtype=running),
        dims=DraftDims(
            target_feature_width=target.hidden_size,
            target_feature_dtype=running,
            self_width=layer.hidden_size,
            self_dtype=running,
            num_features=1,
        ),
    )


def dialect_of(config: MtpConfig, names: Iterable[str]) -> MtpDialect:
    """The dialect of a checkpoint with tensors `names`.

    Raises CheckpointError for none, several, or more modules than the dialect has.
    """
    known = set(names)
    found = [d for d in DIALECTS if d.checkpoint_name("fc.weight", 0, config.target_layers) in known]
    if len(found) != 1:
        wanted = ", ".join(d.checkpoint_name("fc.weight", 0, config.target_layers) for d in DIALECTS)
        raise CheckpointError(
            f"{config.path}: the weights hold {len(found)} of {wanted}, and MTP modules have exactly one; "
            "use a checkpoint that was published with its modules"
        )
    dialect = found[0]
    if 0 < dialect.max_modules < config.num_modules:
        raise CheckpointError(
            f"{config.path}: config.json counts {config.num_modules} modules, but only "
            f"{dialect.max_modules} is supported under {dialect.layer.split('.')[0]}.*"
        )
    return dialect
