"""A whole cluster in one process and in virtual time, under faults drawn from a seed.

`run(seed, options)` is the one way in. A run has three parts: the cluster starts and clients come while
faults happen; the faults stop, processes are back, and a last client must be served; then nothing may be left
anywhere. Whatever a caller has patched in production's classes around `run` is in force: that is how a
defence is switched off.
"""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from baton.cluster.config.router_groups import DECODE_POLICIES, PREFILL_POLICIES
from baton.cluster.net.control_link import REJECTED_BACKOFF_S
from baton.tests.sim.cluster_check import Checker
from baton.tests.sim.cluster_clients import Client, Violation, draw_client, draw_request
from baton.tests.sim.cluster_faults import NEAR_S, PAUSES, TRANSITIONS, Faults, draw
from baton.tests.sim.cluster_net import Network, Timeline
from baton.tests.sim.cluster_nodes import CONTROL, RouterProcess, WorkerProcess
from baton.tests.sim.cluster_pulls import OFF, add_pulls, next_prompt
from baton.tests.sim.cluster_tiers import add_tiers, hang_disk, lose_tier
from baton.tests.sim.draws import hex_id
from msgspec.structs import replace as replace_struct

CALM_S = 0.25  # registration
FAULTS_S = 3.0  # faults happen for so long
PROBE_S = 1.5  # after the faults a client comes
RECOVER_S = 12.0  # by then it must have been served
QUIET_S = 6.0  # after the last end nothing may be left
ORPHAN_S = 2.0  # a worker's rooms of a router whose place another took are gone by then
MAX_EVENTS = 60_000
ROUTER = "R0"


@dataclass(frozen=True)
class Settings:
    """How the cluster of a seed is set up."""

    head_dim: int = (
        64  # a page is 64 times as many bytes: 24 blocks cross pages, 64 a page is a block, 96 it is more
    )
    block_bytes: int = 4096
    window: int = 4
    lease_s: float = 1.5
    prefill_pages: int = 40
    decode_pages: int = 48
    max_running: int = 4
    max_queue: int = 40  # of the router: all clients wait, if they have one choice each
    prefill_queue: int = 32
    chunk_size: int = 8
    is_caching: bool = True
    lookahead: int = 0
    has_local_prefill: bool = False
    is_overlapped: bool = False  # decode launches each step before it has read the one before
    step_s: float = 0.01
    worker_timeout_s: float = 1.8
    request_timeout_s: float = 6.0
    queue_timeout_s: float = 4.0
    stall_s: float = 30.0
    prefill_policy: str = "cache-aware"
    decode_policy: str = "session"
    local_prefill_max: int = 0
    local_prefill_queued_max: int = 0
    grows: bool = True  # decode takes pages as tokens come
    ahead_tokens: int = 0
    is_crowded: bool = False  # many come at once, and their outputs outgrow what is expected, and the pool
    first_guess: int = 4  # output tokens that the router expects of the first answers
    learns: bool = True  # the router expects of later answers what earlier ones had
    choices: int = 1  # of each request; all but the first share its prompt
    aggregated: str = (
        ""  # "alone": decode workers are aggregated and there is no other; "mixed": beside prefill
    )
    host_slots: int = 0  # pages of the host tier of each worker; 0: there are no tiers
    digests_pool: bool = False  # as a GPU: a damaged page is found when it comes into the pool, not before
    disk_slots: int = 0  # pages of the disk tier behind it
    is_staging: bool = False  # the host tier is only the way to the disk
    pulls: str = OFF  # whether prefill pulls prefixes from decode: as --prefix-pulls
    turns: int = 1  # of a conversation
    has_features: bool = False  # prefill keeps features, and decode reads them
    has_classes: bool = False  # some requests are more urgent than others, and take their places
    slo_ttft_s: float = 0.0  # objective of the workers for first tokens; 0: none


