"""Safetensors checkpoints, in one file or several shards, with strict checks."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from ...kernels.fp8_scales import FP8
from ...kernels.mxfp4 import BLOCK
from ...kernels.packed_words import SPAN
from ..errors import CheckpointError
from ..kv.layouts import MLALayout
from ..parallel.sharing import ALONE, Sharing
from .config import ModelConfig
from .config_reader import read_json
from .interface import CausalLM, StoredForms
from .layers import NamedTensors
from .quant.int4_projection import VALUES_A_WORD
from .quant.kv_scales import FP8_KV, KV_SCALE_SUFFIXES
from .quant.registry import quantise_at_load
from .registry import build_model, load_model_config
from .safetensors_file import SafetensorsFile, StoredTensor
from .text_part import OTHER_PARTS
from .weight_cuts import Cut, cuts_of, is_elsewhere, rank_config
from .weight_reader import PIECE_BYTES, Piece, ReadReport, cut_pieces, pieces_of, pieces_of_rows, read_pieces

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
MXFP4_SUFFIXES = ("_blocks", "_scales")  # of experts in 4 bits, whose blocks are the third dimension
LATENT_UP = re.compile(r"\.kv_b_proj\.(weight|qweight)$")  # has the model's dtype once loaded
INDEX_FILE = "model.safetensors.index.json"
LOADABLE = (torch.float32, torch.float16, torch.bfloat16)
# Matrices that `--quantize fp8` rounds.
ROUNDED = re.compile(r"layers\.\d+\.(?!.*kv_b_proj).*(_proj|_with_mqa|\.experts\.\d+\.w[123])\.weight$")
BLOCKS_A_PART = SPAN // BLOCK
SCALE_SUFFIX = "_scale"  # of a name behind that of the tensor whose scales it holds
# Computed from the config at load time; old checkpoints still contain them.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
EXPERTS = ".experts."  # in the names of the tensors of routed experts
WHOLE: Mapping[str, Cut] = MappingProxyType({})
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MTP_PREFIXES = ("mtp.", "model.mtp.", "model.mtp_layers.")  # modules of multi-token prediction


def find_shards(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, sorted by name. A file is its own only shard.

    Raises CheckpointError, naming the missing or malformed file.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if not (path / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; fetch the weights again"
        )
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{path / INDEX_FILE}: weight_map is missing or malformed; fetch the file again"
        )
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(
                f"{path / INDEX_FILE}: shard {name!r} points outside the checkpoint directory"
            )
        if not (path / name).is_file():
            raise CheckpointError(
                f"{path / name}: shard is missing, {INDEX_FILE} lists {len(names)} files; fetch it again"
            )
    return [path / name for name in names]


def iter_safetensors(path: Path) -> NamedTensors:
    """Every tensor of a checkpoint directory or file, as (name, CPU tensor).

    All shards are found before the first tensor.

    Raises CheckpointError as `find_shards`, and for an incomplete shard.
    """
    for shard in find_shards(path):
        try:
            with safe_open(shard, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{shard}: not a complete safetensors file ({error}); fetch it again"
            ) from None


def fill_tensors(
    wanted: dict[str, torch.Tensor],
    path: Path,
    ignored: tuple[str, ...] = (),
    *,
    rounds: bool = False,
    cuts: Mapping[str, Cut] = WHOLE,
    elsewhere: Callable[[str], bool] = lambda name: False,
) -> ReadReport:
    """Fill `wanted`, checkpoint name -> contiguous memory, converting to each tensor's dtype.

    Of a tensor in `cuts` only that part is read. Tensors for which `elsewhere` is true belong to other ranks.

    The headers are checked before any data is read: each wanted tensor must be there once, with its shape and
    a float dtype. Wanted tensors of other dtypes must be stored in theirs. With `rounds`, a wanted e4m3
    matrix must be stored in a float dtype: it is rounded by rows, and the tensor wanted under its name with
    SCALE_SUFFIX gets the scales. A stored single value fills wanted scales. Other names are allowed only with
    a suffix in `ignored`, or with a prefix in it: a prefix ends with a dot. Raises CheckpointError.
    """
    missing = dict.fromkeys(wanted)
    unexpected: list[str] = []
    pieces: list[Piece] = []
    singles: list[tuple[torch.Tensor, torch.Tensor]] = []
    for shard in find_shards(path):
        for stored in SafetensorsFile.read(shard).tensors:
            name = stored.name
            if name not in wanted:
                if not (_is_ignored(name, (*IGNORED_SUFFIXES, *ignored)) or elsewhere(name)):
                    unexpected.append(name)
                continue
            target, cut = wanted[name], cuts.get(name)
            if name not in missing:
                raise CheckpointError(
                    f"{path}: tensor {name} is in more than one shard; fetch the checkpoint again"
                )
            del missing[name]
            if _is_single(stored, target, cut):
                cut = None
                singles.append((target, torch.empty(1, dtype=target.dtype, device=target.device)))
                target = singles[-1][1]
            dtype = _loadable(path, stored, target, rounds, cut)
            if rounds and target.dtype == FP8:
                scales = wanted[name + SCALE_SUFFIX]
                missing.pop(name + SCALE_SUFFIX, None)
                pieces += pieces_of_rows(shard, stored.first, dtype, target, scales, cut)
            elif cut is not None:
                pieces += cut_pieces(shard, stored.first, dtype, target, cut)
            else:
                pieces += pieces_of(shard, stored.first, dtype, target)
    if missing:
        raise CheckpointError(
            f"{path}: {_some(list(missing))} missing from the weights; fetch the checkpoint again"
        )
    if unexpected:
        raise CheckpointError(
            f"{path}: {_some(unexpected)} unknown to this architecture; the weights belong to another config"
        )
    report = read_pieces(pieces)
    for target, value in singles:
        target.copy_(value.expand(target.shape))
    return report


def _is_single(stored: StoredTensor, target: torch.Tensor, cut: Cut | None) -> bool:
    """Whether one stored value stands for all values of `target`, which are scales.

    A rank may have only one of the values that `cut` shares out.
    """
    num_values = target.numel() if cut is None else cut.full
    return math.prod(stored.shape) == 1 < num_values and target.dtype == torch.float32 and target.dim() == 1


def _loadable(
    path: Path, stored: StoredTensor, target: torch.Tensor, rounds: bool, cut: Cut | None
) -> torch.dtype:
    """The dtype of a stored tensor that fits `target`, or whose part `cut` does. Raises CheckpointError."""
    shape = list(target.shape)
    if cut is not None:
        shape[cut.dim] = cut.full
    if _sizes(stored.shape) != _sizes(tuple(shape)):
        raise CheckpointError(
            f"{path}: tensor {stored.name} has shape {list(stored.shape)}, config.json asks for "
            f"{shape}; "
            "the weights belong to another config"
        )
    dtype = stored.dtype
    takes_floats = target.dtype in LOADABLE or (rounds and target.dtype == FP8)
    if takes_floats and dtype in LOADABLE:
        return dtype
    if takes_floats or dtype is None or dtype != target.dtype:
        supported = "float32, float16 and bfloat16" if takes_floats else target.dtype
        raise CheckpointError(
            f"{path}: tensor {stored.name} is {dtype or stored.code}; supported here: {supported}; "
            "the weights belong to another config"
        )
    return dtype


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` without dimensions of one, which writers of scales add as they like."""
    return tuple(size for size in shape if size != 1)


