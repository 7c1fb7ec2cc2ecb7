"""Loads a DFLASH drafter strictly: the tensors of the checkpoint and those of the model must match one to
one.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from ...errors import CheckpointError
from ...models.weights import LOADABLE, iter_safetensors
from .dflash_config import DflashConfig
from .dflash_head import DflashHead
from .eagle3_weights import refuse_pickle

_ALIASES: Mapping[str, str] = MappingProxyType(
    {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
)


@torch.no_grad()
def load_dflash(
    config: DflashConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DflashHead:
    """Returns the draft model of `config` with its weights in `dtype` on `device`, before `DflashHead.share`.

    Raises CheckpointError naming file, tensor and both shapes when the checkpoint does not match the config.
    """
    refuse_pickle(config.path)
    head = DflashHead(config, dtype=dtype, device=device)
    wanted, seen = dict(head.tensors()), set[str]()
    for name, tensor in iter_safetensors(config.path):
        ours = _canonical(name)
        if ours not in wanted:
            raise CheckpointError(
                f"{config.path}: tensor {name} belongs to no part of the DFLASH drafter that config.json "
                "describes; the drafter has an extension that baton does not run, or another number of layers"
            )
        if ours in seen:
            raise CheckpointError(
                f"{config.path}: tensor {name} and another one are both {ours}; fetch the checkpoint again"
            )
        _check(config, ours, tensor, tuple(wanted[ours].shape))
        wanted[ours].copy_(tensor)
        seen.add(ours)
    missing = wanted.keys() - seen
    if missing:
        raise CheckpointError(
            f"{config.path}: tensor {min(missing)} ({len(missing)} such) is missing from the weights; fetch "
            "the checkpoint again"
        )
    return head


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return _ALIASES.get(name, name)


def _check(config: DflashConfig, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in LOADABLE:
        raise CheckpointError(
            f"{config.path}: tensor {name} is {tensor.dtype}; use float32, float16 or bfloat16"
        )
    if tuple(tensor.shape) == shape:
        return
    if name == "fc.weight" and tensor.dim() == 2:
        raise CheckpointError(
            f"{config.path}: fc.weight is {list(tensor.shape)}, but {config.dims.num_features} layers x "
            f"hidden size {config.hidden_size} need {list(shape)}; the drafter was trained for another "
            "layer list"
        )
    raise CheckpointError(
        f"{config.path}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}; "
        "the weights belong to another config"
    )
