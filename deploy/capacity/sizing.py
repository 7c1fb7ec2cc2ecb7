"""Computes the time of a hand-off, the number of workers for a load, and when a single process is better.

A prompt of S tokens is computed in chunks; each is pulled while the next is computed. With b bytes per token,
chunks of c tokens, a prefill rate of r tokens/s, a link of B bytes/s and a fixed cost f per hand-off:

    chunk i is ready at          t_i = n / r + s * n * n / 2
    and has landed at            l_i = max(t_i, l_(i-1)) + d_i / B
    hand-off, as decode sees it  l_last - t_0 + f
    exposed                      l_last - t_last + f
    hidden completely when       B >= b * r

Here n is the number of tokens in chunks 0..i, and s the time that attention adds per token and token before
it. d_i is the bytes of the blocks that chunk i fills; the last chunk includes the remainder. Layers with a
window move the KV of the prompt's last tokens alone. The hand-off lasts from the first announcement to the
last block. Its exposed part follows the end of prefill, when token 1 is sent already.

Workers: prefill by its rate at `PREFILL_BUSY` of its time; decode by Little's law, at most `DECODE_FULL` of
its places. `split_of` deals a fixed number of GPUs by the same two rates.
"""

import math
from dataclasses import dataclass

from ...cluster.protocol.kv_messages import block_bytes_of
from .checkpoints import KVShape

PREFILL_BUSY = 0.7
DECODE_FULL = 0.85
IDLE_PREFILL = 0.1  # below this share of its time, a prefill worker is not worth its place


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured rates and costs of the hardware."""

    prefill_rate: float  # tokens per second
    bandwidth: float  # bytes per second
    slowing: float = 0.0  # additional seconds per prompt token for each token before it
    fixed_s: float = 0.0  # seconds per hand-off
    tpot_s: float = 0.02  # seconds per token of a decode worker at its usual batch


@dataclass(frozen=True, kw_only=True)
class PlannedLoad:
    """The load to be served."""

    prompt: int  # tokens
    output: int
    rate: float  # requests per second
    chunk: int = 256  # tokens; 0: whole prompts
    kv_memory: float = 0.0  # bytes of a decode worker's pool; 0: only its places bound the batch
    max_running: int = 16


@dataclass(frozen=True, kw_only=True)
class HandoffTimes:
    """Times in seconds."""

    total_s: float
    exposed_s: float
    prefill_s: float


@dataclass(frozen=True, kw_only=True)
class SizingPlan:
    """The sizes that the load needs."""

    handoff: HandoffTimes
    request_bytes: int  # bytes of KV per request on decode
    hiding_bandwidth: float  # bytes per second
    places: int  # concurrent requests on one decode worker
    num_prefill: int
    num_decode: int
    advice: tuple[str, ...]  # reasons not to disaggregate


def handoff_of(tokens: int, shape: KVShape, measured: Measured, chunk: int) -> HandoffTimes:
    """The times of one hand-off of `tokens` tokens with nothing cached on either side."""
    step = chunk or tokens
    landed, sent = 0.0, 0
    first = None
    for end in (*range(step, tokens, step), tokens):
        ready = prefill_s(end, measured)
        first = ready if first is None else first
        due = shape.moved_bytes(end, tokens)
        due -= due % block_bytes_of(shape.token_bytes) if end < tokens else 0
        if due > sent:
            landed, sent = max(ready, landed) + (due - sent) / measured.bandwidth, due
    assert first is not None, "a prompt has a token"
    return HandoffTimes(
        total_s=landed - first + measured.fixed_s,
        exposed_s=landed - ready + measured.fixed_s,
        prefill_s=ready,
    )


def prefill_s(tokens: int, measured: Measured) -> float:
    """Seconds to prefill the first `tokens` tokens of a prompt."""
    return tokens / measured.prefill_rate + measured.slowing * tokens * tokens / 2


def plan_of(shape: KVShape, measured: Measured, load: PlannedLoad) -> SizingPlan:
    """The sizes for a load on the measured hardware."""
    handoff = handoff_of(load.prompt, shape, measured, load.chunk)
    request_bytes = shape.held_bytes(load.prompt + load.output)
    places = places_of(shape, load)
    return SizingPlan(
        handoff=handoff,
        request_bytes=request_bytes,
        hiding_bandwidth=shape.moved_bytes(load.prompt, load.prompt) / load.prompt * measured.prefill_rate,
        places=places,
        num_prefill=max(1, math.ceil(load.rate / prefill_capacity(handoff))),
        num_decode=max(1, math.ceil(load.rate / decode_capacity(measured, load, handoff, places)))
        if places
        else 0,
        advice=tuple(_advice(shape, measured, load, handoff, places)),
    )


def places_of(shape: KVShape, load: PlannedLoad) -> int:
    """The requests of this load that one decode worker holds at once."""
    if not load.kv_memory:
        return load.max_running
    return min(load.max_running, shape.requests_in(load.kv_memory, load.prompt + load.output))


def prefill_capacity(handoff: HandoffTimes) -> float:
    """Requests per second of one prefill worker."""
    return PREFILL_BUSY / handoff.prefill_s


def decode_capacity(measured: Measured, load: PlannedLoad, handoff: HandoffTimes, places: int) -> float:
    """Requests per second of one decode worker."""
    return places * DECODE_FULL / (load.output * measured.tpot_s + handoff.exposed_s)


def split_of(num_gpus: int, shape: KVShape, measured: Measured, load: PlannedLoad) -> tuple[int, int]:
    """The numbers of prefill and of decode workers, one per GPU, that serve the most requests per second.

    `num_gpus` is at least 2. `load.rate` does not count.
    """
    assert num_gpus >= 2, num_gpus
    handoff = handoff_of(load.prompt, shape, measured, load.chunk)
    prefill = prefill_capacity(handoff)
    decode = decode_capacity(measured, load, handoff, max(1, places_of(shape, load)))

    def rate(num_prefill: int) -> float:
        return min(num_prefill * prefill, (num_gpus - num_prefill) * decode)

    best = max(range(1, num_gpus), key=rate)
    return best, num_gpus - best


def most_requests(num_gpus: int, shape: KVShape, measured: Measured, load: PlannedLoad) -> float:
    """The requests per second that the split of `split_of` serves."""
    handoff = handoff_of(load.prompt, shape, measured, load.chunk)
    num_prefill, num_decode = split_of(num_gpus, shape, measured, load)
    places = max(1, places_of(shape, load))
    by_decode = num_decode * decode_capacity(measured, load, handoff, places)
    return min(num_prefill * prefill_capacity(handoff), by_decode)


def _advice(
    shape: KVShape, measured: Measured, load: PlannedLoad, handoff: HandoffTimes, places: int
) -> list[str]:
    found = []
    whole_s = shape.moved_bytes(load.prompt, load.prompt) / measured.bandwidth + measured.fixed_s
    if not places:
        found.append("a request does not fit a decode worker's KV memory")
    if whole_s >= handoff.prefill_s:
        found.append(
            f"moving a prompt takes {whole_s * 1e3:.1f} ms and computing it {handoff.prefill_s * 1e3:.1f} ms"
        )
    if handoff.prefill_s <= measured.tpot_s:
        found.append(
            f"a prompt is computed in {handoff.prefill_s * 1e3:.1f} ms, which decoding hardly feels: a token "
            f"takes {measured.tpot_s * 1e3:.1f} ms"
        )
    if load.rate * handoff.prefill_s < IDLE_PREFILL:
        found.append(
            f"a prefill worker would be busy {load.rate * handoff.prefill_s:.0%} of its time: it buys even "
            "token times, not throughput"
        )
    return found
