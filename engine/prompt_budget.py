"""The sizes of forwards over prompts that a decode engine computes itself."""

import math

REACHED_SHARE = 0.78  # of the measured rate of dense products, in the forward of a prompt
LAUNCH_S = 400e-6  # in which a host launches one layer without graphs
GRAPH_RANGE = (256, 8192)
ALONE_FACTOR = 4  # parts in one forward of a prompt that no running stream waits for
ALONE_RANGE = (512, 8192)


def graph_tokens(num_weights: int, num_layers: int, rate: float) -> int:
    """Rows up to which a graph of the forward saves time; above it the device computes for longer than the
    host launches.

    `rate`: dense products of the card, FLOP/s.
    """
    rows = LAUNCH_S * num_layers * rate * REACHED_SHARE / (2 * max(1, num_weights))
    low, most = GRAPH_RANGE
    return min(most, max(low, 1 << max(0, round(math.log2(max(1.0, rows))))))


def alone_tokens(step_tokens: int) -> int:
    """The most tokens of a forward over one prompt while no stream runs, for `step_tokens` while some do."""
    low, high = ALONE_RANGE
    return max(low, step_tokens, min(high, ALONE_FACTOR * step_tokens))
