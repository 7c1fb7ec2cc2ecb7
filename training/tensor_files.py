"""Tensors of a training run on disk, each file whole or absent."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..engine.errors import CheckpointError


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes safetensors under another name and renames them to `path`.

    Raises CheckpointError if that fails, as on a full disk; what was written is deleted then.
    """
    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), partial, metadata={"format": "pt"})
        os.replace(partial, path)
    except (SafetensorError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written ({error}); is the disk full?") from None
