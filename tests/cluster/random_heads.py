"""EAGLE3 heads of random weights in the form in which `baton draft train` begins and writes them."""

from pathlib import Path

import torch
from baton.engine.models.registry import load_model_config
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.training.eagle3 import Eagle3Trainee
from baton.training.frozen_target import FrozenTarget
from baton.training.head_files import write_eagle3_config, write_weights


def random_head(model: Path, path: Path, seed: int, layers: tuple[int, ...]) -> Path:
    """Writes a head of `model` that reads the outputs of `layers`; equal seeds give equal heads."""
    config = load_model_config(model)
    write_eagle3_config(path, model, config, layers, config.vocab_size)
    draft = load_draft_config(path, config, dtype="float32")
    target = FrozenTarget.load(model, layers, dtype=torch.float32, device=torch.device("cpu"))
    trainee = Eagle3Trainee(draft, target, torch.arange(config.vocab_size), steps=3, seed=seed)
    write_weights(path, trainee.checkpoint_tensors(), torch.bfloat16)
    return path
