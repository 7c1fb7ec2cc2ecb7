"""Loads an EAGLE3 head strictly: the tensors of the checkpoint and those of the head must match one to
one.
"""

from pathlib import Path

import torch

from ...errors import CheckpointError
from ...models.weights import LOADABLE, iter_safetensors
from .eagle3_head import Eagle3Head
from .spec_config import Eagle3Config

_LAYER_PREFIXES = ("model.layers.0.", "layers.0.", "midlayer.")
_LEGACY_FC_NORMS = {"aux_norm_low.weight": 0, "aux_norm_mid.weight": 1, "aux_norm_high.weight": 2}


@torch.no_grad()
def load_eagle3(
    config: Eagle3Config, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Eagle3Head:
    """Returns the head of `config` with its own weights in `dtype` on `device`, before `Eagle3Head.share`.

    Raises CheckpointError naming file, tensor and both shapes when the checkpoint does not match the config.
    """
    refuse_pickle(config.path)
    tensors = _read(config.path)
    head = Eagle3Head(config, dtype=dtype, device=device)
    head.target_ids = _target_ids(config, tensors).to(device)
    head.embed_tokens = _optional(config, tensors, "embed_tokens.weight", config.vocab_size, dtype, device)
    head.lm_head = _optional(config, tensors, "lm_head.weight", config.draft_vocab_size, dtype, device)
    wanted = dict(head.tensors())
    _check_names(config, set(wanted), set(tensors))
    for name, memory in wanted.items():
        _check_tensor(config, name, tensors[name], tuple(memory.shape))
        memory.copy_(tensors[name])
    return head


def refuse_pickle(path: Path) -> None:
    """Raises CheckpointError if the only weights in `path` are pickled."""
    pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if pickled and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{pickled[0]}: pickled weights can run code and are not read; convert them to "
            f"{path}/model.safetensors "
            "with safetensors.torch.save_file where you trust the file"
        )


def _read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors by their canonical names, without the trainers' prefixes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in iter_safetensors(path):
        ours = _canonical(name)
        if ours in tensors:
            raise CheckpointError(
                f"{path}: tensor {name} and another one are both {ours}; fetch the checkpoint again"
            )
        tensors[ours] = tensor
    return tensors


def _canonical(name: str) -> str:
    for prefix in _LAYER_PREFIXES:
        if name.startswith(prefix):
            return "midlayer." + name.removeprefix(prefix)
    name = name.removeprefix("model.")
    return f"fc_norm.{_LEGACY_FC_NORMS[name]}.weight" if name in _LEGACY_FC_NORMS else name


def _target_ids(config: Eagle3Config, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Target id of each draft id, `[Vd]` int64, from the offsets d2t. The mask t2d, if present, must
    agree.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = torch.arange(config.draft_vocab_size)
    if d2t is not None:
        _check_shape(config, "d2t", d2t, (config.draft_vocab_size,))
        ids = ids + d2t.to(torch.int64)
    elif config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{config.path}: tensor d2t is missing, though draft_vocab_size {config.draft_vocab_size} is "
            f"smaller than the vocabulary of {config.vocab_size}; fetch the checkpoint again"
        )
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise CheckpointError(
            f"{config.path}: d2t does not give increasing token ids in [0, {config.vocab_size}); it must "
            "hold offsets (target id = draft id + d2t[draft id])"
        )
    if t2d is not None:
        _check_shape(config, "t2d", t2d, (config.vocab_size,))
        if not torch.equal(t2d.bool().nonzero().flatten(), ids):
            raise CheckpointError(
                f"{config.path}: d2t and t2d name different tokens; fetch the checkpoint again"
            )
    return ids


def _optional(
    config: Eagle3Config,
    tensors: dict[str, torch.Tensor],
    name: str,
    rows: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor | None:
    tensor = tensors.pop(name, None)
    if tensor is None:
        return None
    _check_tensor(config, name, tensor, (rows, config.hidden_size))
    return tensor.to(device, dtype)


def _check_names(config: Eagle3Config, needed: set[str], found: set[str]) -> None:
    if found - needed:
        raise CheckpointError(
            f"{config.path}: tensor {min(found - needed)} ({len(found - needed)} such) belongs to no part of "
            "the head that config.json describes; the config lacks a switch, or this is another kind of head"
        )
    if needed - found:
        raise CheckpointError(
            f"{config.path}: tensor {min(needed - found)} ({len(needed - found)} such) is missing from the "
            "weights; fetch the checkpoint again"
        )


def _check_tensor(config: Eagle3Config, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    _check_shape(config, name, tensor, shape)
    if tensor.dtype not in LOADABLE:
        raise CheckpointError(
            f"{config.path}: tensor {name} is {tensor.dtype}; use float32, float16 or bfloat16"
        )


def _check_shape(config: Eagle3Config, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) == shape:
        return
    if name == "fc.weight" and tensor.dim() == 2 and tensor.shape[1] != shape[1]:
        raise CheckpointError(
            f"{config.path}: fc.weight takes {tensor.shape[1]} features, but {config.dims.num_features} "
            f"layers x target hidden size {config.target_hidden_size} = {shape[1]}; the head was trained for "
            "another target or layer list"
        )
    raise CheckpointError(
        f"{config.path}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}; "
        "the weights belong to another config"
    )
