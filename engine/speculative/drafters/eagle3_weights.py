"""Loads an EAGLE3 head strictly: the tensors of the checkpoint and those of the head must match one to
one.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...models.weights import LOADABLE, iter_safetensors
from .eagle3_head import Eagle3Head, FeatureHead
from .spec_config import Eagle3Config, HeadConfig

_LAYER_PREFIXES = ("model.layers.0.", "layers.0.", "midlayer.")
_FURTHER_LAYER = re.compile(r"layers\.(\d+)\.")
_LEGACY_FC_NORMS = {"aux_norm_low.weight": 0, "aux_norm_mid.weight": 1, "aux_norm_high.weight": 2}


@torch.no_grad()
def load_eagle3(
    config: Eagle3Config, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Eagle3Head:
    """Returns the head of `config` with its own weights in `dtype` on `device`, before `Eagle3Head.share`.

    Raises CheckpointError naming file, tensor and both shapes when the checkpoint does not match the config.
    """
    refuse_pickle(config.path)
    tensors = read_tensors(config.path, canonical)
    config = replace(config, num_layers=num_layers_in(config, tensors))
    head = Eagle3Head(config, dtype=dtype, device=device)
    head.target_ids = _target_ids(config, tensors).to(device)
    head.embed_tokens = optional_tensor(
        config, tensors, "embed_tokens.weight", config.vocab_size, dtype, device
    )
    head.lm_head = optional_tensor(config, tensors, "lm_head.weight", config.draft_vocab_size, dtype, device)
    _take_mask_shape(head, tensors)
    fill(head, tensors)
    return head


def _take_mask_shape(head: Eagle3Head, tensors: dict[str, torch.Tensor]) -> None:
    """Makes room for the mask of a parallel head, which is a feature or a hidden of the head, by its size."""
    mask, config = tensors.get("mask_hidden"), head.config
    if mask is None or head.mask_hidden is None:
        return
    tensors["mask_hidden"] = mask = mask.reshape(-1)
    if len(mask) == config.hidden_size:
        head.mask_hidden = torch.empty(config.hidden_size, dtype=head.dtype, device=head.device)


def fill(head: FeatureHead, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies `tensors` to the memory of `head`. Raises CheckpointError unless they match one to one."""
    wanted, config = dict(head.tensors()), head.config
    _check_names(config, set(wanted), set(tensors))
    for name, memory in wanted.items():
        _check_tensor(config, name, tensors[name], tuple(memory.shape))
        memory.copy_(tensors[name])


def num_layers_in(config: HeadConfig, tensors: Iterable[str]) -> int:
    """The number of layers that `tensors` name; one if they name none.

    Raises CheckpointError if some are missing in between.
    """
    numbers = {int(found[1]) for name in tensors if (found := _FURTHER_LAYER.match(name))}
    if numbers - set(range(len(numbers) + 1)):
        raise CheckpointError(
            f"{config.path}: has tensors of layers {sorted(numbers)}, but not of all layers before; fetch "
            "the checkpoint again"
        )
    return max(numbers, default=0) + 1


def refuse_pickle(path: Path) -> None:
    """Raises CheckpointError if the only weights in `path` are pickled."""
    pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if pickled and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{pickled[0]}: pickled weights can run code and are not read; convert them to "
            f"{path}/model.safetensors "
            "with safetensors.torch.save_file where you trust the file"
        )


def read_tensors(path: Path, canonical: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """All tensors by their `canonical` names, without the trainers' prefixes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in iter_safetensors(path):
        ours = canonical(name)
        if ours in tensors:
            raise CheckpointError(
                f"{path}: tensor {name} and another one are both {ours}; fetch the checkpoint again"
            )
        tensors[ours] = tensor
    return tensors


def canonical(name: str) -> str:
    """Our name of a tensor of an EAGLE3 checkpoint."""
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


def optional_tensor(
    config: HeadConfig,
    tensors: dict[str, torch.Tensor],
    name: str,
    rows: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor | None:
    """Takes tensor `name` `[rows, H]` out of `tensors`, in `dtype` on `device`; None if it is absent."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        return None
    _check_tensor(config, name, tensor, (rows, config.hidden_size))
    return tensor.to(device, dtype)


def _check_names(config: HeadConfig, needed: set[str], found: set[str]) -> None:
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


def _check_tensor(config: HeadConfig, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    _check_shape(config, name, tensor, shape)
    if tensor.dtype not in LOADABLE:
        raise CheckpointError(
            f"{config.path}: tensor {name} is {tensor.dtype}; use float32, float16 or bfloat16"
        )


def _check_shape(config: HeadConfig, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
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
