"""The sizes of forwards over prompts that a decode engine computes itself."""

import math

REACHED_SHARE = 0.78  # of the measured rate of dense products, in the forward of a prompt
# In which a serving host launches one layer without graphs: 20 to 30 ms for the 32 layers of a model of 8B,
# between the other threads of a worker.
LAUNCH_S = 800e-6
GRAPH_RANGE = (256, 8192)
ALONE_FACTOR = 4  # parts in one forward of a prompt that no running stream waits for
ALONE_RANGE = (512, 8192)
WHOLE_PROMPT_ROWS = 8192  # rows of a forward over several prompts where prompts are not cut into chunks
# Rows of context buffers for several short prompts in one forward, however short the longest context is.
MIN_BUFFER_ROWS = 16384
BUFFER_CAPABILITY = (9, 0)  # from which a GPU has the bulk copies that context buffers are for


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


def buffer_rows(max_context: int, num_slots: int, alignment: int) -> int:
    """Rows of the buffers for a context of `max_context` tokens, or of all `num_slots` tokens of the KV pool,
    if those are fewer. A request's rows begin at a multiple of `alignment`.
    """
    rows = min(max(max_context, MIN_BUFFER_ROWS), num_slots + alignment)
    return -(-rows // alignment) * alignment
