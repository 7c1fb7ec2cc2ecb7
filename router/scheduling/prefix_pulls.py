"""Decides whether prefill gets a part of a prompt from a decode worker that holds it. Pure.

Decode holds what it has generated, which no prefill worker has computed. Prefill may compute it, or pull it
from decode, as decode pulls prompts from prefill. It pulls where that takes less time:

    compute   the queue of the prefill worker, then all tokens that it lacks
    pull      the queue or the pull, whichever takes longer, then the tokens behind the pulled ones

Both times are measured (`CostModel`). While no pull was measured, or none of late, one is tried where it
saves at least `WORTH_S`. A pull that fails costs at most the time of its patience, which is that of computing
the tokens. A pair of workers between which pulls fail is left alone for a while.

Pulled tokens have no features. So prefill pulls from the decode worker of the same attempt, which has the
draft state of the tokens that it holds and asks for no features of them; or, where that worker's drafter
reads no features, from any decode worker.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...cluster.config.router_groups import ALWAYS, NEVER
from ...cluster.net.sockets import is_loopback
from ...cluster.protocol.messages import PULL_LATE, PULL_LOST, PULL_OK, PrefillTimeline, PrefixPull
from ..rooms.effects import COMPUTE, PULL, Pair
from ..workers.registry import Worker
from .cost_model import CostModel
from .prefixes import SeenPrompt, held_tokens

WORTH_S = 0.005  # saved by a pull that is tried without knowing its cost
TRY_AGAIN_S = 60.0  # after the last measured pull, one is tried though it seems too slow
SHUNNED_S = 10.0  # nothing is pulled between a pair after a failure, and twice as long after the next one
LONGEST_SHUNNED_S = 600.0
SHORTEST_PATIENCE_S = 0.1  # of a prompt that waits for its pull
LONGEST_PATIENCE_S = 2.0
FAILED_S = 0.05  # a pull of an older worker that brought nothing for so long counts as failed
MAX_SHUNNED = 4096
MAX_TOKENS = 1 << 20


class Source(NamedTuple):
    """A decode worker that holds `tokens` tokens of a prompt."""

    worker: Worker
    tokens: int


@dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """What a prefill worker does about a prompt: it computes the last `num_new` tokens of it.

    `pull`: what it gets before; None: nothing. `kind`: as in `Pair`. `seconds`: the expected time of all of
    it; None: not known.
    """

    num_new: int
    kind: str = ""
    pull: PrefixPull | None = None
    seconds: float | None = None


@dataclass(eq=False)
class _Shunned:
    """A pair between which a pull has failed."""

    until: float
    seconds: float


class PrefixPulls:
    """Plans pulls and learns from them. `mode`: one of PULL_MODES. `clock` gives monotonic seconds."""

    def __init__(self, mode: str, mint: Callable[[], str], clock: Callable[[], float]) -> None:
        self.mode = mode
        self._mint = mint
        self._clock = clock
        self._shunned: dict[tuple[str, str], _Shunned] = {}
        self._tried_at: dict[str, float] = {}  # the last pull, by fingerprint

    def __repr__(self) -> str:
        return f"PrefixPulls({self.mode}, {len(self._shunned)} pairs shunned)"

    @property
    def is_on(self) -> bool:
        """Whether anything may be pulled."""
        return self.mode != NEVER

    def are_possible(self, workers: Iterable[Worker]) -> bool:
        """Whether some decode worker offers prefixes, and some prefill worker pulls them."""
        found = list(workers)
        has_source = any(worker.hello.prefix_endpoint for worker in found)
        return self.is_on and has_source and any(worker.hello.pulls_prefixes for worker in found)

    def plan(
        self, prefill: Worker, decode: Worker, prompt: SeenPrompt, others: Iterable[Worker], costs: CostModel
    ) -> PromptPlan:
        """The plan for a prompt at `prefill` for `decode`; `others` are all workers that serve."""
        wants_features = bool(decode.hello.feature_ids)
        have = held_tokens(prefill, prompt, takes_bare=not wants_features)
        num_new = prompt.num_tokens - have
        seconds = costs.on_prefill(prefill.backlog, num_new) if costs.prefill.is_known else None
        computed = PromptPlan(num_new=num_new, seconds=seconds)
        if not (self.is_on and prefill.hello.pulls_prefixes):
            return computed
        source = self._source(prefill, decode, prompt, others, wants_features=wants_features)
        if source is None or source.tokens <= have:
            return computed
        return self._pulled(prefill, decode, prompt, source, computed, costs)

    def heard(self, pair: Pair, worker: Worker, timeline: PrefillTimeline, costs: CostModel) -> None:
        """Learns from the report of a prompt whose plan had a pull."""
        pull = pair.pull
        if pull is None:
            return
        seconds, key, now = timeline.pull_ms / 1000, (pair.prefill, pull.instance), self._clock()
        if timeline.pulled_tokens:
            costs.pulled(timeline.pulled_tokens, seconds)
            self._tried_at[worker.hello.fingerprint] = now
        if timeline.pulled_tokens or timeline.pull_end == PULL_OK:  # it may have had the tokens already
            self._shunned.pop(key, None)
        elif _has_failed(timeline):
            before = self._shunned.pop(key, None)
            lasts = SHUNNED_S if before is None else min(LONGEST_SHUNNED_S, 2 * before.seconds)
            self._shunned[key] = _Shunned(now + lasts, lasts)
            while len(self._shunned) > MAX_SHUNNED:
                del self._shunned[next(iter(self._shunned))]

    def _source(
        self,
        prefill: Worker,
        decode: Worker,
        prompt: SeenPrompt,
        others: Iterable[Worker],
        *,
        wants_features: bool,
    ) -> Source | None:
        """The decode worker that holds most of the prompt, of those that prefill may pull from: the attempt's
        own before others that hold as much.
        """
        best: Source | None = None
        for worker in [decode] if wants_features else [decode, *others]:
            if worker.role != "decode" or not self._may_pull(prefill, worker):
                continue
            tokens = min(held_tokens(worker, prompt), MAX_TOKENS)
            if tokens and (best is None or tokens > best.tokens):
                best = Source(worker, tokens)
        return best

    def _may_pull(self, prefill: Worker, source: Worker) -> bool:
        """Whether the two can exchange pages: alike, within reach, and not after a failure just now."""
        ours, theirs = prefill.hello, source.hello
        if not theirs.prefix_endpoint or ours.fingerprint != theirs.fingerprint or not source.is_serving:
            return False
        if is_loopback(theirs.prefix_endpoint) and ours.host != theirs.host:
            return False
        shunned = self._shunned.get((prefill.instance, source.instance))
        return shunned is None or self._clock() >= shunned.until

    def _pulled(
        self,
        prefill: Worker,
        decode: Worker,
        prompt: SeenPrompt,
        source: Source,
        computed: PromptPlan,
        costs: CostModel,
    ) -> PromptPlan:
        """The plan with a pull from `source`, or `computed` where that is better."""
        num_new = prompt.num_tokens - source.tokens
        bare = held_tokens(prefill, prompt, takes_bare=True)
        num_pulled = source.tokens - min(bare, source.tokens)
        saved_s = 0.0
        if computed.seconds is not None:
            saved_s = computed.seconds - costs.on_prefill(prefill.backlog, num_new)
        seconds = _pull_s(prefill, num_pulled, num_new, costs)
        if self.mode != ALWAYS and not self._is_worth(prefill, seconds, computed.seconds, saved_s):
            return replace(computed, kind=COMPUTE)
        pull = PrefixPull(
            transfer=self._mint(),
            instance=source.worker.instance,
            endpoint=source.worker.hello.prefix_endpoint,
            tokens=source.tokens,
            patience_ms=_patience_ms(saved_s),
            is_reader=source.worker is decode,
        )
        return PromptPlan(num_new=num_new, kind=PULL, pull=pull, seconds=seconds)

    def _is_worth(
        self, prefill: Worker, seconds: float | None, computed_s: float | None, saved_s: float
    ) -> bool:
        """Whether a pull is faster, or worth a try. One that seems too slow is tried once in TRY_AGAIN_S."""
        if computed_s is None:
            return False
        if seconds is not None and seconds < computed_s:
            return True
        fingerprint, now = prefill.hello.fingerprint, self._clock()
        is_due = seconds is None or now - self._tried_at.get(fingerprint, float("-inf")) >= TRY_AGAIN_S
        if not is_due or saved_s < WORTH_S:
            return False
        self._tried_at[fingerprint] = now
        return True


def _has_failed(timeline: PrefillTimeline) -> bool:
    """Whether the pair could not exchange pages; a worker that declines says that it lacks them."""
    if timeline.pull_end:
        return timeline.pull_end in (PULL_LATE, PULL_LOST)
    return timeline.pull_ms / 1000 >= FAILED_S


def _patience_ms(saved_s: float) -> int:
    """How long a prompt waits for a pull that saves `saved_s` seconds of computing; 0: that is not known."""
    wait_s = min(LONGEST_PATIENCE_S, max(SHORTEST_PATIENCE_S, saved_s)) if saved_s else LONGEST_PATIENCE_S
    return round(1000 * wait_s)


def _pull_s(prefill: Worker, num_pulled: int, num_new: int, costs: CostModel) -> float | None:
    """The time of a prompt of which `num_pulled` tokens are pulled and `num_new` computed; None: unknown."""
    if not (costs.pull.is_known and costs.prefill.is_known):
        return None
    queue_s = costs.prefill.total(*prefill.backlog)
    return max(queue_s, costs.pull.at(num_pulled)) + costs.prefill.at(num_new)