@dataclass(frozen=True)
class Options:
    """What a caller may fix; everything else comes from the seed."""

    faults: Faults | None = None
    settings: Settings | None = None
    num_clients: int = 0
    num_prefills: int = 0  # 0: drawn, mostly 2
    num_decodes: int = 0
    odd: str = ""  # the worker of this name has the weights of another model
    may_repeat: bool = True  # False: every attempt must succeed
    served_within_s: float = 0.0  # every client must have its whole text by then; 0: no such bar
    urgent_within_s: float = 0.0  # the same for those of the most urgent class
    leave_at: str = ""  # clients leave when this event waits for a scheduler, such as "D event Complete"
    poison: str = ""  # "Prefill" or "Reserve": this order of client 0 kills every worker that takes it
    is_told: bool = False  # keep the story


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    trace_hash: int
    violation: str  # "" when every invariant held
    num_events: int
    seconds: float  # virtual
    faults: Faults
    reached: Counter  # faults that happened, transitions at which a process died
    seen: Counter  # transitions that were passed
    outcomes: Counter  # how clients ended
    story: list


def draw_settings(seed, rng, faults):
    settings = Settings(
        is_overlapped=seed % 2 == 1,
        head_dim=rng.choice((24, 64, 64, 96)),
        window=rng.choice((1, 2, 4, 6)),
        lease_s=rng.choice((1.0, 1.5, 2.5)),
        max_running=rng.choice((2, 4, 6)),
        chunk_size=rng.choice((0, 5, 8, 16)),
        is_caching=rng.random() < 0.8,
        lookahead=rng.randrange(2),
        has_local_prefill=rng.random() < 0.5,
        step_s=rng.choice((0.004, 0.01, 0.03, 0.1)),
        prefill_policy=rng.choice(PREFILL_POLICIES),
        decode_policy=rng.choice(DECODE_POLICIES),
        local_prefill_max=rng.choice((0, 0, 12, 1000)),
        local_prefill_queued_max=1000 * (seed % 11 in (3, 7)),
        grows=rng.random() < 0.8,
        ahead_tokens=rng.choice((0, 0, 2, 8)),
        first_guess=rng.choice((1, 2, 4, 8)),
        learns=rng.random() < 0.7,
        aggregated={3: "alone", 8: "mixed"}.get(seed % 10, ""),
    )
    if seed % 7 in (2, 5):
        settings = replace(settings, choices=2 + (seed % 7 == 5), max_queue=96)
    if faults.tight:
        settings = replace(settings, prefill_pages=15, decode_pages=18, prefill_queue=2)
    elif settings.grows and rng.random() < 0.4:
        settings = replace(
            settings,
            is_crowded=True,
            decode_pages=rng.choice((21, 26, 34)),
            max_running=8,
            step_s=min(settings.step_s, 0.01),
            queue_timeout_s=10.0,  # all are served in time, by one decode worker or with several choices
            request_timeout_s=12.0,
        )
    return settings


def add_classes(seed, settings):
    """`settings` of a part of the seeds with classes and an objective; its draws are its own."""
    rng = Random(f"{seed} classes")
    if rng.random() < 0.6:
        return settings
    slo_ttft_s = rng.choice((0.0, 0.05, 0.3, 2.0))
    if rng.random() < 0.3 or settings.choices > 1:
        return replace(settings, slo_ttft_s=slo_ttft_s)
    settings = replace(settings, slo_ttft_s=slo_ttft_s, has_classes=True, max_running=4)
    return replace(settings, step_s=min(settings.step_s, 0.03), prefill_queue=rng.choice((2, 32)))


