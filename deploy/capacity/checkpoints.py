"""Reads a checkpoint's metadata without loading weights: sizes of KV and weights, missing or damaged files.

KV bytes per token = 2 (keys and values) * layers * KV heads * head dimension * bytes per element. A layer
with a window holds and moves that of the last tokens alone. EAGLE3's feature bytes per token = captured
layers * hidden size * bytes per element.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError
from ...engine.errors import CheckpointError
from ...engine.hub import NGRAM
from ...engine.kv.budget import WINDOW_SLACK, PageBudget, WindowBudget
from ...engine.models.config_reader import ConfigReader, read_json
from ...engine.models.families import (
    default_head_dim,
    default_positions,
    family_of,
    reached_positions,
    with_defaults,
)
from ...engine.models.layer_windows import layer_windows
from ...engine.models.text_part import OTHER_PARTS, text_config, text_name
from ...engine.speculative.drafters.mtp_names import COUNT_KEYS, UNCOUNTED, is_mtp

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100 << 20  # bytes; the limit of the safetensors format
FLOATS = ("F32", "F16", "BF16")
# The matrices of a layer that `--quantize` rounds.
MATRIX = re.compile(r"\.layers\.\d+\.(?!.*kv_b_proj).*(_proj|_with_mqa|\.experts\.\d+\.w[123])\.weight$")
PACKED, VALUES_A_WORD = ".qweight", 8  # of 4-bit values in words of 32 bits
MXFP4, VALUES_A_BYTE = "_blocks", 2  # of 4-bit values of experts, in blocks that are the third dimension
MXFP4_SCALES, BLOCKS_A_PART = "_scales", 4  # a worker fills blocks up to whole parts
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
LATENT_UP = ".kv_b_proj."  # the projection of latents, which a worker keeps in the dtype of the model
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EAGLE_NAMES = (["LlamaForCausalLMEagle"], ["EagleLlamaForCausalLM"], ["Qwen2ForCausalLMEagle"])
EAGLE_FAMILIES = (["LlamaForCausalLM"], ["Qwen2ForCausalLM"])  # EAGLE, unless the config is an EAGLE3 head's
BLOCK_DRAFTERS = (["DFlashDraftModel"],)
CAPTURED_LAYERS = 3  # the number for a head whose config names none
MODULE_PREFIXES = ("mtp.", "model.mtp.", "model.mtp_layers.")  # beside the layers behind the target's last
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """Sizes computed from a config.json.

    `num_features` counts the target layers whose output the drafter reads; 0 means no drafter.
    `kv_value_bytes`: bytes of a stored key's or value's element, 0: `dtype_bytes`. `latent_size`: the values
    that a token has in a layer instead of keys and values, 0: none. `windows`: of each layer in tokens, 0 for
    none; empty: no layer has one. `frees_windows`: workers give up the KV behind them. `max_context`: the
    longest request in tokens, 0 if unknown.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    dtype_bytes: int = 2
    num_features: int = 0
    kv_value_bytes: int = 0
    latent_size: int = 0
    windows: tuple[int, ...] = ()
    frees_windows: bool = True
    max_context: int = 0

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.num_layers * self._layer_bytes

    @property
    def full_bytes(self) -> int:
        """KV bytes of one token in the layers that keep it."""
        return self.kv_bytes - self.window_bytes

    @property
    def window_bytes(self) -> int:
        """KV bytes of one token in the layers that give it up behind their window."""
        return sum(window > 0 for window in self.windows) * self._layer_bytes if self.frees_windows else 0

    @property
    def window(self) -> int:
        """The longest window in tokens behind which KV is given up, 0 without one."""
        return max(self.windows, default=0) if self.frees_windows else 0

    @property
    def page_budget(self) -> PageBudget:
        """The KV of pages of one token."""
        if not self.window:
            return PageBudget(kv_bytes=self.kv_bytes)
        windows = WindowBudget(kv_bytes=self.window_bytes, window=self.window, max_context=self.max_context)
        return PageBudget(kv_bytes=self.full_bytes, windows=windows)

    def held_in_windows(self, tokens: int) -> int:
        """The tokens of a running request of `tokens` whose KV layers with a window hold."""
        return min(tokens, self.window + WINDOW_SLACK)

    def held_bytes(self, tokens: int) -> int:
        """KV bytes of a running request of `tokens` tokens."""
        return tokens * self.full_bytes + self.held_in_windows(tokens) * self.window_bytes

    def requests_in(self, memory: float, tokens: int) -> int:
        """Running requests of `tokens` tokens whose KV fits into a pool of `memory` bytes, which a worker
        divides between both kinds of pages before it knows them.
        """
        if not self.window:
            return int(memory // self.held_bytes(tokens))
        budget = self.page_budget
        pages = budget.num_pages(int(memory))
        in_windows = (budget.num_window_pages(pages) - 1) // self.held_in_windows(tokens)
        return max(0, min((pages - 1) // tokens, in_windows))

    def rows_read(self, context: float) -> float:
        """The rows of KV that a layer reads for a token behind `context` others, on average."""
        return sum(min(context, window or context) for window in self._reach) / len(self._reach)

    def attended_share(self, prompt: int) -> float:
        """The sum over all layers of the pairs of tokens that attend to each other in a prompt, where 1 is
        what a layer without a window computes.
        """
        near = [min(window or prompt, prompt) / prompt for window in self._reach]
        return sum(share * (2 - share) for share in near)

    def moved_bytes(self, tokens: int, prompt: int) -> int:
        """Bytes that the hand-off of a prompt of `prompt` tokens moves for its first `tokens` ones: KV and
        features.
        """
        in_window = max(0, tokens - max(0, prompt - self.window))
        return tokens * (self.full_bytes + self.feature_bytes) + in_window * self.window_bytes

    @property
    def _reach(self) -> tuple[int, ...]:
        return self.windows or (0,) * self.num_layers

    @property
    def _layer_bytes(self) -> int:
        value_bytes = self.kv_value_bytes or self.dtype_bytes
        return (self.latent_size or 2 * self.num_kv_heads * self.head_dim) * value_bytes

    @property
    def context_heads(self) -> int:
        """KV heads of `head_dim` that take as much memory as what attention copies of a context row."""
        return -(-self.latent_size // self.head_dim) if self.latent_size else self.num_kv_heads

    @property
    def feature_bytes(self) -> int:
        """Feature bytes of one token, which travel beside its KV."""
        return self.num_features * self.hidden_size * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, KV and features, by which blocks are sized."""
        return self.kv_bytes + self.feature_bytes


def head_dir(draft: str) -> Path | None:
    """The directory of the head that `draft` names; None without one, as for lookup."""
    return Path(draft) if draft and draft != NGRAM else None


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a checkpoint, of the text model alone. Raises ConfigError when it cannot be read."""
    try:
        source = directory / "config.json"
        return dict(text_config(read_json(source), source))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def model_config(directory: Path) -> dict[str, Any]:
    """The config.json of a target, with its family's values for absent keys. Raises ConfigError when it
    cannot be read.
    """
    document = read_config(directory)
    return with_defaults(document, family_of(document))


def shape_of(
    model: Path,
    draft: Path | None = None,
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    *,
    frees_windows: bool = True,
) -> KVShape:
    """The sizes of a checkpoint, with its head's features. `kv_dtype` is a setting of workers;
    `frees_windows`: they give up the KV behind windows. Raises ConfigError for an unusable config.
    """
    config = model_config(model)
    heads = _count(config, "num_attention_heads", model)
    hidden = _count(config, "hidden_size", model)
    family = family_of(config)
    latent, head_dim = 0, default_head_dim(family, hidden, heads)
    if config.get("kv_lora_rank"):
        latent, kv_heads = _latent_size(config, model), 1
        head_dim = sum(_count(config, key, model) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    else:
        kv_heads = _count(config, "num_key_value_heads", model, heads)
        head_dim = _count(config, "head_dim", model, head_dim)
    return KVShape(
        num_layers=_count(config, "num_hidden_layers", model),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        dtype_bytes=DTYPE_BYTES[dtype],
        kv_value_bytes=0 if kv_dtype == "auto" else 1,
        latent_size=latent,
        windows=() if latent else _windows(config, model),
        frees_windows=frees_windows,
        max_context=reached_positions(
            config, _count(config, "max_position_embeddings", model, default_positions(family))
        ),
        num_features=len(feature_layers(read_config(draft))) if draft is not None else 0,
    )


def _windows(config: Mapping[str, Any], source: Path) -> tuple[int, ...]:
    """The window of each layer in tokens, 0 for none; empty if no layer has one, or for families whose pages
    are never cut.
    """
    family = family_of(config)
    if family in ("", "sparse_block"):
        return ()
    try:
        return layer_windows(ConfigReader(config, source / "config.json"), family)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def head_kv_bytes(draft: Path, target: KVShape, steps: int) -> int:
    """KV bytes of one token in the layers of a head that drafts `steps` steps. Sizes that its config lacks
    are the target's.

    Each of several MTP modules drafts one step, and others are not loaded. Configs of heads may have the
    target's number of layers, so the tensors tell it; without shards, the config. Raises ConfigError for an
    unusable config.
    """
    config, names = read_config(draft), _elements(draft)
    config = {**(config.get("transformer_layer_config") or {}), **config}  # speculators heads nest the sizes
    if num_modules(config):
        layers = max(1, min(num_modules(config), steps))
    elif names:
        layers = 1 + max((int(found[1]) for name in names if (found := LAYER.search(name))), default=0)
    else:
        layers = _count(config, "num_hidden_layers", draft, 1)
    if config.get("kv_lora_rank"):
        size = _latent_size(config, draft)
    else:
        heads = _count(config, "num_key_value_heads", draft, target.num_kv_heads)
        size = 2 * heads * _count(config, "head_dim", draft, target.head_dim)
    return layers * size * target.dtype_bytes


def _latent_size(config: Mapping[str, Any], source: Path) -> int:
    """The values that a token has in a layer of attention over latents."""
    return _count(config, "kv_lora_rank", source) + _count(config, "qk_rope_head_dim", source)


def num_modules(head: Mapping[str, Any]) -> int:
    """The number of MTP modules beside the layers of a checkpoint; 0 for other heads."""
    return int(next((head[key] for key in COUNT_KEYS if head.get(key)), UNCOUNTED)) if is_mtp(head) else 0


def observes_late(head: Mapping[str, Any]) -> bool:
    """Whether the drafter of a checkpoint may see rows of steps without drafts later: EAGLE heads of any kind
    do, MTP modules and block drafters do not.
    """
    return not num_modules(head) and not _is_block_drafter(head)


def _is_block_drafter(head: Mapping[str, Any]) -> bool:
    return bool(head.get("dflash_config")) or head.get("architectures") in BLOCK_DRAFTERS


def count_weights(directory: Path) -> int:
    """The elements of a model's tensors in the shards of its checkpoint, without those of MTP modules;
    without shards, of a decoder with its config.

    Raises ConfigError for an unusable config.
    """
    is_module = _is_module_of(directory)
    counted = sum(count for name, count in _elements(directory).items() if not is_module(name))
    return counted or _dense_weights(directory)


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """The bytes of a model's tensors in the memory of one rank: those of all experts, of an embedding beside
    a head of its own, and all others. `top_k`: experts of a row, of `num_experts`.
    """

    others: int
    embedding: int = 0
    experts: int = 0
    num_experts: int = 0
    top_k: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.others + self.embedding + self.experts

    def read_by(self, num_rows: int) -> float:
        """The bytes that a step of `num_rows` rows reads, if each chooses its experts by itself. Rows of the
        embedding are too few to count.
        """
        if not self.num_experts:
            return float(self.others)
        missed = (1 - self.top_k / self.num_experts) ** num_rows
        return self.others + self.experts * (1 - missed)


def rank_weights(
    directory: Path, dtype_bytes: int, quantize: str = "none", *, tp: int = 1, expert_ranks: int = 1
) -> RankWeights:
    """The tensors of a model on one rank, where `tp` ranks share the model and `expert_ranks` its experts.
    Floating-point tensors take the model's dtype, others stay as stored.

    With `quantize`, each value of the layers' matrices takes one byte. A directory without weights counts as
    a Llama-like decoder of its config. Raises ConfigError for an unusable config.
    """
    config, rounded = model_config(directory), 1 if quantize != "none" else dtype_bytes
    chosen = experts_of(config, directory)
    total, embedding, experts = _tensor_bytes(directory, dtype_bytes, rounded)
    if not total:
        table = _count(config, "hidden_size", directory) * _count(config, "vocab_size", directory)
        heads = table * (1 if config.get("tie_word_embeddings") else 2)
        without = _dense_weights(directory, 0)
        experts = (_dense_weights(directory) - without) * rounded
        embedding = (heads - table) * dtype_bytes
        total = (without - heads) * rounded + heads * dtype_bytes + experts
    return RankWeights(
        others=(total - embedding - experts) // tp,
        embedding=embedding // tp,
        experts=experts // expert_ranks,
        num_experts=0 if chosen is None else chosen.num_experts,
        top_k=0 if chosen is None else chosen.top_k,
    )


def _tensor_bytes(directory: Path, dtype_bytes: int, rounded: int) -> tuple[int, int, int]:
    """The loaded bytes of a model's tensors, of its embedding beside a head of its own, and of its experts,
    by the shards' headers. Without a head the embedding is the head, which every step reads.

    Raises ConfigError for a header that lacks something.
    """
    is_module, entries = _is_module_of(directory), _entries(directory)
    try:
        sizes = {
            name: _loaded_bytes(name, entry, dtype_bytes, rounded)
            for name, entry in entries.items()
            if not is_module(name)
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{directory}: a shard's header has no usable {error}; copy the shard again"
        ) from None
    has_head = any(name.endswith(HEAD) for name in sizes)
    embedding = sum(size for name, size in sizes.items() if has_head and name.endswith(EMBEDDING))
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()), embedding, experts


def _loaded_bytes(name: str, entry: Mapping[str, Any], dtype_bytes: int, rounded: int) -> int:
    """The bytes of a tensor once loaded. `rounded`: bytes of a value of the layers' matrices."""
    shape, (first, end) = entry["shape"], map(int, entry["data_offsets"])
    count = math.prod(map(int, shape))
    if LATENT_UP in name and name.endswith((".weight", PACKED)):
        return count * dtype_bytes * (VALUES_A_WORD if name.endswith(PACKED) else 1)
    if entry["dtype"] == "U8" and name.endswith((MXFP4, MXFP4_SCALES)):
        blocks = int(shape[2])
        return (end - first) // blocks * (-(-blocks // BLOCKS_A_PART) * BLOCKS_A_PART)
    if entry["dtype"] not in FLOATS:
        return end - first
    return count * (rounded if MATRIX.search(name) else dtype_bytes)


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """The experts of a model: their number, the number that a token uses, and an expert's MLP size.

    `shared_size`: the MLP size of the expert that every token uses, 0 without one. `is_mixed`: some layers
    have an ordinary MLP instead.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_size: int
    is_mixed: bool


def experts_of(config: Mapping[str, Any], directory: Path) -> ExpertSizes | None:
    """The experts that a config names; None for a dense model. Raises ConfigError for an unusable config."""
    key = next((key for key in EXPERT_COUNTS if config.get(key)), None)
    if key is None:
        return None
    key_of_size = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    size, shared = _count(config, key_of_size, directory), config.get("shared_expert_intermediate_size") or 0
    if config.get("n_shared_experts"):
        shared = _count(config, "n_shared_experts", directory) * size
    has_dense = config.get("mlp_only_layers") or config.get("first_k_dense_replace")
    return ExpertSizes(
        num_experts=_count(config, key, directory),
        top_k=_count(config, "num_experts_per_tok", directory),
        intermediate_size=size,
        shared_size=shared,
        is_mixed=bool(has_dense) or (config.get("decoder_sparse_step") or 1) != 1,
    )


def count_used_weights(directory: Path) -> int:
    """As `count_weights`, but of the experts only as many as one token uses."""
    config = model_config(directory)
    experts, elements = experts_of(config, directory), _elements(directory)
    if experts is None:
        return count_weights(directory)
    if not elements:
        return _dense_weights(directory, experts.top_k)
    is_module = _is_module_of(directory)
    of_experts = sum(n for name, n in elements.items() if ".experts." in name and not is_module(name))
    return count_weights(directory) - of_experts + of_experts * experts.top_k // experts.num_experts


def count_head_weights(draft: Path) -> int:
    """The elements of a head's tensors: those of its MTP modules, if it has some, otherwise all. Without
    shards, those of a dense decoder with its config.

    Raises ConfigError for an unusable config.
    """
    is_module = _is_module_of(draft) if num_modules(read_config(draft)) else None
    names = _elements(draft).items()
    return sum(n for name, n in names if is_module is None or is_module(name)) or _dense_weights(draft)


def _is_module_of(directory: Path) -> Callable[[str], bool]:
    """Whether a tensor of a checkpoint, by its name, belongs to an MTP module."""
    config = read_config(directory)
    first = _count(config, "num_hidden_layers", directory) if num_modules(config) else None

    def is_module(name: str) -> bool:
        if name.startswith(MODULE_PREFIXES):
            return True
        found = LAYER.search(name)
        return first is not None and found is not None and int(found[1]) >= first

    return is_module


def _elements(directory: Path) -> dict[str, int]:
    """The number of elements of each tensor in the shards of a checkpoint; empty if one cannot be read."""
    try:
        return {
            name: math.prod(entry["shape"]) * _values_in(name, entry["dtype"])
            for name, entry in _entries(directory).items()
        }
    except (TypeError, KeyError):
        return {}


def _values_in(name: str, dtype: str) -> int:
    """The weights that one element of a tensor holds."""
    if name.endswith(PACKED):
        return VALUES_A_WORD
    if dtype == "U8" and name.endswith((MXFP4, MXFP4_SCALES)):
        return VALUES_A_BYTE if name.endswith(MXFP4) else 0
    return 1


def _entries(directory: Path) -> dict[str, Any]:
    """The headers' entries of all tensors of a checkpoint's text model by their names in it."""
    return {
        text_name(name): entry
        for shard in _shards(directory)[0]
        for name, entry in _tensors(_header(directory / shard)).items()
        if name != "__metadata__" and not name.startswith(OTHER_PARTS)
    }


def _dense_weights(directory: Path, num_experts: int | None = None) -> int:
    """The elements of a Llama-like decoder, without biases; `num_experts` of its experts, by default all."""
    config = model_config(directory)
    hidden, heads = (_count(config, key, directory) for key in ("hidden_size", "num_attention_heads"))
    head_dim = _count(config, "head_dim", directory, default_head_dim(family_of(config), hidden, heads))
    kv_heads = _count(config, "num_key_value_heads", directory, heads)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    experts = experts_of(config, directory)
    if experts is None:
        mlp = 3 * hidden * _count(config, "intermediate_size", directory)
    else:
        counted = experts.num_experts if num_experts is None else num_experts
        mlp = hidden * (3 * counted * experts.intermediate_size + experts.num_experts)
    vocabulary = hidden * _count(config, "vocab_size", directory)
    layers = _count(config, "num_hidden_layers", directory)
    return (
        layers * (attention + mlp + 2 * hidden)
        + hidden
        + vocabulary * (1 if config.get("tie_word_embeddings") else 2)
    )


def feature_layers(head: Mapping[str, Any]) -> list[int]:
    """The target layers that a drafter reads.

    Without any in its config, as many zeros as it reads by default: one for each layer of a DFLASH drafter,
    one for MTP modules and heads that read the last hidden alone, CAPTURED_LAYERS for other heads.
    """
    if _is_block_drafter(head):
        blocks = head.get("dflash_config") or {}
        ids = blocks.get("target_layer_ids") or head.get("target_layer_ids")
        return list(ids) if ids else [0] * int(head.get("num_hidden_layers") or 1)
    settings = head.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    named = settings.get(key) or head.get(key)
    reads_last = False in (settings.get("use_aux_hidden_state"), head.get("use_aux_hidden_state"))
    if num_modules(head) or _is_eagle(head) or reads_last:
        return [0]
    return list(named) if named else [0] * CAPTURED_LAYERS


def _is_eagle(head: Mapping[str, Any]) -> bool:
    """Whether a config is that of an EAGLE head, which reads the target's last hidden alone."""
    is_eagle3 = head.get("draft_vocab_size") or "speculators_model_type" in head
    names = head.get("architectures")
    return names in EAGLE_NAMES or (names in EAGLE_FAMILIES and not is_eagle3)


def faults_of(model: Path) -> list[str]:
    """Faults of a checkpoint, one line each: shards, their headers and lengths, the tokenizer."""
    faults = [] if (model / "tokenizer.json").exists() else [f"{model}: has no tokenizer.json"]
    shards, wrong = _shards(model)
    faults += [wrong] if wrong else []
    for shard in shards:
        fault = _shard_fault(model / shard)
        faults += [fault] if fault else []
    return faults


def identity_of(model: Path) -> str:
    """A digest of config.json and the headers of all shards, 12 hex digits. Weights are not read."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for shard in sorted(_shards(model)[0]):
        digest.update(shard.encode())
        digest.update(_header(model / shard))
    return digest.hexdigest()[:12]


def _count(config: Mapping[str, Any], key: str, source: Path, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{source}/config.json: {key} is {value!r}, not a number above 0; copy the checkpoint again"
        )
    return value


def _shards(model: Path) -> tuple[list[str], str]:
    """The expected weight files, and the faults of the list that names them."""
    index = model / INDEX
    if not index.exists():
        found = sorted(path.name for path in model.glob("*.safetensors"))
        return found, "" if found else f"{model}: has no *.safetensors"
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], f"{index}: is no list of shards"
    unsafe = [shard for shard in shards if not isinstance(shard, str) or "/" in shard]
    return ([], f"{index}: names {unsafe[0]!r}") if unsafe else (shards, "")


def _header(path: Path) -> bytes:
    """The JSON header of a safetensors file; b"" when it has none."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return file.read(length) if length <= HEADER_LIMIT else b""
    except (OSError, struct.error):
        return b""


def _tensors(header: bytes) -> dict[str, Any]:
    """The entries of a safetensors header; {} when it cannot be read."""
    try:
        document = json.loads(header)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _shard_fault(path: Path) -> str:
    if not path.exists():
        return f"{path}: is missing"
    header = _header(path)
    try:
        ends = [
            entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"
        ]
        expected = 8 + len(header) + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"{path}: is no safetensors file"
    size = path.stat().st_size
    return "" if size == expected else f"{path}: has {size} bytes, its header says {expected}"
