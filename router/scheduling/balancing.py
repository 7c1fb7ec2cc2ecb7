"""The policies by which workers are chosen, by name. Pure: the coin is injected.

A policy sees the workers of one role that can take the request now, those that failed lately left out where others can
serve, and picks one. Loads are of the router's own ledger, so what was placed a moment ago counts.

    cache-aware    prefill with the fewest tokens to compute until this prompt is done: its queue, and what it lacks of it
    session        decode that holds the beginning of the prompt, unless it is much fuller than others: the next turn of a
                   chat goes where the last one was, and only what is new is handed over
    least-loaded   prefill with the fewest tokens queued, decode with the smallest share of places and pages taken
    round-robin    the one whose turn is longest ago
    power-of-two   the less loaded of two drawn ones (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing")
"""

from collections.abc import Callable, Sequence
from random import Random

from ...cluster.config_router import DECODE_POLICIES, PREFILL_POLICIES
from ..workers.registry import Worker
from .prefixes import PrefixIndex, Prompt

AFFINITY = 0.5  # a decode worker that holds the whole prompt may be so much fuller than others
MAX_TURNS = 4096  # instances whose turn is remembered

Load = Callable[[Worker], float]


def prefill_load(worker: Worker) -> float:
    """Prompt tokens that wait there."""
    return float(worker.num_tokens)


def decode_load(worker: Worker) -> float:
    """The share of its places that is taken, and that of its pages."""
    return (
        worker.num_taken / max(1, worker.hello.max_running)
        + 1.0
        - worker.free_pages / worker.hello.pages_total
    )


class Balancer:
    """A policy for one role. This one: the least loaded worker; of equals always the same."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def pick(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        """One of `workers`, of which there is at least one."""
        if len(workers) == 1:
            return workers[0]
        return min(workers, key=lambda worker: (self.cost(worker, prompt), worker.instance))

    def cost(self, worker: Worker, prompt: Prompt) -> float:
        """Lower is better."""
        return self.load(worker)

    def placed(self, worker: Worker) -> None:
        """An attempt goes there."""


class CacheAware(Balancer):
    """Prefill by what is left to compute."""

    def __init__(self, load: Load, index: PrefixIndex) -> None:
        super().__init__(load)
        self._index = index

    def cost(self, worker: Worker, prompt: Prompt) -> float:
        return self.load(worker) + prompt.num_tokens - held_tokens(self._index, worker, prompt)


class Session(Balancer):
    """Decode by what it holds, within reason."""

    def __init__(self, load: Load, index: PrefixIndex) -> None:
        super().__init__(load)
        self._index = index

    def cost(self, worker: Worker, prompt: Prompt) -> float:
        held = held_tokens(self._index, worker, prompt) / max(1, prompt.num_tokens)
        return self.load(worker) - AFFINITY * held


class RoundRobin(Balancer):
    """In turns."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._num_turns = 0
        self._turns: dict[str, int] = {}  # instance -> its last turn, the latest at the end

    def cost(self, worker: Worker, prompt: Prompt) -> float:
        return self._turns.get(worker.instance, 0)

    def placed(self, worker: Worker) -> None:
        self._num_turns += 1
        self._turns.pop(worker.instance, None)
        self._turns[worker.instance] = self._num_turns
        if len(self._turns) > MAX_TURNS:
            del self._turns[next(iter(self._turns))]


class PowerOfTwo(Balancer):
    """Nearly as even as the least loaded, and routers that do not know of each other do not all choose the same."""

    def __init__(self, load: Load, coin: Random) -> None:
        super().__init__(load)
        self._coin = coin

    def pick(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        return super().pick(self._coin.sample(workers, 2) if len(workers) > 2 else workers, prompt)


def held_tokens(index: PrefixIndex, worker: Worker, prompt: Prompt) -> int:
    """Tokens of the prompt that the worker has in its prefix cache, as far as the router knows; never all of them."""
    size = worker.hello.page_size
    num_held = index.num_held(worker.instance, prompt.pages(size)) * size
    return min(num_held, (max(0, prompt.num_tokens - 1)) // size * size)


def prefill_balancer(name: str, index: PrefixIndex, coin: Random) -> Balancer:
    """The policy of this name, one of `PREFILL_POLICIES`."""
    assert name in PREFILL_POLICIES, name
    return CacheAware(prefill_load, index) if name == "cache-aware" else _common(name, prefill_load, coin)


def decode_balancer(name: str, index: PrefixIndex, coin: Random) -> Balancer:
    """The policy of this name, one of `DECODE_POLICIES`."""
    assert name in DECODE_POLICIES, name
    return Session(decode_load, index) if name == "session" else _common(name, decode_load, coin)


def _common(name: str, load: Load, coin: Random) -> Balancer:
    if name == "round-robin":
        return RoundRobin(load)
    return PowerOfTwo(load, coin) if name == "power-of-two" else Balancer(load)
