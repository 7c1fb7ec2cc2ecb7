"""Loads MTP modules from a checkpoint of their own, or from the target's.

Every tensor must belong to a module or to the target that the config describes.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...models.safetensors_file import SafetensorsFile
from ...models.weights import fill_tensors, find_shards
from .mtp_config import MtpConfig, MtpDialect, dialect_of
from .mtp_head import MtpHead

# Both streams of a module may have weights of their own, mostly copies of the target's.
_OWN = ("embed_tokens", "lm_head")
_TARGET = re.compile(r"model\.(embed_tokens|norm)\.|lm_head\.|model\.layers\.(\d+)\.")


@torch.no_grad()
def load_mtp(
    config: MtpConfig, num_modules: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> MtpHead:
    """Returns the first `num_modules` modules of `config`, in `dtype` on `device`, before `MtpHead.share`.

    Raises CheckpointError naming file, tensor and both shapes when the checkpoint does not match the config.
    """
    names = list(_names(config.path))
    dialect = dialect_of(config, names)
    head = MtpHead(config, dialect, num_modules, dtype=dtype, device=device)
    size = (config.layer.vocab_size, config.layer.hidden_size)
    wanted: dict[str, torch.Tensor] = {}
    for k, module in enumerate(head.modules):
        for part in _OWN:
            own = _own_name(config, dialect, part, k)
            if own in names:
                setattr(module, part, torch.empty(size, dtype=dtype, device=device))
                wanted[own] = getattr(module, part)
        for name, memory in module.tensors():
            wanted[dialect.checkpoint_name(name, k, config.target_layers)] = memory
    fill_tensors(wanted, config.path, tuple(_others(config, dialect, names, len(head.modules))))
    head.projections.finish()
    return head


def _names(path: Path) -> Iterator[str]:
    for shard in find_shards(path):
        yield from (stored.name for stored in SafetensorsFile.read(shard).tensors)


def _own_name(config: MtpConfig, dialect: MtpDialect, part: str, module: int) -> str:
    """The name of a module's own `part`; "" where the dialect has none."""
    if part not in dialect.parts:
        return ""
    return dialect.checkpoint_name(f"{part}.weight", module, config.target_layers)


def _others(config: MtpConfig, dialect: MtpDialect, names: Sequence[str], num_modules: int) -> Iterator[str]:
    """The names among `names` that belong to the target, or to a module beyond `num_modules`.

    Raises CheckpointError for modules that the config does not count.
    """
    first = config.target_layers if "{layer}" in dialect.layer else 0
    stem = dialect.layer.split("{")[0]
    modules = re.compile(re.escape(stem) + r"(\d+)\.")
    for name in names:
        found = modules.match(name)
        number = int(found[1]) - first if found else -1
        if number >= config.num_modules:
            raise CheckpointError(
                f"{config.path}: tensor {name} belongs to module {number + 1}, but config.json counts "
                f"{config.num_modules}; the weights belong to another config"
            )
        if number >= num_modules:
            yield name
            continue
        own = _TARGET.match(name)
        if own is not None and (own[2] is None or int(own[2]) < config.target_layers):
            yield name
