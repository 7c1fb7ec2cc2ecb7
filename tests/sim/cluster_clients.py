"""Clients of a simulated cluster: each knows the text that it must get, and judges every event at once."""

from dataclasses import dataclass, field
from random import Random

import msgspec
from baton.cluster.protocol.messages import Sampling
from baton.router.errors import ApiError
from baton.router.rooms.effects import Deliver, Ended, Failure, Settled
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job
from baton.tests.sim.cluster_toy import LONGEST_OUTPUT, NUM_PROMPTS, expected, prompts

GRACE_S = 1.0  # that a client may wait behind its deadline
GONE_S = 1.0  # after which nothing of a cancelled request is held
TIERED_PROMPTS = 20  # where there are tiers, prompts come again
RETRY_S = 0.1  # a refused connection is tried again


class Violation(Exception):
    """An invariant does not hold."""


def read_inbox(inbox):
    """Everything that waits, as the answering task would take it; only when something does."""
    try:
        inbox.take().send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("an inbox with events has them at once")


@dataclass(eq=False)
class Client:
    """One request. After `leave_after` tokens it leaves; after `stop_after` it has found its stop string."""

    world: object
    number: int
    prompt: tuple
    sampling: Sampling
    leave_after: int = -1
    leave_at: float = 0.0  # seconds after it came
    stop_after: int = -1
    read_every_s: float = 0.0  # 0: at once
    priority: int = 0

    turns_left: int = 0  # of its conversation, of which this is one
    siblings: list = field(default_factory=list)  # the further choices of its request, which come with it

    tokens: list = field(default_factory=list)
    end: str = ""  # what ended it, once
    came_at: float = 0.0
    ended_at: float = 0.0
    router: object = None
    entry: object = None
    inbox: Inbox | None = None
    reads_at: float = 0.0

    def __post_init__(self):
        self.text, self.reason = expected(self.world.settings.head_dim, self.prompt, self.sampling)

    @property
    def is_waiting(self):
        return self.entry is not None and not self.end

    def come(self):
        """Connects and asks; a router that is not there is tried again."""
        world = self.world
        router, now = world.router, world.timeline.now
        if router is None or not router.is_alive or router.stalled_until > now:
            world.timeline.at(now + RETRY_S, self.come)
            return
        self.inbox = Inbox(router.clock)
        choices, jobs = [self, *self.siblings], []
        for choice in choices:
            choice.router, choice.came_at = router, now
            prompt_ids = list(self.prompt)
            jobs.append(
                Job(
                    prompt_ids=prompt_ids,
                    sampling=choice.sampling,
                    arrived=router.clock(),
                    tokenize_s=0.0,
                    priority=self.priority,
                )
            )
        try:
            entries = router.run(lambda: router.dispatcher.submit(jobs, self.inbox))
        except ApiError as error:
            for choice in choices:
                choice._end(f"refused {error.status}")
            return
        for choice, entry in zip(choices, entries or [None] * len(choices), strict=True):
            if entry is None:  # the router died of it
                choice.end = choice.end or "reset"
                continue
            choice.entry = entry
            world.timeline.note("client", choice.number, "came", entry.room.room[:8])
            if choice.leave_at:
                world.timeline.at(now + choice.leave_at, choice.leave)
        if entries is not None:
            self.read()

    @property
    def _router_had_to_guess(self):
        """Whether every token came but not the word that it was the last."""
        attempt = self.entry.room._attempt
        return attempt is None or attempt.finished is None

    def leave(self):
        if self.is_waiting and self.router.is_alive and self.router.stalled_until <= self.world.timeline.now:
            self._end("left")
            self.router.run(lambda: self.router.dispatcher.client_left(self.entry))

    def reset(self):
        """The router is gone, and the connection with it."""
        if not self.end:
            self._end("reset")

    def read(self):
        """Takes what is there in, if it is time to."""
        if self.inbox is None or not self.inbox._events or self.world.timeline.now < self.reads_at:
            return
        self.reads_at = self.world.timeline.now + self.read_every_s
        if self.read_every_s:
            self.world.timeline.at(self.reads_at, self.world.clients_read)
        for index, event in read_inbox(self.inbox):
            [self, *self.siblings][index]._take(event)

    def _take(self, event):
        self.world.timeline.note("client", self.number, type(event).__name__, getattr(event, "ids", ""))
        if isinstance(event, Settled):
            return
        if self.end in ("stopped", "left", "reset"):
            return  # nobody reads it
        if self.end:
            raise Violation(f"client {self.number} got {event} after {self.end}")
        if isinstance(event, Deliver):
            self._deliver(event.ids)
        elif isinstance(event, Ended):
            reason = event.reason
            if len(self.text) == self.sampling.max_new_tokens and self._router_had_to_guess:
                reason = (
                    self.reason
                )  # the last word of a worker was lost, and the model's own stop tokens are not known
            if (self.tokens, reason) != (self.text, self.reason):
                got = f"{self.tokens} {event.reason}"
                raise Violation(f"client {self.number} ended with {got}, not {self.text} {self.reason}")
            self._end("ok")
            if self.turns_left:
                self.world.next_turn(self)
        elif isinstance(event, Failure):
            self._end(event.kind)

    def _deliver(self, ids):
        self.tokens += ids
        if self.tokens != self.text[: len(self.tokens)]:
            raise Violation(f"client {self.number} got {self.tokens}, which {self.text} does not begin with")
        if 0 <= self.stop_after <= len(self.tokens):
            self._end("stopped")
            self.router.run(lambda: self.router.dispatcher.stopped(self.entry))
        elif 0 <= self.leave_after <= len(self.tokens):
            self.leave()

    def _end(self, how):
        self.end, self.ended_at = how, self.world.timeline.now
        self.world.timeline.note("client", self.number, "end", how)
        self.world.outcomes[how] += 1
        if how in ("left", "stopped") and self.world.faults.are_only(
            "leave", "stop", "burst", "tight", "kv_loss", "tier_slow", "tier_hang"
        ):
            self.world.timeline.at(self.ended_at + GONE_S, self.world.checker.check_gone, self)
        self.check_time()

    def check_time(self):
        """No client waits longer than its deadline and a moment, except while the router stood still."""
        if self.entry is None and not self.end:
            return
        until = self.ended_at if self.end else self.world.timeline.now
        allowed = (
            self.world.settings.request_timeout_s
            + GRACE_S
            + self.read_every_s
            + self.world.standstill(self.router)
        )
        if until - self.came_at > allowed:
            raise Violation(
                f"client {self.number} waited {until - self.came_at:.1f} s, {allowed:.1f} s is the limit"
            )


