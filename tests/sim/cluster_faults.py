"""The faults of a simulated cluster: a mix drawn anew for each seed, and the table of what was reached."""

from dataclasses import dataclass
from random import Random

NEAR_S = 1.0  # between two deaths that are no chance to a router which counts them

KINDS = (
    "control_loss", "control_duplicate", "control_reorder", "control_break", "order_flip", "report_flip",
    "kv_loss",
    "kv_duplicate", "kv_reorder", "kv_flip", "flip", "truncate", "delay", "congestion", "cut", "partition",
    "one_way",
    "kill", "kill_at", "stall", "hang", "freeze", "jump", "leave", "stop", "slow", "drain", "usurp", "tight",
    "burst",
    "kill_two", "pause_all",
    "tier_slow", "tier_fail", "tier_flip", "tier_torn", "tier_gone", "tier_hang", "tier_foreign",
)  # fmt: skip
# What neither loses nor changes a message and takes nobody away.
HARMLESS = frozenset(
    ("kv_duplicate", "kv_reorder", "control_duplicate", "congestion", "slow",
    "tier_fail", "tier_flip", "tier_torn", "tier_gone", "tier_foreign")
)  # fmt: skip
# Processes stand still and live; without other faults they keep their connections.
PAUSES = ("stall", "pause_all", "hang")
# What makes a worker look lost.
LOSING = frozenset(
    ("kill", "kill_at", "partition", "one_way", "cut", "control_break", "control_loss", "delay", "stall",
    "hang", "freeze",
     "jump", "usurp", "drain", "report_flip", "kill_two", "pause_all")
)  # fmt: skip
# The transitions at which a process may die: after a receive, before a send, or as its scheduler is told.
ROLE_VERBS = {
    "R": {
        "recv": ("Hello", "Heartbeat", "Reserved", "Refused", "FirstToken", "Tokens", "Finished", "Failed",
        "Gone"),
        "send": ("Welcome", "Reserve", "Prefill", "Cancel"),
    },
    "P": {
        "recv": ("Welcome", "Prefill", "Cancel", "KVHello", "Attach", "Pull", "Release", "Abort"),
        "send": ("Hello", "FirstToken", "Gone", "Failed", "KVWelcome", "Announce", "Block", "Abort"),
        "event": ("Prefill", "Cancel", "Released", "Dropped", "DropDone", "RouterLost"),
    },
    "D": {
        "recv": ("Welcome", "Reserve", "Cancel", "KVWelcome", "Announce", "Block", "Abort"),
        "send": ("Hello", "Reserved", "Refused", "Tokens", "Finished", "Failed", "Gone", "KVHello", "Attach",
        "Pull",
                 "Release", "Abort"),
        "event": ("Reserve", "Cancel", "Landed", "Complete", "Lost", "DropDone", "RouterLost"),
    },
}  # fmt: skip
TRANSITIONS = tuple(
    f"{role} {way} {verb}" for role, ways in ROLE_VERBS.items() for way in ways for verb in ways[way]
)


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, or numbers of times; 0 is off. Times are virtual seconds."""

    control_loss: float = 0.0
    control_duplicate: float = 0.0
    control_reorder: float = 0.0
    control_break: float = 0.0  # a message that the receiver's end finds damaged; the connection breaks
    order_flip: float = 0.0  # one bit of a message of the router, of which its connection knows nothing
    report_flip: float = 0.0  # the same of a worker's
    kv_loss: float = 0.0
    kv_duplicate: float = 0.0
    kv_reorder: float = 0.0
    kv_flip: float = 0.0  # one bit of any other message than a block
    flip: float = 0.0  # one bit of a block or of its header
    truncate: float = 0.0
    delay: float = 0.0  # of 0.1 to 2 seconds
    congestion: float = 0.0  # a connection takes nothing for a moment
    cut: int = 0
    partition: int = 0
    one_way: int = 0
    kill: int = 0
    kill_two: int = 0  # two workers, within NEAR_S
    kill_at: str = ""  # a transition
    kill_nth: int = 1
    kill_after: bool = False  # the message has left, or was taken in, when the process dies
    stall: int = 0
    hang: int = 0  # of the scheduler thread alone
    freeze: int = 0
    jump: int = 0
    leave: float = 0.0  # per client
    stop: float = 0.0  # per client: a stop string
    slow: float = 0.0  # per client: reads late
    drain: int = 0
    usurp: int = 0  # another router takes the address over while the first lives on
    tight: bool = False  # few pages
    burst: bool = False  # all clients come at once
    pause_all: int = 0  # the whole host stands still
    tier_slow: float = (
        0.0  # a copy between tiers takes long; drawn by `cluster_tiers.add_tiers`, as those below
    )
    tier_fail: float = 0.0  # a page is read from the disk in part only
    tier_flip: float = 0.0  # one bit of a page in host memory or on disk
    tier_torn: bool = False  # a process that dies while it writes a page leaves a part of it
    tier_gone: int = 0  # a disk is removed, or host memory fails
    tier_hang: int = 0  # a disk does not answer for some time
    tier_foreign: bool = False  # the disks hold pages of a worker with other weights

    @property
    def names(self):
        return [name for name in KINDS if getattr(self, name)]

    def are_only(self, *names):
        """Whether nothing goes wrong but these, and what may not be noticed at all."""
        return set(self.names) <= HARMLESS | set(names)


def draw(rng: Random) -> Faults:
    """Each kind is off in most seeds, so that every fault is seen alone, in pairs and in crowds."""
    share = rng.choice((0.0, 0.05, 0.08, 0.15, 0.15, 0.3, 0.5))

    def on():
        return rng.random() < share

    def rate(limit):
        return limit * rng.random() if on() else 0.0

    def times(most):
        return rng.randint(1, most) if on() else 0

    return Faults(
        control_loss=rate(0.05),
        control_duplicate=rate(0.3),
        control_reorder=rate(0.3),
        control_break=rate(0.03),
        order_flip=rate(0.1),
        report_flip=rate(0.03),
        kv_loss=rate(0.25),
        kv_duplicate=rate(0.3),
        kv_reorder=rate(0.5),
        kv_flip=rate(0.15),
        flip=rate(0.3),
        truncate=rate(0.1),
        delay=rate(0.08),
        congestion=rate(0.2),
        cut=times(4),
        partition=times(2),
        one_way=times(2),
        kill=times(3),
        kill_at=rng.choice(TRANSITIONS) if on() or on() else "",
        kill_nth=rng.choice((1, 1, 2, 3, 5)),
        kill_after=rng.random() < 0.5,
        stall=times(2),
        hang=times(2),
        freeze=times(2),
        jump=times(2),
        leave=rate(0.8),
        stop=rate(0.6),
        slow=rate(0.6),
        drain=times(2),
        usurp=times(1) if rng.random() < 0.3 else 0,
        tight=on(),
        burst=on(),
        kill_two=times(1),
        pause_all=times(1),
    )
