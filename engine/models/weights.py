"""Safetensors checkpoints, in one file or several shards, with strict checks."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .config import ModelConfig, read_json
from .interface import CausalLM
from .layers import NamedTensors
from .registry import build_model, load_model_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LOADABLE = (torch.float32, torch.float16, torch.bfloat16)
# Computed from the config at load time; old checkpoints still contain them.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


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


def fill_tensors(wanted: dict[str, torch.Tensor], path: Path, ignored: tuple[str, ...] = ()) -> None:
    """Copy every tensor of the checkpoint at `path` into its namesake in `wanted`, converting the dtype.

    Raises CheckpointError unless each wanted tensor comes exactly once, with its shape and a float dtype.
    Other names are allowed only with a suffix in `ignored`.
    """
    missing = dict.fromkeys(wanted)
    unexpected: list[str] = []
    for name, tensor in iter_safetensors(path):
        if name not in wanted:
            if not name.endswith((*IGNORED_SUFFIXES, *ignored)):
                unexpected.append(name)
            continue
        target = wanted[name]
        if tensor.shape != target.shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(target.shape)}; "
                "the weights belong to another config"
            )
        if tensor.dtype not in LOADABLE:
            raise CheckpointError(
                f"{path}: tensor {name} is {tensor.dtype}; supported are float32, float16 and bfloat16"
            )
        if name not in missing:
            raise CheckpointError(
                f"{path}: tensor {name} is in more than one shard; fetch the checkpoint again"
            )
        target.copy_(tensor)
        del missing[name]
    if missing:
        raise CheckpointError(
            f"{path}: {_some(list(missing))} missing from the weights; fetch the checkpoint again"
        )
    if unexpected:
        raise CheckpointError(
            f"{path}: {_some(unexpected)} unknown to this architecture; the weights belong to another config"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"tensor {shown} is" if len(names) == 1 else f"{len(names)} tensors ({shown}, ...) are"


@torch.no_grad()
def load_model(
    path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", is_invariant: bool = False
) -> tuple[CausalLM, ModelConfig]:
    """The model at `path` and its config, with weights converted to `dtype` on `device`.

    `is_invariant`: its operations are batch-invariant.

    Raises CheckpointError as `load_model_config` and `fill_tensors`.
    """
    path = Path(path)
    config = load_model_config(path)
    find_shards(path)  # a missing file is reported before memory is taken
    model = build_model(config, dtype=dtype, device=device, is_invariant=is_invariant)
    # A tied model's own lm_head, where a checkpoint still has one, is a copy of the embedding.
    fill_tensors(dict(model.tensors()), path, ("lm_head.weight",) if config.tie_word_embeddings else ())
    return model, config