class World:
    """One run. Nothing here outlives it."""

    def __init__(self, seed, options):
        self.seed, self.options = seed, options
        self.rng = Random(seed)
        self.faults = options.faults or draw(self.rng)
        self.settings = options.settings or draw_settings(seed, self.rng, self.faults)
        if options.faults is None and options.settings is None:
            self.faults, self.settings = add_tiers(seed, self.faults, self.settings)
            self.faults, self.settings = add_pulls(seed, self.faults, self.settings)
            self.settings = add_classes(seed, self.settings)
        self.class_rng = Random(f"{seed} class of each client")
        self.num_prefills = options.num_prefills or self.rng.choice((2, 2, 2, 2, 1))
        if self.settings.aggregated == "alone":
            self.num_prefills = 0
        self.num_decodes = options.num_decodes or self.rng.choice((2, 2, 2, 2, 1))
        self.timeline = Timeline()
        self.timeline.story = [] if options.is_told else None
        self.reached, self.seen, self.outcomes = Counter(), Counter(), Counter()
        self.network = Network(self.timeline, self.rng, self.faults, self.on_transition, self.reached)
        self.network.on_kill = self.kill
        self.checker = Checker(self)
        self.routers = []  # every start; the last one has the address
        self.workers = {}  # name -> the process that lives under it, or None
        self.disks = {}  # (worker's name, fingerprint) -> files of its disk tier
        self.clients = []
        self._to_kill = self.faults.kill_nth if self.faults.kill_at else 0
        self._standstill = Counter()  # router instance -> seconds
        self.num_deaths = Counter()  # by role
        self.died_at = 0.0  # the last of them
        self.paused_s = self.all_paused_s = 0.0  # sums over single processes, and of all at once

    @property
    def router(self):
        return self.routers[-1] if self.routers and self.routers[-1].is_alive else None

    def standstill(self, router):
        """Seconds during which a router stood still, or its clock did."""
        return self._standstill[router.instance] if router is not None else 0.0

    # --- processes ------------------------------------------------------------------------------------------

    def start(self, name):
        instance = hex_id(self.rng)
        self.timeline.note(name, "starts", instance[:8])
        if name == ROUTER:
            self.routers.append(RouterProcess(self, name, instance))
            if len(self.routers) > 1 and self.faults.are_only("usurp", "leave", "stop", "burst"):
                self.timeline.at(self.timeline.now + ORPHAN_S, self.checker.check_orphans, self.routers[-1])
        else:
            self.workers[name] = WorkerProcess(self, name, instance)

    def kill(self, process, *, is_orderly=False):
        """SIGKILL, or the end of a drain; the supervisor starts another one."""
        if not process.is_alive:
            return
        self.timeline.note(process.name, "leaves" if is_orderly else "dies", process.instance[:8])
        process.is_alive = False
        if not is_orderly:
            self.num_deaths[process.role] += 1
            self.died_at = self.timeline.now
        self.network.drop_process(process)
        if process.role == "R":
            for client in self.clients:
                if client.router is process:
                    client.reset()
            if process is not self.routers[-1]:
                return  # another one has its place already
        else:
            self.workers[process.name] = None
        self.timeline.at(self.timeline.now + 0.02 + 1.2 * self.rng.random() ** 2, self.start, process.name)

    def living(self):
        workers = [worker for worker in self.workers.values() if worker is not None]
        return workers + [router for router in self.routers if router.is_alive]

    def on_transition(self, process, way, verb):
        """Called wherever a process may die; says whether it does, before or after."""
        key = f"{process.role} {way} {verb}"
        self.seen[key] += 1
        if key != self.faults.kill_at or not self._to_kill or not self.network.is_faulty:
            return ""
        self._to_kill -= 1
        if self._to_kill:
            return ""
        self._to_kill = int(self.rng.random() < 0.3) * 2
        self.reached["kill_at"] += 1
        self.reached["died at " + key] += 1
        return "after" if self.faults.kill_after else "before"

    def clients_read(self):
        for client in self.clients:
            if client.inbox is not None and client.inbox._events:
                client.read()

    def next_turn(self, client):
        """The client goes on with its conversation after a while."""
        rng = Random(f"{self.seed} turn {client.number} {client.turns_left}")
        prompt = next_prompt(client, self.settings, rng)
        if prompt is None:
            return
        turn = draw_client(self, 1000 * client.turns_left + client.number, rng, self.faults)
        turn.prompt, turn.turns_left = prompt, client.turns_left - 1
        turn.sampling = replace_struct(turn.sampling, max_new_tokens=client.sampling.max_new_tokens)
        turn.__post_init__()
        self.clients.append(turn)
        self.timeline.at(self.timeline.now + 0.3 * rng.random() ** 2, turn.come)

    def is_killed_by(self, message):
        """Whether a worker dies of an order that it takes."""
        if type(message).__name__ != self.options.poison or self.clients[0].entry is None:
            return False
        self.reached["poisoned"] += message.room == self.clients[0].entry.room.room
        return message.room == self.clients[0].entry.room.room

    def leave(self, room):
        """The client of a room goes away, unless the faults are over."""
        for client in self.clients:
            if self.network.is_faulty and client.entry is not None and client.entry.room.room == room:
                client.leave()

    # --- faults at chosen times -----------------------------------------------------------------------------

    def _schedule_faults(self):
        for kind in (
            "cut",
            "partition",
            "one_way",
            "kill",
            "kill_two",
            "stall",
            "hang",
            "freeze",
            "jump",
            "drain",
            "usurp",
            "pause_all",
            "tier_gone",
            "tier_hang",
        ):
            for _ in range(getattr(self.faults, kind)):
                when = CALM_S + FAULTS_S * self.rng.random()
                self.timeline.at(when, self._strike, kind)

    def _strike(self, kind):
        """One fault happens, if there is something that it can happen to."""
        victims = self.living()
        if not victims or not self.network.is_faulty:
            return
        if getattr(self, "_" + kind)(self.rng.choice(victims)):
            self.reached[kind] += 1

    def _cut(self, victim):
        lines = self.network.all_lines()
        if lines:
            line = self.rng.choice(lines)
            self.timeline.note("cut", line)
            self.network.cut(line)
        return bool(lines)

    def _two_nodes(self):
        names = [*self.workers, ROUTER]
        a = self.rng.choice(names)
        b = self.rng.choice([name for name in names if name[0] != a[0]])
        return a, b

    def _partition(self, victim):
        a, b = self._two_nodes()
        seconds = self.rng.choice((0.4, 1.2, 2.5, 4.0))
        self.timeline.note("partition", a, b, seconds)
        self.network.block(a, b, seconds)
        self.network.block(b, a, seconds)
        return True

    def _one_way(self, victim):
        a, b = self._two_nodes()
        seconds = self.rng.choice((0.4, 1.2, 2.5, 4.0))
        self.timeline.note("partition", a, "to", b, seconds)
        self.network.block(a, b, seconds)
        return True

    def _kill(self, victim):
        self.reached["killed " + victim.role] += 1
        self.kill(victim)
        return True

    def _kill_two(self, victim):
        """A worker dies, and another one soon after it."""
        workers = [worker for worker in self.workers.values() if worker is not None]
        if len(workers) < 2:
            return False
        first, second = self.rng.sample(workers, 2)
        self._kill(first)
        self.timeline.at(self.timeline.now + NEAR_S * self.rng.random(), self._kill, second)
        return True

    def _stall(self, victim):
        seconds = self.rng.choice((0.3, 1.0, 2.0, 4.0))
        self.timeline.note(victim.name, "stalls", seconds)
        self.reached["stalled " + victim.role] += 1
        victim.stalled_until = self.timeline.now + seconds
        self._standstill[victim.instance] += seconds
        self.paused_s += seconds
        # what a stopped process does not take in may end its connection
        is_alone = self.faults.are_only(*PAUSES, "stop", "leave", "burst")
        if seconds > 1.5 and not is_alone and self.rng.random() < 0.3:
            self.timeline.at(self.timeline.now + 1.5, self._cut_off, victim)
        return True

    def _pause_all(self, victim):
        """Every process stands still, and all go on at once."""
        seconds = self.rng.choice((0.3, 1.0, 3.0, 30.0))
        self.timeline.note("all stall", seconds)
        self.paused_s += seconds
        self.all_paused_s += seconds
        for process in self.living():
            process.stalled_until = max(process.stalled_until, self.timeline.now + seconds)
            self._standstill[process.instance] += seconds
        return True

    def _cut_off(self, victim):
        for line in self.network.lines_of(victim):
            self.network.cut(line)

    def _hang(self, victim):
        if victim.role == "R":
            return False
        seconds = self.rng.choice((0.3, 1.0, 2.5, 4.0))
        self.timeline.note(victim.name, "hangs", seconds)
        victim.hung_until = self.timeline.now + seconds
        self.paused_s += seconds
        return True

    def _freeze(self, victim):
        seconds = self.rng.choice((0.3, 1.0, 3.0))
        self.timeline.note(victim.name, "clock freezes", seconds)
        victim.freeze(seconds)
        self._standstill[victim.instance] += seconds
        return True

    def _jump(self, victim):
        seconds = self.rng.choice((0.5, 2.0, 30.0))
        self.timeline.note(victim.name, "clock jumps", seconds)
        victim.offset += seconds
        return True

    def _drain(self, victim):
        if victim.role == "R":
            return False
        self.timeline.note(victim.name, "drains")
        victim.shutdown.drain.set()
        return True

    def _usurp(self, victim):
        old = self.router
        if old is None:
            return False
        self.timeline.note("another router takes over")
        for line in self.network.lines_of(old):
            self.network.cut(line)
        self.start(ROUTER)
        return True

    def _tier_gone(self, victim):
        self.timeline.note(victim.name, "may lose a tier")
        return victim.role != "R" and lose_tier(victim, self.rng)

    def _tier_hang(self, victim):
        seconds = self.rng.choice((0.3, 1.0, 3.0))
        self.timeline.note(victim.name, "may wait for its disk", seconds)
        return victim.role != "R" and hang_disk(victim, seconds)

    # --- the run --------------------------------------------------------------------------------------------

    def boot(self):
        for i in range(self.num_prefills):
            self.start(f"P{i}")
        for i in range(self.num_decodes):
            self.start(f"D{i}")
        self.start(ROUTER)
        self.timeline.at(CALM_S, self._begin_faults)
        self._schedule_faults()
        drawn = self.rng.choice((1, 2, 4, 6, 8)) + 6 * self.settings.is_crowded
        drawn += 12 * bool(self.settings.host_slots)  # whose prompts leave the pools and come back
        drawn += 8 * self.settings.has_classes
        num_clients = self.options.num_clients or drawn
        for number in range(num_clients):
            choices = draw_request(self, number * self.settings.choices, self.rng, self.faults)
            choices[0].turns_left = self.settings.turns - 1
            self.clients += choices
            spread = 0.05 if self.faults.burst or self.settings.is_crowded else FAULTS_S - 0.3
            self.timeline.at(CALM_S + spread * self.rng.random(), choices[0].come)

    def _begin_faults(self):
        self.network.is_faulty = True

    def _run_until(self, is_done, limit):
        timeline = self.timeline
        while not is_done() and timeline.now < limit:
            timeline.run_next()
            if timeline.num_events > MAX_EVENTS:
                raise Violation(f"more than {MAX_EVENTS} events")

    def play(self):
        """The run itself. Raises Violation, or what production's code raises."""
        self.boot()
        heal = CALM_S + FAULTS_S
        self._run_until(lambda: False, heal)
        self.network.heal()
        self.timeline.note("the faults are over")
        self._run_until(lambda: False, heal + PROBE_S)
        self._probe(heal + RECOVER_S + self.all_paused_s)
        stood_still = max(self._standstill.values(), default=0.0)  # also a router that another replaced
        limit = self.timeline.now + self.settings.request_timeout_s + 2.0 + stood_still
        self._run_until(lambda: all(client.end for client in self.clients), limit)
        for client in self.clients:
            if not client.end:
                raise Violation(f"client {client.number} has no end")
        for router in self.routers[:-1]:
            if router.is_alive:
                self.kill(router)
        # A rejected worker greets again after a pause by its own clock, which may stand still meanwhile.
        latest = QUIET_S + REJECTED_BACKOFF_S + max(self._standstill.values(), default=0.0)
        self._run_until(lambda: self.checker.is_quiet(), self.timeline.now + latest)
        self.checker.check_end()

    def _probe(self, limit):
        """The cluster serves again: a client that nothing disturbs gets the whole text."""
        while True:
            probe = draw_client(self, len(self.clients), self.rng, Faults())
            self.clients.append(probe)
            probe.come()
            self._run_until(lambda probe=probe: bool(probe.end), limit)
            if probe.end == "ok":
                return
            if self.timeline.now >= limit:
                raise Violation(f"the cluster does not serve again: {probe.end or 'no answer'}")
            pause = self.timeline.now + 0.3
            self._run_until(lambda pause=pause: self.timeline.now >= pause, limit)


def run(seed, options=None):
    """Plays a seed to its end; the same seed and options give the same trace hash."""
    options = options or Options()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        world = World(seed, options)
        try:
            world.play()
            violation = ""
        except Exception as error:  # an assertion of production's code is a violation, too
            violation = f"{type(error).__name__}: {error}"
            if options.is_told and not isinstance(error, Violation):
                raise
    finally:
        logging.disable(level)
    timeline = world.timeline
    return Outcome(
        seed, timeline.hash, violation, timeline.num_events, timeline.now, world.faults, world.reached,
        world.seen,
        world.outcomes, timeline.story or [],
    )  # fmt: skip


__all__ = ["CONTROL", "TRANSITIONS", "Client", "Options", "Outcome", "Settings", "World", "run"]
