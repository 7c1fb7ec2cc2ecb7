"""Weights of the target's layers, as first weights of a drafter's layers."""

import torch

from ..engine.models.interface import CausalLM


def layer_tensors(model: CausalLM, layer: int) -> dict[str, torch.Tensor]:
    """Copies of the tensors of decoder layer number `layer`, float32, by their names within the layer."""
    prefix = f"model.layers.{layer}."
    return {
        name.removeprefix(prefix): tensor.detach().float().clone()
        for name, tensor in model.tensors()
        if name.startswith(prefix)
    }