def draw_request(world, number, rng: Random, faults):
    """The choices of a request, the first of which brings the others."""
    first = draw_client(world, number, rng, faults)
    for i in range(1, world.settings.choices):
        other = draw_client(world, number + i, rng, faults)
        other.prompt, other.read_every_s = first.prompt, first.read_every_s
        other.sampling = msgspec.structs.replace(other.sampling, seed=first.sampling.seed + i)
        other.__post_init__()
        first.siblings.append(other)
    return [first, *first.siblings]


def draw_client(world, number, rng: Random, faults):
    """A request with habits of its own."""
    sampling = Sampling(
        temperature=0.0,
        seed=rng.choice((1, 1, 1, 2)),
        max_new_tokens=rng.choice((1, 2, 4, 7, 12) + 5 * (LONGEST_OUTPUT - 2,) * world.settings.is_crowded),
        ignore_eos=rng.random() < 0.3,
    )
    leaves = rng.random() < faults.leave
    leaves_at_token = leaves and rng.random() < 0.5
    return Client(
        world,
        number,
        prompts()[
            rng.randrange(NUM_PROMPTS) % (TIERED_PROMPTS if world.settings.host_slots else NUM_PROMPTS)
        ],
        sampling,
        leave_after=rng.randrange(8) if leaves_at_token else -1,
        leave_at=0.6 * rng.random() ** 2 if leaves and not leaves_at_token else 0.0,
        stop_after=rng.randrange(1, 6) if rng.random() < faults.stop else -1,
        read_every_s=0.5 * rng.random() if rng.random() < faults.slow else 0.0,
        priority=world.class_rng.choice((-1, 0, 0, 1, 2)) if world.settings.has_classes else 0,
    )
