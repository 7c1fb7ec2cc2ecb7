"""The sizes of forwards over prompts on a decode engine, chosen from the card and the model.

A part of a prompt runs between two decode steps, and the running streams wait for it. On a card its size
follows from the time that a stream may wait. The rate of a card is that of its matrix units, of which a
prompt's forward reaches a known share.
"""

import math
from dataclasses import dataclass

import torch

CPU_TOKENS = 128  # per part of a prompt
WAIT_S = 0.05  # for which a part of a prompt may keep the streams of a card waiting
REACHED_SHARE = 0.55  # of the peak rate of the matrix units, in the forward of a prompt
LAUNCH_S = 400e-6  # in which a host launches one layer without graphs
TOKENS_RANGE = (256, 8192)
# Operations of bfloat16 products per clock of a multiprocessor, by compute capability.
OPERATIONS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
OTHER_OPERATIONS_PER_CLOCK = 1024
OTHER_CLOCK_HZ = 1.7e9


ALONE_FACTOR = 4  # parts in one forward of a prompt that no running stream waits for
ALONE_RANGE = (512, 8192)


@dataclass(frozen=True, kw_only=True)
class PromptBudget:
    """Tokens of prompts.

    `step_tokens`: the most of one forward between two decode steps. `graph_tokens`: up to here a graph of the
    forward saves time; above it the device computes for longer than the host launches.
    """

    step_tokens: int
    graph_tokens: int


def prompt_budget(
    asked: int, *, operations_per_token: int, num_layers: int, rate: float | None
) -> PromptBudget:
    """The budget of a model with `operations_per_token`.

    `rate` is the card's, in operations per second; None: CPU. `asked` is the configured number of tokens per
    step; 0 chooses it.
    """
    if rate is None:
        tokens = asked or CPU_TOKENS
        return PromptBudget(step_tokens=tokens, graph_tokens=tokens)
    reached = rate * REACHED_SHARE / operations_per_token
    low, most = TOKENS_RANGE
    return PromptBudget(
        step_tokens=asked or min(most, max(low, _power_of_two(WAIT_S * reached))),
        graph_tokens=min(most, max(low, _power_of_two(LAUNCH_S * num_layers * reached))),
    )


def alone_tokens(step_tokens: int) -> int:
    """The most tokens of a forward over one prompt while no stream runs, for `step_tokens` while some do."""
    low, high = ALONE_RANGE
    return max(low, step_tokens, min(high, ALONE_FACTOR * step_tokens))


def rate_of(device: torch.device) -> float | None:
    """The peak rate of bfloat16 products of `device` in operations per second; None for a CPU."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    clock_khz: int = getattr(card, "clock_rate", 0)
    per_clock = OPERATIONS_PER_CLOCK.get((card.major, card.minor), OTHER_OPERATIONS_PER_CLOCK)
    count: int = card.multi_processor_count
    return count * per_clock * (clock_khz * 1e3 or OTHER_CLOCK_HZ)


def _power_of_two(value: float) -> int:
    """The nearest power of two by ratio."""
    return 1 << max(0, round(math.log2(max(1.0, value))))
