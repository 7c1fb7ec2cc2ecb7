"""The state of a training run on disk, whole or absent: a run that was killed continues from the last one.

`DIR/step-NNNNNN/` holds `state.safetensors` (weights, and what the optimizers keep for each) and
`progress.json`. It is written under another name and renamed, and the oldest states are deleted.
`DIR/curve.jsonl` has a line per step; a resumed run cuts off the lines behind its state.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..engine.errors import CheckpointError
from .optimizers import Optimizers
from .tensor_files import write_tensors

KEPT = 2
CURVE = "curve.jsonl"
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# what runs did before they had these settings
OLD_SETTINGS: Mapping[str, object] = {"optimizer": "adamw", "missed": 1.0, "loss_vocab": 0}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is. `settings` are those that its batches, its head and its loss depend on."""

    step: int
    epoch: int
    epoch_step: int
    num_samples: int
    seconds: float
    settings: dict[str, object]


def save_state(directory: Path, progress: Progress, module: torch.nn.Module, optimizers: Optimizers) -> None:
    """Writes the state and deletes all but the newest `KEPT`."""
    partial = directory / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {f"weight.{name}": p.detach().contiguous() for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        state = optimizers.state(parameter)
        tensors |= {f"{moment}.{name}": state[moment].contiguous() for moment in MOMENTS if moment in state}
    write_tensors(partial / "state.safetensors", tensors)
    (partial / "progress.json").write_text(json.dumps(asdict(progress)))
    final = directory / f"step-{progress.step:06d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in _states(directory)[:-KEPT]:
        shutil.rmtree(old)


def load_state(
    directory: Path,
    settings: Mapping[str, object],
    module: torch.nn.Module,
    optimizers: Optimizers,
) -> Progress | None:
    """Fills `module` and `optimizers` from the newest state; None if there is none.

    Raises CheckpointError if that run had other settings.
    """
    states = _states(directory)
    if not states:
        return None
    newest = states[-1]
    try:
        progress = Progress(**json.loads((newest / "progress.json").read_text()))
        tensors = load_file(newest / "state.safetensors")
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{newest}: not a readable state ({error}); delete this folder to continue from the state before"
        ) from None
    for name, value in settings.items():
        begun = progress.settings.get(name, OLD_SETTINGS.get(name))
        if begun != value:
            raise CheckpointError(
                f"{newest}: this run was begun with {name} {begun!r}, now it is {value!r}; use the same "
                "settings or another --out"
            )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            kept = {
                moment: tensors[key].to(parameter.device)
                for moment in MOMENTS
                if (key := f"{moment}.{name}") in tensors
            }
            if kept:
                # fused kernels read it on the device
                step = torch.tensor(float(progress.step), device=parameter.device)
                optimizers.restore(parameter, {"step": step, **kept})
    return progress


def cut_curve(directory: Path, step: int) -> None:
    """Keeps the lines of the curve up to `step`."""
    path = directory / CURVE
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            break  # torn by the kill
    path.write_text("".join(line + "\n" for line in kept))


def _states(directory: Path) -> list[Path]:
    # by number: a name may have more than six digits
    return sorted(directory.glob("step-[0-9]*"), key=lambda path: int(path.name.removeprefix("step-")))
