"""MTP modules of random weights, several of which draft as many right tokens as the target shall accept.

The target is that of `model`, whose column LEVEL makes TOKEN the likeliest. Each module copies LEVEL from its
hidden input. Of several modules, those from the accept length on negate LEVEL in their final norm, so TOKEN
is their least likely token. A single module drafts TOKEN in every pass: it cannot count passes, because the
norm of a deep target's hidden leaves an unknown part of LEVEL.
"""

from pathlib import Path

import torch

from ...engine.models.config import ModelConfig
from ...engine.models.layers import GatedMLP
from ...engine.speculative.drafters.mtp_config import DIALECTS, MtpConfig
from ...engine.speculative.drafters.mtp_head import MtpHead, MtpModule
from ...engine.speculative.drafters.spec_config import AuxSpec, DraftDims
from .model import GAIN, LEVEL, fill_random


def modules_config(target: ModelConfig, dtype: str, num_modules: int) -> MtpConfig:
    """The config of `num_modules` modules of `target`, which runs in `dtype`."""
    width = target.hidden_size
    return MtpConfig(
        path=Path("random modules"),
        layer=target,
        num_modules=num_modules,
        is_chained=None,
        target_layers=target.num_layers,
        aux=AuxSpec(ids=(target.num_layers - 1,), convention="default", dtype=dtype),
        dims=DraftDims(
            target_feature_width=width,
            target_feature_dtype=dtype,
            self_width=width,
            self_dtype=dtype,
            num_features=1,
        ),
    )


@torch.no_grad()
def random_modules(
    config: MtpConfig, accept_length: int, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> MtpHead:
    """Modules of `config`. A target of `random_target` accepts `accept_length` - 1 drafts of several modules
    per step, and all drafts of a single one.
    """
    is_shared = config.num_modules == 1
    dialect = next(each for each in DIALECTS if each.name == ("qwen" if is_shared else "deepseek"))
    head = MtpHead(config, dialect, config.num_modules, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    width = config.layer.hidden_size
    for k, module in enumerate(head.modules):
        for name, weight in module.tensors():
            fill_random(name, weight, generator)
        module.fc.weight[LEVEL] = 0
        module.fc.weight[LEVEL, width + LEVEL] = GAIN
        module.layer.attention.output.weight[LEVEL] = 0
        _mlp_of(module).down.weight[LEVEL] = 0
        if not is_shared and k >= accept_length - 1:
            module.norm.weight[LEVEL] = -1.0
    return head


def _mlp_of(module: MtpModule) -> GatedMLP:
    mlp = module.layer.mlp
    assert isinstance(mlp, GatedMLP), mlp
    return mlp
