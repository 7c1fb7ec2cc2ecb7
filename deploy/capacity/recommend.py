"""Turns the sizes that a load needs into a recommendation: which workers, and why.

Workers are aggregated (decode computes prompts itself) where a hand-off would not pay, else prefill and
decode are separate. An aggregated worker serves 1 / (p / busy + d / full) requests per second: p seconds of
prompt, and d seconds of its place in the batch.
"""

import math
from dataclasses import dataclass

from .checkpoints import KVShape
from .sizing import (
    DECODE_FULL,
    PREFILL_BUSY,
    Measured,
    PlannedLoad,
    SizingPlan,
    decode_capacity,
    prefill_capacity,
    split_of,
)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Numbers of workers and the reasons. `prefill` 0: aggregated workers. `decode` 0: none can serve."""

    prefill: int
    decode: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        because = ", and ".join(self.reasons)
        if not self.decode:
            return f"Recommendation: no such worker, because {because}."
        if not self.prefill:
            workers = "one aggregated worker" if self.decode == 1 else f"{self.decode} aggregated workers"
            return f"Recommendation: {workers} (baton serve --decode {self.decode}), because {because}."
        command = f"baton up --prefill {self.prefill} --decode {self.decode}"
        return f"Recommendation: {self.prefill}P:{self.decode}D ({command}), because {because}."


def recommend(
    shape: KVShape, measured: Measured, load: PlannedLoad, plan: SizingPlan, num_gpus: int = 0
) -> Recommendation:
    """The workers for a load. With `num_gpus` (2 or more) that many workers, whatever the load's rate."""
    if not plan.places:
        needed = plan.request_bytes / 2**30
        has = load.kv_memory / 2**30
        reason = f"a request holds {needed:.2f} GiB of KV cache and a decode worker has {has:.2f} GiB"
        return Recommendation(prefill=0, decode=0, reasons=(reason,))
    if plan.advice:
        alone = num_gpus or max(1, math.ceil(load.rate / aggregated_capacity(measured, load, plan)))
        return Recommendation(prefill=0, decode=alone, reasons=plan.advice)
    prefill, decode = plan.num_prefill, plan.num_decode
    if num_gpus:
        prefill, decode = split_of(num_gpus, shape, measured, load)
    return Recommendation(
        prefill=prefill, decode=decode, reasons=_why_separate(measured, load, plan, prefill, decode, num_gpus)
    )


def _why_separate(
    measured: Measured, load: PlannedLoad, plan: SizingPlan, prefill: int, decode: int, num_gpus: int
) -> tuple[str, ...]:
    by_prefill = prefill * prefill_capacity(plan.handoff)
    by_decode = decode * decode_capacity(measured, load, plan.handoff, plan.places)
    if num_gpus:
        most = min(by_prefill, by_decode)
        bound = "prefill" if by_prefill <= by_decode else "decode"
        first = (
            f"of all splits of {num_gpus} GPUs it serves the most, {most:.3g} requests/s, bound by {bound}"
        )
    else:
        # of the rate that leaves a reserve
        used = (PREFILL_BUSY * load.rate / by_prefill, DECODE_FULL * load.rate / by_decode)
        first = (
            f"{load.rate:g} requests/s keep {_workers(prefill, 'prefill')} {used[0]:.0%} busy and fill "
            f"{_workers(decode, 'decode')} to {used[1]:.0%}"
        )
    exposed, prompt = plan.handoff.exposed_s * 1e3, plan.handoff.prefill_s * 1e3
    second = f"a hand-off delays decode by {exposed:.1f} ms, next to {prompt:.1f} ms for the prompt"
    return first, second


def aggregated_capacity(measured: Measured, load: PlannedLoad, plan: SizingPlan) -> float:
    """Requests per second of one worker that computes prompts and tokens."""
    prompt = plan.handoff.prefill_s / PREFILL_BUSY
    return 1 / (prompt + load.output * measured.tpot_s / (plan.places * DECODE_FULL))


def _workers(count: int, role: str) -> str:
    return f"{count} {role} worker{'s' if count > 1 else ''}"