def weight_bytes(
    path: Path,
    dtype: torch.dtype,
    ignored: tuple[str, ...] = (),
    *,
    quantize: str = "none",
    sharing: Sharing = ALONE,
) -> int:
    """Bytes of a checkpoint's tensors in `dtype`, by its headers, without those `ignored` as in
    `fill_tensors`; about those of one rank in `sharing`. Tensors of other dtypes than floats stay as they
    are. `quantize` as in `load_model`.

    Raises CheckpointError as `fill_tensors`.
    """
    whole = {True: 0, False: 0}  # by whether they are of routed experts
    for shard in find_shards(path):
        for each in SafetensorsFile.read(shard).tensors:
            if not _is_ignored(each.name, ignored):
                whole[EXPERTS in each.name] += _loaded_bytes(each, dtype, quantize)
    return whole[True] // sharing.experts.size + whole[False] // sharing.tensor.size


def _loaded_bytes(stored: StoredTensor, dtype: torch.dtype, quantize: str) -> int:
    count = math.prod(stored.shape)
    if LATENT_UP.search(stored.name):
        return count * dtype.itemsize * (VALUES_A_WORD if stored.name.endswith(".qweight") else 1)
    if stored.dtype == torch.uint8 and stored.name.endswith(MXFP4_SUFFIXES):
        blocks = stored.shape[2]  # filled up to whole parts once packed
        return stored.num_bytes // blocks * (-(-blocks // BLOCKS_A_PART) * BLOCKS_A_PART)
    if stored.dtype not in LOADABLE:
        return stored.num_bytes
    is_rounded = quantize == "fp8" and ROUNDED.search(stored.name) is not None
    return count * (FP8.itemsize if is_rounded else dtype.itemsize)


