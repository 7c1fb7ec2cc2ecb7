"""The training loop of a drafter: batches, learning rate, progress, states, and several GPUs by torchrun."""

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import run_state
from .frozen_target import FrozenTarget
from .learning_rate import learning_rate, timed_rate
from .optimizers import ADAMW, Optimizers
from .progress import progress_bar
from .samples import Batch, BatchPlan, SampleSet
from .trainee import StepLosses, Trainee, accept_length

SMOOTHING = 0.98  # of the averages that the progress bar shows
SHOWN_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """`max_tokens` and `max_length` bound a batch of one rank and a sample. `final_rate` is the share of `lr`
    that is left at the end. A state is saved every `save_every` steps.

    `minutes` above 0 end the run by time and set the rate by it; `epochs` then is the most that are taken.
    """

    epochs: int
    minutes: float = 0.0
    max_tokens: int
    max_length: int
    lr: float
    optimizer: str = ADAMW
    warmup: float = 0.04
    final_rate: float = 0.05
    clip: float = 0.5
    seed: int = 0
    save_every: int = 200


@dataclass(frozen=True)
class Ranks:
    """This process among those of torchrun; one alone without it."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Returns when all ranks have called it."""
        if self.count > 1:
            dist.barrier()


def num_ranks() -> int:
    """The processes of torchrun; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks of torchrun, joined until the block ends; without torchrun, this process alone."""
    count = num_ranks()
    if count == 1:
        yield Ranks()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()


class Trainer:
    """Trains `trainee` on `samples`; `run` returns when all epochs are done.

    A run of the same settings in the same `directory` continues from its newest state. `about`: what else
    must be the same, as JSON values.
    """

    def __init__(
        self,
        trainee: Trainee,
        target: FrozenTarget,
        samples: SampleSet,
        settings: TrainSettings,
        directory: Path,
        *,
        ranks: Ranks,
        about: Mapping[str, object] | None = None,
    ) -> None:
        self._module = cast(torch.nn.Module, trainee)
        self._target, self._settings, self._directory, self._ranks = target, settings, directory, ranks
        self._plan = BatchPlan(
            samples=samples,
            max_tokens=settings.max_tokens,
            max_length=settings.max_length,
            seed=settings.seed,
            rank=ranks.rank,
            num_ranks=ranks.count,
        )
        parameters = list(self._module.parameters())
        self._device = parameters[0].device
        self._optimizers = Optimizers(self._module, settings.optimizer, settings.lr)
        content = zlib.crc32(samples.tokens.numpy().tobytes())
        self._saved = {
            **asdict(settings), "samples": len(samples), "sample_crc": content, "ranks": ranks.count,
            **(about or {}),
        }  # fmt: skip
        self._saved.pop("save_every")
        self._model: Any = self._module
        if ranks.count > 1:
            self._model = DistributedDataParallel(self._module)

    @property
    def epoch_steps(self) -> int:
        """Steps of the first epoch."""
        return self._plan.steps(0)

    @property
    def total_steps(self) -> int:
        """Steps of all epochs, which a run by time may not reach."""
        epochs = self._settings.epochs
        if self._settings.minutes:
            return epochs * self.epoch_steps
        return sum(self._plan.steps(epoch) for epoch in range(epochs))

    def run(self) -> run_state.Progress:
        """Trains to the end and returns the final progress; the last state is saved.

        Raises CheckpointError for a state of other settings, or a disk that takes no state.
        """
        settings = self._settings
        found_state = run_state.load_state(self._directory, self._saved, self._module, self._optimizers)
        now = found_state or run_state.Progress(
            step=0, epoch=0, epoch_step=0, num_samples=0, seconds=0.0, settings=self._saved
        )
        if self._ranks.is_first:
            self._directory.mkdir(parents=True, exist_ok=True)
            run_state.cut_curve(self._directory, now.step)
        started = time.monotonic() - now.seconds
        total, step, num_samples = self.total_steps, now.step, now.num_samples
        limit = 60 * settings.minutes
        with self._progress_bar(total, step) as show:
            for epoch in range(now.epoch, settings.epochs):
                first = now.epoch_step if epoch == now.epoch else 0
                for offset, batch in enumerate(self._plan.batches(epoch, first), first + 1):
                    seconds = self._agreed(time.monotonic() - started)
                    if limit and seconds >= limit:
                        break
                    rate = timed_rate(seconds, settings) if limit else learning_rate(step, total, settings)
                    found = self._step(batch, rate)
                    step, num_samples = step + 1, num_samples + batch.num_samples
                    show.add(step, rate, seconds, found)
                    if step % settings.save_every == 0 and step < total:
                        show.flush()
                        self._save(step, epoch, offset, num_samples, started)
                else:
                    continue
                break
        if found_state is not None and found_state.step == step:
            return found_state  # it had ended; another rank may be reading its state
        return self._save(step, settings.epochs, 0, num_samples, started)

    def _agreed(self, seconds: float) -> float:
        """The first rank's `seconds` of a run by time: all ranks must end with the same step."""
        if self._ranks.count == 1 or not self._settings.minutes:
            return seconds
        value = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.broadcast(value, 0)
        return float(value)

    def _step(self, batch: Batch, rate: float) -> torch.Tensor:
        """Takes one step. Returns the objective, the gradient's norm, and by position the correct drafts and
        their number, in one tensor on the device, which the host does not wait for.
        """
        batch = batch.to(self._device)
        losses: StepLosses = self._model(batch, self._target.rows(batch.tokens))
        self._optimizers.zero_grad()
        losses.objective.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._settings.clip)
        self._optimizers.step(rate)
        parts = (losses.objective.detach(), norm.detach(), losses.correct, losses.count)
        return torch.cat([part.float().reshape(-1) for part in parts])

    def _save(
        self, step: int, epoch: int, epoch_step: int, num_samples: int, started: float
    ) -> run_state.Progress:
        progress = run_state.Progress(
            step=step,
            epoch=epoch,
            epoch_step=epoch_step,
            num_samples=num_samples,
            seconds=time.monotonic() - started,
            settings=self._saved,
        )
        if self._ranks.is_first:
            run_state.save_state(self._directory, progress, self._module, self._optimizers)
        return progress

    @contextlib.contextmanager
    def _progress_bar(self, total: int, step: int) -> Iterator["_Curve"]:
        """Yields what records steps in the curve and on the bar; other ranks record nothing."""
        if not self._ranks.is_first:
            yield _Curve(None, lambda *_: None)
            return
        limit = 60 * self._settings.minutes
        with progress_bar() as bar, (self._directory / run_state.CURVE).open("a") as file:
            task = bar.add_task("training", total=limit or total, completed=0 if limit else step)

            def show(step: int, seconds: float, text: str) -> None:
                bar.update(task, completed=min(limit, round(seconds)) if limit else step, description=text)

            curve = _Curve(file, show)
            yield curve
            curve.flush()


