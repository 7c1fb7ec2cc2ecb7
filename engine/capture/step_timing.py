"""Measures how long captured decode steps take, for the policy that chooses the number of drafts.

The measured steps are of requests with made-up tokens and short contexts. Equal rows would choose equal
experts, so that many rows would seem to cost hardly more than one.
"""

import logging
import time

import torch

from ..graphs.votes import Vote, alone
from ..models.interface import CausalLM
from ..speculative.adaptive import MeasuredCosts
from ..speculative.drafting.shape import PLAIN, DraftShape
from ..speculative.step.device_state import PAD_SLOT
from ..speculative.step.step_graphs import StepGraphs
from .trial_requests import TrialRequests

logger = logging.getLogger(__name__)

REPEATS = 3  # measured steps of each shape and batch size, behind one that is not measured


def measure_steps(steps: StepGraphs, vote: Vote = alone) -> MeasuredCosts | None:
    """Measures greedy steps of every captured shape at some batch sizes, on all ranks that `vote` together.

    Returns None if a shape has no graph at one of these sizes, since eager steps would make a poor
    comparison.
    """
    kinds = {kind.shape: kind for kind in steps.families if not kind.is_ranked and not kind.is_edited}
    wanted = _sizes(steps.max_requests)
    sizes = [size for size in wanted if vote(all(steps.takes(k, size) for k in kinds.values()))]
    if PLAIN not in kinds or not sizes or sizes[-1] < steps.max_requests:
        return None
    seconds: dict[DraftShape, dict[int, float]] = {shape: {} for shape in kinds}
    for shape, kind in kinds.items():
        trial = TrialRequests(steps.step, kind, steps.max_requests, num_steps=1 + REPEATS)
        for size in sizes:
            seconds[shape][size] = _step_seconds(steps, trial, size)
            if steps.step.is_late(kind):
                seconds[shape][size] += _catch_up_seconds(steps, trial, size) / steps.late_rows
        trial.close()
        del trial  # its copy of the state, before the next one makes its own
    costs = MeasuredCosts(seconds=seconds, kv_seconds=_kv_seconds(steps, seconds[PLAIN][sizes[0]]))
    logger.info("measured steps, ms by batch size: %s", _table(costs))
    return costs


def _step_seconds(steps: StepGraphs, trial: TrialRequests, size: int) -> float:
    """The mean time of the steps that `size` requests of `trial` take; padding requests stand for those that
    the KV pool cannot hold.
    """
    slots = _slots(trial, size)
    trial.rewind()
    steps.launch(slots, trial.kind)
    _wait(steps.device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        steps.launch(slots, trial.kind)
    _wait(steps.device)
    return (time.perf_counter() - began) / REPEATS


def _catch_up_seconds(steps: StepGraphs, trial: TrialRequests, size: int) -> float:
    """The mean time in which the drafter catches up with `size` requests of `trial`, behind a step of theirs.

    Their states stay behind the first catch-up; the rows of those that follow are as many and as different.
    """
    slots = _slots(trial, size)
    steps.catch_up(slots)
    _wait(steps.device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        steps.catch_up(slots)
    _wait(steps.device)
    return (time.perf_counter() - began) / REPEATS


def _slots(trial: TrialRequests, size: int) -> tuple[int, ...]:
    """Of the first `size` requests of `trial`, and of padding where it has fewer."""
    own = trial.slots[:size]
    return (*own, *[PAD_SLOT] * (size - len(own)))


def _kv_seconds(steps: StepGraphs, plain_seconds: float) -> float:
    """The time to read the KV of one token, at the rate at which the step of one request reads weights."""
    pool, model = steps.step.runner.pool, steps.step.runner.model
    token_bytes = pool.layout.page_bytes / pool.page_size
    return plain_seconds * token_bytes / _read_bytes(model)


def _read_bytes(model: CausalLM) -> float:
    """The bytes of weights that a step of one request reads: of the experts those of one row."""
    moe = model.config.moe
    share = 1.0 if moe is None else moe.used_share
    return sum(weight.nbytes * (share if ".experts." in name else 1.0) for name, weight in model.parameters())


def _sizes(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table(costs: MeasuredCosts) -> str:
    return "; ".join(
        f"{shape.steps} drafts "
        + " ".join(f"{size}: {seconds * 1e3:.2f}" for size, seconds in measured.items())
        for shape, measured in sorted(costs.seconds.items(), key=lambda item: item[0].steps)
    )