def _is_ignored(name: str, ignored: tuple[str, ...]) -> bool:
    """Whether `name` ends with one of `ignored`, or begins with one of those that end with a dot."""
    prefixes = tuple(each for each in ignored if each.endswith("."))
    return name.startswith(prefixes) or name.endswith(ignored)


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"tensor {shown} is" if len(names) == 1 else f"{len(names)} tensors ({shown}, ...) are"


def has_own_head(path: Path) -> bool:
    """Whether the checkpoint at `path` holds an lm_head that differs from its embedding.

    transformers does not tie such a model, whatever its config says. Raises CheckpointError as
    `fill_tensors`.
    """
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for shard in find_shards(path):
        tensors = SafetensorsFile.read(shard).tensors
        found |= {each.name: (shard, each) for each in tensors if each.name in (EMBEDDING, HEAD)}
    if len(found) < 2:
        return False
    (shard, embedding), (other, head) = found[EMBEDDING], found[HEAD]
    if (embedding.code, embedding.shape) != (head.code, head.shape):
        return True
    with shard.open("rb") as one, other.open("rb") as two:
        for start in range(0, head.num_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, head.num_bytes - start)
            one.seek(embedding.first + start)
            two.seek(head.first + start)
            if one.read(count) != two.read(count):
                return True
    return False


def load_stored_config(path: Path) -> ModelConfig:
    """As `load_model_config`, with embeddings that are tied only where no other lm_head is stored.

    A tied one that is not is told in the log. Raises CheckpointError as `load_model_config` and
    `has_own_head`.
    """
    config = load_model_config(path)
    if config.tie_word_embeddings and has_own_head(path):
        logger.warning("%s: tie_word_embeddings is true, but %s is another matrix; it is used", path, HEAD)
        return replace(config, tie_word_embeddings=False)
    return config


def needless_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Names of tensors that a checkpoint may have and no model of `config` reads, and prefixes of such.

    A tied model's own lm_head is a copy of the embedding. Scales of keys and values are for those in 8 bits.
    Modules of multi-token prediction belong to a drafter. Models of images are not loaded.
    """
    behind = range(config.num_layers, config.num_layers + config.num_mtp_modules)
    modules = (*MTP_PREFIXES, *(f"model.layers.{layer}." for layer in behind))
    if config.is_text_part:
        modules += OTHER_PARTS
    if config.kv_dtype != FP8_KV:
        modules += KV_SCALE_SUFFIXES
    return (*modules, HEAD) if config.tie_word_embeddings else modules


@torch.no_grad()
def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    is_invariant: bool = False,
    quantize: str = "none",
    kv_dtype: str = "auto",
    sharing: Sharing = ALONE,
) -> tuple[CausalLM, ModelConfig]:
    """The model at `path` and its config, with weights converted to `dtype` on `device`.

    Matrices of a quantised checkpoint keep their form. `is_invariant`: its operations are batch-invariant.
    `quantize` "fp8": the matrices of a checkpoint in floats are rounded while they are read. `kv_dtype`: that
    of stored keys and values, a name in `quant.kv_scales.KV_DTYPES`.

    A rank of several in `sharing` reads its part of the weights only. The config is that of the whole model.

    Raises CheckpointError as `load_model_config`, `quantise_at_load`, `rank_config` and `fill_tensors`, and
    for a model whose attention is not batch-invariant although `is_invariant`.
    """
    path = Path(path)
    config = load_stored_config(path)
    find_shards(path)  # a missing file is reported before memory is taken
    config = replace(config, quant=quantise_at_load(quantize, config.quant, path), kv_dtype=kv_dtype)
    own = rank_config(config, sharing, str(path))
    if is_invariant and isinstance(config.kv_layout(1, 1, dtype), MLALayout):
        raise CheckpointError(
            f"deterministic on: attention over latents ({config.architecture}) cuts a context by the number "
            "of requests, so it is not batch-invariant; use --deterministic off or another model"
        )
    model = build_model(own, dtype=dtype, device=device, is_invariant=is_invariant, sharing=sharing)
    rounds = quantize != "none"
    tensors = dict(model.tensors())
    report = fill_tensors(
        tensors,
        path,
        needless_tensors(config),
        rounds=rounds,
        cuts=cuts_of(tensors, config, sharing),
        elsewhere=partial(is_elsewhere, moe=own.moe),
    )
    logger.info("weights%s: %s", f" in {config.quant}" if config.quant else "", report)
    if isinstance(model, StoredForms):
        model.projections.finish()
    return model, config
