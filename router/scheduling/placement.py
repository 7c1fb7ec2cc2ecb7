"""Places attempts: chooses pairs by policy, books them in the registry's ledger, and learns from workers'
messages.

prompt on prefill    counts as cached there from the placing on: a later request with it waits in the same
                     queue
prompt and output    on decode once the room ended; the newest token has no KV
real state           workers tell what they hold (`prefix_view`); of one that tells nothing, `have` of its
                     Reserved corrects the view
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from random import Random

from ...cluster.config.router_groups import MEASURED
from ...cluster.protocol.messages import Failed, Finished, FirstToken, Reserved
from ..rooms.attempt import HANDOFF_KINDS, RoomEvent
from ..rooms.attempt_log import RUNNING
from ..rooms.effects import Pair
from ..workers.eligibility import NOWHERE, Space, able_pairs, emptiest_pairs, live_pairs
from ..workers.pair_health import PairHealth
from ..workers.registry import Load, Registry, Worker
from .balancing import Balancer, decode_balancer, prefill_balancer
from .cost_model import CostModel
from .prefix_pulls import PrefixPulls, PromptPlan
from .prefixes import SeenPrompt, expect_prompt, held_tokens
from .request_state import Entry
from .sharing import shared_pages

EXPECT_PROMPT_S = 10.0  # a prefill worker holds a prompt so long after it was placed, or does not get it
EXPECT_ANSWER_S = 2.0  # a decode worker tells of a prompt and answer so long after their end

_TOLD = (Reserved, FirstToken, Finished, Failed)


@dataclass(frozen=True, kw_only=True)
class PairingPolicy:
    """The settings of the choice of pairs; `balancing` explains the names."""

    prefill: str = "cache-aware"
    decode: str = "session"
    # most uncached tokens that decode computes itself when that is cheaper; 0: never
    local_prefill_max: int = 0
    local_prefill_queued_max: int = 0  # the same for a prompt that would wait for others on prefill
    prefix_pulls: str = MEASURED  # one of PULL_MODES
    coin: Random = field(default_factory=Random)


class Placer:
    """Chooses and books pairs."""

    def __init__(
        self,
        registry: Registry,
        policy: PairingPolicy | None = None,
        pair_health: PairHealth | None = None,
        *,
        mint: Callable[[], str] = lambda: os.urandom(16).hex(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        policy = policy or PairingPolicy()
        self._registry, self._pair_health = registry, PairHealth() if pair_health is None else pair_health
        self._local_max = policy.local_prefill_max
        self._local_max_queued = max(policy.local_prefill_max, policy.local_prefill_queued_max)
        self._prefill: Balancer = prefill_balancer(policy.prefill, policy.coin)
        self._decode: Balancer = decode_balancer(policy.decode, policy.coin)
        self.pulls = PrefixPulls(policy.prefix_pulls, mint, clock)
        self._cost_models: dict[str, CostModel] = {}  # by fingerprint

    def __repr__(self) -> str:
        return f"Placer(prefill={self._prefill}, decode={self._decode}, {self.pulls})"

    def pair_for(
        self,
        entry: Entry,
        doubtful: AbstractSet[str],
        reserved: AbstractSet[str],
        space: Mapping[str, Space] = NOWHERE,
    ) -> Pair | None:
        """The pair for the next attempt; None while all pairs that could serve are full.

        `space`: what the request may take from less urgent ones, by decode worker.

        Workers where the room failed and `doubtful` ones are used only when no other can serve. `reserved`
        workers are busy with a request that may kill, which is worth waiting for, so decode does not prefill
        in their place. The caller must not place on a reserved worker. A room that must be alone gets the
        pair with the fewest rooms. A pair that fails its health probes is used only where neither another
        pair nor decode alone can serve.
        """
        avoid = entry.room.failed_on | doubtful
        pairs = able_pairs(live_pairs(self._registry, avoid), entry.need, avoid, reserved, space)
        if self._pair_health.failing:
            pairs = self._sound(pairs, entry)
        if not pairs:
            return None
        if entry.room.deaths.must_be_alone:
            pairs = emptiest_pairs(pairs)
        prompt = entry.prompt
        prefill, decode = choose(pairs, self._prefill, self._decode, prompt)
        plan = self._plan(entry, prefill, decode)
        if (
            prefill is not decode
            and not entry.room.deaths
            and self._is_better_on_decode(prefill, decode, prompt, plan)
        ):
            prefill, plan = decode, None
        return Pair(
            prefill=prefill.instance,
            decode=decode.instance,
            prefill_endpoint=prefill.hello.kv_endpoint,
            prefix="" if plan is None else plan.kind,
            pull=None if plan is None else plan.pull,
            wants_features=bool(decode.hello.feature_ids),
        )

    def book(self, entry: Entry, pair: Pair) -> None:
        """Books the attempt; called when the room has its epoch."""
        decode, prefill = self._registry.get(pair.decode), self._registry.get(pair.prefill)
        assert decode is not None
        assert prefill is not None
        need, room, prompt = entry.need, entry.room, entry.prompt
        num_lacking = num_shared = 0
        if pair.shares:
            num_shared = shared_pages(need.prompt, decode.hello.page_size)
            num_lacking = need.prompt - num_shared * decode.hello.page_size
        elif pair.is_local:  # without a choice nothing is known of decode's cache, and nothing need be hashed
            held = held_tokens(decode, prompt) if self._has_choice("decode") else 0
            num_lacking = need.prompt - held
        pages, priority = decode.pages_for(need.held_on(decode)) - num_shared, entry.request.priority
        is_whole = pair.is_local and not pair.shares
        load = Load(pages=pages, tokens=num_lacking, priority=priority, prompts=int(is_whole))
        self._registry.reserve(pair.decode, room.room, room.epoch, load)
        self._decode.placed(decode)
        entry.fingerprint, entry.weights_hash = decode.hello.fingerprint, decode.weights_hash
        if pair.is_local:
            return
        held = held_tokens(prefill, prompt) if self._has_choice("prefill") else 0
        num_new = need.prompt - max(held, 0 if pair.pull is None else pair.pull.tokens)
        load = Load(pages=0, tokens=num_new, priority=priority, prompts=1)
        self._registry.reserve(pair.prefill, room.room, room.epoch, load)
        self._prefill.placed(prefill)
        if self._has_choice("prefill"):
            expect_prompt(prefill, prompt, EXPECT_PROMPT_S)

    def begun(self, entry: Entry) -> None:
        """Called on the first tokens of an attempt: its prompt is computed."""
        room = entry.room
        if room.pair is not None:
            self._registry.begun(room.pair.decode, room.room, room.epoch)

    def heard(self, entry: Entry, worker: Worker, event: RoomEvent, now: float) -> None:
        """Learns from a message of a worker of the current attempt; called before the room handles it."""
        pair = entry.room.pair
        if pair is None or not isinstance(event, _TOLD) or event.epoch != entry.room.epoch or pair.shares:
            return
        if isinstance(event, Reserved) and worker.instance == pair.decode and self._has_choice("decode"):
            names = entry.prompt.names(worker.prefixes.scheme)
            worker.prefixes.learn(names, event.have // worker.hello.page_size)
        elif isinstance(event, FirstToken) and worker.instance == pair.prefill:
            self._cost_model_of(worker).prefilled(event.timeline, is_local=False)
            self.pulls.heard(pair, worker, event.timeline, self._cost_model_of(worker))
        elif isinstance(event, Finished) and worker.instance == pair.decode:
            self._on_finished(entry, worker, event)
            if event.timeline.handoff_blocks or pair.is_local:
                # time since decode received the last block
                since_ms = event.timeline.queue_ms + event.timeline.decode_ms
                self._pair_health.passed(pair.prefill, pair.decode, now - since_ms / 1000)
        elif isinstance(event, Failed) and event.kind in HANDOFF_KINDS:
            self._pair_health.doubt(pair.prefill, pair.decode)

    def watch(self, entry: Entry, now: float) -> None:
        """Called on new tokens: decode's first own token shows that the pair works, long before the end of a
        stream."""
        note = entry.trace.last
        if (
            note is not None
            and note.num_tokens > 1
            and note.outcome == RUNNING
            and note.epoch != entry.shown_epoch
        ):
            entry.shown_epoch = note.epoch
            self._pair_health.passed(note.prefill, note.decode, now)

    def _on_finished(self, entry: Entry, worker: Worker, event: Finished) -> None:
        cost_model = self._cost_model_of(worker)
        if event.prefill is not None:
            cost_model.prefilled(event.prefill, is_local=True)
        elif event.timeline.handoff_bytes:
            cost_model.handed_over(entry.prompt.num_tokens - event.timeline.have_tokens, event.timeline)

    def ended(self, entry: Entry) -> None:
        """The output is complete: decode keeps prompt and output in its prefix cache for the next turn."""
        room = entry.room
        decode = self._registry.get(room.pair.decode) if room.pair is not None else None
        if decode is not None and (self._has_choice("decode") or self._may_pull):
            covered = room.num_prompt + room.num_output - 1 + decode.prefixes.scheme.lookahead
            whole = SeenPrompt([*room.prompt_ids, *room.output_ids][:covered], entry.job.salt)
            expect_prompt(decode, whole, EXPECT_ANSWER_S)

    def _sound(self, able: list[tuple[Worker, Worker]], entry: Entry) -> list[tuple[Worker, Worker]]:
        """The pairs that pass their probes. Without any, decode alone; without that, all of them."""
        failing = self._pair_health.failing
        sound = [(p, d) for p, d in able if (p.instance, d.instance) not in failing]
        if sound or not able:
            return sound
        prefills = {worker.instance for worker in self._registry if worker.role == "prefill"}
        alone = [(p, d) for p, d in live_pairs(self._registry, prefills) if p is d]
        return able_pairs(alone, entry.need) or able

    @property
    def _may_pull(self) -> bool:
        """Whether some decode worker offers prefixes, and some prefill worker takes them."""
        may_pull: bool = self._registry.memo("may pull", lambda: self.pulls.are_possible(self._registry))
        return may_pull

    def _plan(self, entry: Entry, prefill: Worker, decode: Worker) -> PromptPlan | None:
        """What `prefill` does about the prompt; None where there is nothing to choose."""
        if prefill is decode or entry.room.deaths or entry.room.failed_on or not self._may_pull:
            return None
        sampling = entry.job.sampling
        if sampling.prompt_logprobs >= 0 or sampling.routed_experts >= 0:  # rows are computed
            return None
        return self.pulls.plan(prefill, decode, entry.prompt, self._registry, self._cost_model_of(decode))

    def _is_better_on_decode(
        self, prefill: Worker, decode: Worker, prompt: SeenPrompt, plan: PromptPlan | None
    ) -> bool:
        limit = self._local_max_queued if prefill.num_tokens else self._local_max
        if not decode.is_aggregated and not (limit and decode.takes_prompts):
            return False
        num_new = prompt.num_tokens - held_tokens(decode, prompt)
        if not decode.is_aggregated:
            # Streams that begin until decode has computed the prompt wait for it, too. Nobody knows how many,
            # so a burst that is placed at once must not leave decode with more than one.
            is_only_one = not decode.backlog.prompts
            if num_new > limit or not (is_only_one or num_new <= self._local_max):
                return False
        return self._cost_model_of(decode).is_local_cheaper(
            new_on_prefill=prompt.num_tokens - held_tokens(prefill, prompt) if plan is None else plan.num_new,
            new_on_decode=num_new,
            before_on_prefill=prefill.backlog,
            before_on_decode=decode.backlog,
            running=decode.num_running,
        )

    def _has_choice(self, role: str) -> bool:
        """Whether it matters which worker has a prefix cached, also for the choice of local prefill."""
        if self._local_max:
            return True
        has_choice: bool = self._registry.memo(f"choice of {role}", lambda: self._is_one_of_several(role))
        return has_choice

    def _is_one_of_several(self, role: str) -> bool:
        workers = list(self._registry)
        is_mixed = {worker.role for worker in workers} == {"prefill", "decode"} and any(
            worker.is_aggregated for worker in workers
        )
        return is_mixed or sum(worker.role == role for worker in workers) > 1

    def _cost_model_of(self, worker: Worker) -> CostModel:
        fingerprint = worker.hello.fingerprint
        if fingerprint not in self._cost_models:
            self._cost_models[fingerprint] = CostModel()
        return self._cost_models[fingerprint]


def choose(
    pairs: Sequence[tuple[Worker, Worker]], prefill: Balancer, decode: Balancer, prompt: SeenPrompt
) -> tuple[Worker, Worker]:
    """One of the (prefill, decode) pairs: decode first, then one of its partners.

    Decode itself is the partner only where it has no other.
    """
    if len(pairs) == 1:
        return pairs[0]
    chosen = decode.pick(list(dict.fromkeys(partner for _, partner in pairs)), prompt)
    partners = [partner for partner, its in pairs if its is chosen]
    return prefill.pick([each for each in partners if each is not chosen] or partners, prompt), chosen
