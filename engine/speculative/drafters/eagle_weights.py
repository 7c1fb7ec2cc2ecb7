"""Loads an EAGLE head strictly: the tensors of the checkpoint and those of the head must match one to one."""

from dataclasses import replace

import torch

from .eagle3_weights import fill, num_layers_in, optional_tensor, read_tensors, refuse_pickle
from .eagle_config import EagleConfig
from .eagle_head import EagleHead


@torch.no_grad()
def load_eagle(config: EagleConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> EagleHead:
    """Returns the head of `config` with its own weights in `dtype` on `device`, before `share`.

    The depth is that of the tensors, and so is the bias of `fc` where the config does not tell it. Raises
    CheckpointError naming file, tensor and both shapes when the checkpoint does not match the config.
    """
    refuse_pickle(config.path)
    tensors = read_tensors(config.path, lambda name: name.removeprefix("model."))
    config = replace(config, num_layers=num_layers_in(config, tensors))
    if not config.is_bias_stated:
        config = replace(config, fc_bias="fc.bias" in tensors)
    head = EagleHead(config, dtype=dtype, device=device)
    head.embed_tokens = optional_tensor(
        config, tensors, "embed_tokens.weight", config.vocab_size, dtype, device
    )
    head.lm_head = optional_tensor(config, tensors, "lm_head.weight", config.vocab_size, dtype, device)
    fill(head, tensors)
    return head
