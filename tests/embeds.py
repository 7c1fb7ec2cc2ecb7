"""Prompt embeddings for tests: as safetensors in base64, and as the router keeps them."""

import base64

import torch
from baton.router.api.prompt_embeds import read_embeds
from safetensors.torch import save


def embeds_text(rows, dtype=torch.float32, name="embeds"):
    """The value of `prompt_embeds` for `rows` `[n, H]`, a tensor or lists."""
    tensor = torch.as_tensor(rows, dtype=dtype).contiguous()
    return base64.b64encode(save({name: tensor})).decode()


def embeddings_of(rows, dtype=torch.float32):
    """What the router makes of them."""
    return read_embeds(embeds_text(rows, dtype), torch.as_tensor(rows).shape[1])