class _Curve:
    """Writes a line per step to `file` and shows averages, SHOWN_EVERY steps at a time: to read a step's
    values, the host waits for the device.
    """

    def __init__(self, file: TextIO | None, show: Callable[[int, float, str], None]) -> None:
        self._file, self._show = file, show
        self._waiting: list[tuple[int, float, float, torch.Tensor]] = []
        self._sums: torch.Tensor | None = None

    def add(self, step: int, rate: float, seconds: float, found: torch.Tensor) -> None:
        """Records a step; `found` is that of `Trainer._step`."""
        if self._file is None:
            return
        self._waiting.append((step, rate, seconds, found))
        if len(self._waiting) >= SHOWN_EVERY:
            self.flush()

    def flush(self) -> None:
        """Writes the steps that wait."""
        if self._file is None or not self._waiting:
            return
        text = ""
        rows = torch.stack([found for *_, found in self._waiting]).cpu()
        for (step, rate, seconds, _), row in zip(self._waiting, rows, strict=True):
            (loss, norm), sums = row[:2].tolist(), row[2:].view(2, -1)
            shares = (sums[0] / sums[1].clamp(min=1)).tolist()
            line = {
                "step": step, "loss": loss, "lr": rate, "grad_norm": norm, "seconds": round(seconds, 3),
                "accuracy": [round(share, 4) for share in shares],
            }  # fmt: skip
            self._file.write(json.dumps(line) + "\n")
            self._sums = sums if self._sums is None else SMOOTHING * self._sums + sums
            correct, count = self._sums
            by_position = " ".join(f"{share:.2f}" for share in (correct / count.clamp(min=1)).tolist())
            text = f"loss {loss:.3f}  accept length {accept_length(correct, count):.2f} ({by_position})"
        self._file.flush()
        self._show(self._waiting[-1][0], self._waiting[-1][2], text)
        self._waiting = []
