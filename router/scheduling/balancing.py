"""The load-balancing policies by name. Pure: the random source is injected.

A policy picks one of the workers of one role that can take the request now. Workers with recent failures are
offered only when no other can serve. Loads are those of the router's own ledger, so a placement counts at
once.

    cache-aware    prefill with the fewest tokens to compute until this prompt is done: its queue and the
                   uncached part
    session        decode that has the beginning of the prompt cached, unless it is much fuller than others:
                   the next turn of a chat uses the worker of the last one, and only new KV is handed over
    least-loaded   prefill with the fewest tokens queued, decode with the smallest share of places and pages
                   in use
    round-robin    the worker whose turn is longest ago
    power-of-two   the less loaded of two random ones (Mitzenmacher, "The Power of Two Choices in Randomized
                   Load Balancing")
"""

from collections.abc import Callable, Sequence
from random import Random

from ...cluster.config.router_groups import DECODE_POLICIES, PREFILL_POLICIES
from ..workers.registry import Worker
from .prefixes import SeenPrompt, held_tokens

AFFINITY = 0.5  # extra load at which a decode worker with the whole prompt cached still wins
MAX_TURNS = 4096  # number of remembered instances

Load = Callable[[Worker], float]


def prefill_load(worker: Worker) -> float:
    """SeenPrompt tokens in the queue of a prefill worker."""
    return float(worker.num_tokens)


def decode_load(worker: Worker) -> float:
    """The share of places in use plus the share of pages in use, from 0 to 2."""
    return (
        worker.num_taken / max(1, worker.hello.max_running)
        + 1.0
        - worker.free_pages / worker.hello.pages_total
    )


class Balancer:
    """A policy for one role. This one picks the least loaded worker; of equals always the same."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def pick(self, workers: Sequence[Worker], prompt: SeenPrompt) -> Worker:
        """One of `workers`, which is not empty."""
        if len(workers) == 1:
            return workers[0]
        return min(workers, key=lambda worker: (self.cost(worker, prompt), worker.instance))

    def cost(self, worker: Worker, prompt: SeenPrompt) -> float:
        """The cost of a worker for this prompt; lower is better."""
        return self.load(worker)

    def placed(self, worker: Worker) -> None:
        """Notes an attempt that is placed on this worker."""


class CacheAware(Balancer):
    """Prefill with the fewest tokens left to compute."""

    def cost(self, worker: Worker, prompt: SeenPrompt) -> float:
        return self.load(worker) + prompt.num_tokens - held_tokens(worker, prompt)


class Session(Balancer):
    """Decode with the largest cached part, unless it is too full."""

    def cost(self, worker: Worker, prompt: SeenPrompt) -> float:
        held = held_tokens(worker, prompt) / max(1, prompt.num_tokens)
        return self.load(worker) - AFFINITY * held


class RoundRobin(Balancer):
    """Each worker in turn."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._num_turns = 0
        self._turns: dict[str, int] = {}  # instance -> its last turn, the latest at the end

    def cost(self, worker: Worker, prompt: SeenPrompt) -> float:
        return self._turns.get(worker.instance, 0)

    def placed(self, worker: Worker) -> None:
        self._num_turns += 1
        self._turns.pop(worker.instance, None)
        self._turns[worker.instance] = self._num_turns
        if len(self._turns) > MAX_TURNS:
            del self._turns[next(iter(self._turns))]


class PowerOfTwo(Balancer):
    """Nearly as even as the least loaded.

    Routers that do not know each other do not all choose the same worker.
    """

    def __init__(self, load: Load, coin: Random) -> None:
        super().__init__(load)
        self._coin = coin

    def pick(self, workers: Sequence[Worker], prompt: SeenPrompt) -> Worker:
        return super().pick(self._coin.sample(workers, 2) if len(workers) > 2 else workers, prompt)


def prefill_balancer(name: str, coin: Random) -> Balancer:
    """The policy of this name, one of `PREFILL_POLICIES`."""
    assert name in PREFILL_POLICIES, name
    return CacheAware(prefill_load) if name == "cache-aware" else _common(name, prefill_load, coin)


def decode_balancer(name: str, coin: Random) -> Balancer:
    """The policy of this name, one of `DECODE_POLICIES`."""
    assert name in DECODE_POLICIES, name
    return Session(decode_load) if name == "session" else _common(name, decode_load, coin)


def _common(name: str, load: Load, coin: Random) -> Balancer:
    if name == "round-robin":
        return RoundRobin(load)
    return PowerOfTwo(load, coin) if name == "power-of-two" else Balancer(load)
