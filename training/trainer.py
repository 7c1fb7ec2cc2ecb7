"""The training loop of a drafter: batches, learning rate, progress, states, and several GPUs by torchrun."""

import contextlib
import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import run_state
from .frozen_target import FrozenTarget
from .progress import progress_bar
from .samples import Batch, BatchPlan, SampleSet
from .trainee import StepLosses, Trainee, accept_length

BETAS = (0.9, 0.95)
SMOOTHING = 0.98  # of the averages that the progress bar shows


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """`max_tokens` and `max_length` bound a batch of one rank and a sample. `final_rate` is the share of `lr`
    that is left at the end. A state is saved every `save_every` steps.
    """

    epochs: int
    max_tokens: int
    max_length: int
    lr: float
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


@contextlib.contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks of torchrun, joined until the block ends; without torchrun, this process alone."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Ranks()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()


def learning_rate(step: int, total: int, settings: TrainSettings) -> float:
    """The rate of `step` (from 0): linear warm-up, then a cosine down to `final_rate`."""
    warmup = max(1, int(settings.warmup * total))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    low = settings.final_rate
    return settings.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


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
        self._weights = trainee.position_weights
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
        self._optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=BETAS, weight_decay=0.0)
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
    def total_steps(self) -> int:
        return sum(self._plan.steps(epoch) for epoch in range(self._settings.epochs))

    def run(self) -> run_state.Progress:
        """Trains to the end and returns the final progress; the last state is saved.

        Raises CheckpointError for a state of other settings, or a disk that takes no state.
        """
        settings = self._settings
        found = run_state.load_state(self._directory, self._saved, self._module, self._optimizer)
        now = found or run_state.Progress(
            step=0, epoch=0, epoch_step=0, num_samples=0, seconds=0.0, settings=self._saved
        )
        if self._ranks.is_first:
            self._directory.mkdir(parents=True, exist_ok=True)
            run_state.cut_curve(self._directory, now.step)
        started = time.monotonic() - now.seconds
        total, step, num_samples = self.total_steps, now.step, now.num_samples
        with self._progress_bar(total, step) as show:
            for epoch in range(now.epoch, settings.epochs):
                first = now.epoch_step if epoch == now.epoch else 0
                for offset, batch in enumerate(self._plan.batches(epoch, first), first + 1):
                    rate = learning_rate(step, total, settings)
                    losses, loss, norm = self._step(batch.to(self._device), rate)
                    step, num_samples = step + 1, num_samples + batch.num_samples
                    show(step, rate, loss, norm, losses, time.monotonic() - started)
                    if step % settings.save_every == 0 and step < total:
                        self._save(step, epoch, offset, num_samples, started)
        if found is not None and found.step == step:
            return found  # it had ended; another rank may be reading its state
        return self._save(step, settings.epochs, 0, num_samples, started)

    def _step(self, batch: Batch, rate: float) -> tuple[StepLosses, float, float]:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        losses = self._model(batch, self._target.rows(batch.tokens))
        loss = losses.mean(self._weights)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._settings.clip)
        self._optimizer.step()
        return losses, float(loss.detach()), float(norm)

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
            run_state.save_state(self._directory, progress, self._module, self._optimizer)
        return progress

    @contextlib.contextmanager
    def _progress_bar(self, total: int, step: int) -> Iterator[Any]:
        """Yields the call that records a step in the curve and on the bar; other ranks record nothing."""
        if not self._ranks.is_first:
            yield lambda *_: None
            return
        averages: dict[str, torch.Tensor] = {}
        with progress_bar() as bar, (self._directory / run_state.CURVE).open("a") as curve:
            task = bar.add_task("training", total=total, completed=step)

            def show(
                step: int, rate: float, loss: float, norm: float, losses: StepLosses, seconds: float
            ) -> None:
                shares = (losses.correct / losses.count.clamp(min=1)).tolist()
                line = {
                    "step": step, "loss": loss, "lr": rate, "grad_norm": norm, "seconds": round(seconds, 3),
                    "accuracy": [round(share, 4) for share in shares],
                }  # fmt: skip
                curve.write(json.dumps(line) + "\n")
                curve.flush()
                for name, value in (("correct", losses.correct), ("count", losses.count)):
                    old = averages.get(name)
                    averages[name] = value if old is None else SMOOTHING * old + value
                estimate = accept_length(averages["correct"], averages["count"], len(shares))
                first, last = shares[0], shares[-1]
                bar.update(
                    task,
                    completed=step,
                    description=f"loss {loss:.3f}  accept length {estimate:.2f}  "
                    f"accuracy {first:.2f} .. {last:.2f}",
                )

            yield show
