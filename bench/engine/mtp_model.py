"""MTP modules of random weights, built so that the target accepts a chosen number of their drafts.

The target is that of `model`, whose column LEVEL makes TOKEN the likeliest. Each module copies LEVEL from its
hidden input. Of several modules, those from the accept length on negate LEVEL in their final norm, so TOKEN
is their least likely token. A single module counts its passes: its MLP adds a fixed share of LEVEL to column
COUNT in every pass, and its output projection makes the draft WRONG from the accept length on.
"""

from pathlib import Path

import torch

from ...engine.models.config import ModelConfig
from ...engine.models.layers import GatedMLP
from ...engine.speculative.drafters.mtp_config import DIALECTS, MtpConfig
from ...engine.speculative.drafters.mtp_head import MtpHead, MtpModule
from ...engine.speculative.drafters.spec_config import AuxSpec, DraftDims
from .model import COUNT, GAIN, LEVEL, TOKEN, WRONG, fill_random

SHARE = 1 / 8  # of LEVEL, added to COUNT in each pass


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
    """Modules of `config`. A target of `random_target` accepts `accept_length` - 1 of their drafts per
    step.
    """
    is_shared = config.num_modules == 1
    dialect = next(each for each in DIALECTS if each.name == ("qwen" if is_shared else "deepseek"))
    head = MtpHead(config, dialect, config.num_modules, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    width = config.layer.hidden_size
    for k, module in enumerate(head.modules):
        for name, weight in module.tensors():
            fill_random(name, weight, generator)
        columns = [LEVEL, COUNT]
        module.fc.weight[columns] = 0
        module.fc.weight[LEVEL, width + LEVEL] = GAIN
        module.layer.attention.output.weight[columns] = 0
        _mlp_of(module).down.weight[columns] = 0
        if is_shared:
            _count_passes(module, width)
            module.lm_head = torch.empty(config.layer.vocab_size, width, dtype=dtype, device=device)
            fill_random("lm_head", module.lm_head, generator)
            module.lm_head[:, columns] = 0
            module.lm_head[TOKEN, LEVEL] = 1.0
            module.lm_head[WRONG, COUNT] = 1.0 / (SHARE * (accept_length - 0.5))
        elif k >= accept_length - 1:
            module.norm.weight[LEVEL] = -1.0
    return head


def _mlp_of(module: MtpModule) -> GatedMLP:
    mlp = module.layer.mlp
    assert isinstance(mlp, GatedMLP), mlp
    return mlp


def _count_passes(module: MtpModule, width: int) -> None:
    """One neuron of the MLP reads LEVEL, about the root of the width behind a norm, and adds to COUNT."""
    normed = width**0.5
    gate, up = _mlp_of(module).gate_up.weight.chunk(2)
    gate[0], up[0] = 0, 0
    gate[0, LEVEL], up[0, LEVEL] = 4.0 / normed, 1.0 / normed
    fired = float(torch.nn.functional.silu(torch.tensor(4.0)))
    _mlp_of(module).down.weight[COUNT, 0] = SHARE * GAIN * normed / fired
    module.fc.weight[COUNT, width + COUNT] = GAIN
