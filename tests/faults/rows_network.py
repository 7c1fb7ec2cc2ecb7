"""Rows in which the network between living workers misbehaves; a proxy treats their messages."""

import itertools
import random
import time

from baton.tests.faults.cluster import wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, workload
from baton.tests.faults.zmtp_rules import (
    anything,
    change,
    cut,
    duplicate,
    flip,
    hold,
    nth,
    overtaken,
    share,
    verb,
)
from baton.tests.faults.zmtp_wire import Message

WHOLE = Promise(all_finish=True)
MIGRATED_S = 3.0
PARTITION_S = 8.0
BLOCKS = {"prompt": (600, 900), "max_tokens": 12}  # 3 or 4 blocks of 1 MiB each
COLD = {"proxied": True, "flags": {"decode": {"prefix-cache": "off"}}}  # decode pulls what it had before, too


def proxied(scene: Scene) -> list:
    """Every direction of every proxy."""
    proxies = [*scene.cluster.control.values(), *scene.cluster.kv.values()]
    return [way for proxy in proxies for way in (proxy.up, proxy.down)]


def finished(scene: Scene, calls: list[Call]) -> list[Call]:
    scene.promise = WHOLE
    return scene.traffic.wait(calls)


def longest_gap(calls: list[Call]) -> float:
    """Seconds for which a client saw nothing."""
    gaps = [0.0]
    for call in calls:
        times = [call.started, *(at for at, _ in call.arrivals)]
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return max(gaps)


def placed_again(calls: list[Call]) -> int:
    return sum(call.attempts > 1 for call in calls)


def told(calls: list[Call]) -> str:
    whole = f"{len(calls)} of {len(calls)} complete"
    return f"{whole}, {placed_again(calls)} placed again, longest silence {longest_gap(calls):.1f} s"


# --- partitions ---------------------------------------------------------------------------------------------


def partition(scene: Scene, ways: list, seconds: float, asks: list[Ask], *, at_token: int = 0) -> list[Call]:
    """Freezes `ways` for so long under `asks`, of which some stream has `at_token` tokens then."""
    calls = scene.traffic.start(*asks)
    if at_token:
        wait_until(lambda: max(len(call.ids) for call in calls) >= at_token, 20, "a stream runs", pause=0.002)
    for way in ways:
        way.freeze()
    end = time.monotonic() + seconds
    calls += scene.traffic.run(asks[: len(asks) // 2], width=4)
    wait_until(lambda: time.monotonic() >= end, seconds + 1, "the partition ends")
    for way in ways:
        way.thaw()
    finished(scene, calls)
    calls += scene.traffic.run(asks)
    scene.cluster.wait_whole(10)
    return calls


@row(
    "F23", "prefill and decode cannot reach each other for 8 s, both see the router",
    "all complete over another pair, and no block from before is taken in after it", **COLD,
)  # fmt: skip
def f23(scene: Scene) -> str:
    asks = scene.known(workload(231, 12, **BLOCKS))
    proxy = scene.cluster.kv["prefill-0"]
    calls = partition(scene, [proxy.up, proxy.down], PARTITION_S, asks)
    assert placed_again(calls), "somebody was on that pair"
    return told(calls)


@row(
    "F24", "what prefill says does not reach decode for 8 s, the other way goes on",
    "all complete over another pair", **COLD,
)  # fmt: skip
def f24(scene: Scene) -> str:
    asks = scene.known(workload(241, 12, **BLOCKS))
    calls = partition(scene, [scene.cluster.kv["prefill-0"].down], PARTITION_S, asks)
    assert placed_again(calls), "somebody was on that pair"
    return told(calls)


@row(
    "F25", "the router and a decode worker cannot reach each other for 8 s, mid-stream",
    "streams go on elsewhere within 3 s; after it no token comes twice, and the worker has dropped its rooms",
    proxied=True,
)  # fmt: skip
def f25(scene: Scene) -> str:
    asks = scene.known(workload(251, 6, prompt=(50, 100), max_tokens=600))
    proxy = scene.cluster.control["decode-0"]
    calls = partition(scene, [proxy.up, proxy.down], PARTITION_S, asks, at_token=20)
    assert placed_again(calls), "somebody was on it"
    assert longest_gap(calls) <= MIGRATED_S, told(calls)
    return told(calls)


@row(
    "F26", "partitions that heal: 0.5 s, less than any timeout, and 2 s, more than all of them",
    "all complete; after 0.5 s none is placed again, after 2 s none more than once", proxied=True,
)  # fmt: skip
def f26(scene: Scene) -> str:
    asks = scene.known(workload(261, 8, prompt=(300, 600), max_tokens=100))
    for way in proxied(scene):
        way.freeze()
    calls = scene.traffic.start(*asks)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 0.5, 2, "half a second")
    for way in proxied(scene):
        way.thaw()
    finished(scene, calls)
    assert not placed_again(calls), told(calls)
    short = longest_gap(calls)
    proxy = scene.cluster.control["decode-0"]
    calls = partition(scene, [proxy.up, proxy.down], 2.0, asks[:6], at_token=10)
    proxy = scene.cluster.kv["prefill-0"]
    calls += partition(scene, [proxy.up, proxy.down], 2.0, asks[:6])
    calls += finished(scene, scene.traffic.start(*asks))
    assert max(call.attempts for call in calls) <= 2, told(calls)
    # Over the timeouts a partition is a death for whoever looks at it, and rooms of a dead worker are never
    # denied their second attempt: each partition may cost the nine of its own one more.
    scene.promise = Promise(all_finish=True, spare_attempts=18)
    return f"0.5 s: no second attempt, a gap of {short:.1f} s; 2 s: {told(calls)}"


# --- single messages ----------------------------------------------------------------------------------------


@row("F29", "every message is late by 0 to 100 ms, some are overtaken", "all complete, tokens equal", **COLD)
def f29(scene: Scene) -> str:
    asks = scene.known(workload(291, 16, prompt=(100, 700), max_tokens=24))
    rng = random.Random(29)
    for way in proxied(scene):
        way.delay_s, way.jitter_s = 0.0, 0.1
    for proxy in scene.cluster.kv.values():
        proxy.down.rule(share(0.3, rng, verb("Block", "Announce")), overtaken)
    calls = finished(scene, scene.traffic.start(*asks))
    return told(calls)


@row(
    "F30", "every message of both planes comes twice", "tokens equal, and nothing is done twice",
    quick=True, **COLD,
)  # fmt: skip
def f30(scene: Scene) -> str:
    asks = scene.known(workload(301, 12, prompt=(100, 700), max_tokens=24))
    before = scene.counted("prefill", "requests")
    for way in proxied(scene):
        way.rule(anything, duplicate())
    calls = finished(scene, scene.traffic.start(*asks))
    assert not placed_again(calls), told(calls)
    doubles = scene.until_counted("decode", "duplicate_blocks", "unknown_room")
    done = scene.counted("prefill", "requests") - before
    assert done == len(calls), f"prefill ran {done:g} prompts for {len(calls)} requests"
    return f"{told(calls)}; {doubles:g} doubles dropped by decode"


@row(
    "F31", "blocks come after their room was given up: by its client, and for another attempt",
    "they are dropped and counted; the client of the second attempt sees equal tokens", **COLD,
)  # fmt: skip
def f31(scene: Scene) -> str:
    asks = scene.known(workload(311, 2, **BLOCKS))
    ways = [proxy.down for proxy in scene.cluster.kv.values()]
    rules = [way.rule(verb("Block"), hold) for way in ways]
    [left] = scene.traffic.start(asks[0])
    wait_until(lambda: sum(rule.num_done for rule in rules), 10, "a block is held")
    scene.traffic.cancel(left)
    wait_until(lambda: not scene.cluster.held(), 5, "the cancelled room is gone")
    before = scene.counted("decode", "unknown_room", "stale_epoch")
    late = sum(way.release() for way in ways)
    before = scene.until_counted("decode", "unknown_room", "stale_epoch", least=before + 1)
    [call] = scene.traffic.start(asks[1])
    wait_until(lambda: sum(rule.num_done for rule in rules) > late, 10, "a block is held")
    wait_until(
        lambda: sum(len(way.held) > 0 for way in ways) == len(ways), 20, "the second attempt is held as well"
    )
    for way in ways:
        way._rules.clear()
    late += sum(way.release() for way in ways)
    finished(scene, [call])
    assert call.attempts > 1
    dropped = scene.until_counted("decode", "unknown_room", "stale_epoch", least=before + 1)
    return f"{late} late blocks, {dropped:g} dropped as of no open attempt"


@row(
    "F32", "one bit of a KV block is flipped on its way", "its digest tells, it is pulled again, tokens "
                                                          "equal",
    quick=True, **COLD,
)  # fmt: skip
def f32(scene: Scene) -> str:
    asks = scene.known(workload(321, 6, **BLOCKS))
    rng = random.Random(32)
    proxy = scene.cluster.kv["prefill-0"]
    rule = proxy.down.rule(verb("Block", block=1), flip(1, rng.randrange(8 << 20)), times=1)
    calls = finished(scene, scene.traffic.start(*asks))
    assert rule.num_done == 1, "a block went that way"
    assert not placed_again(calls), told(calls)
    wrong = scene.counted("decode", "digest_mismatches")
    assert wrong == 1, f"{wrong:g} digests were wrong"
    assert scene.counted("decode", "repulls") == 1
    return f"{told(calls)}; 1 wrong digest, 1 block pulled again"


@row(
    "F35", "blocks of a wrong epoch, a forged room, another process, and under another block's name",
    "none is taken in, tokens equal", quick=True, **COLD,
)  # fmt: skip
def f35(scene: Scene) -> str:
    asks = scene.known(workload(351, 6, **BLOCKS))
    foreign = bytes(1 << 20)

    def forge(message: Message) -> list[Message]:
        epoch, block = message.fields()["epoch"], message.fields()["block"]
        size = len(message.frames[1])
        forged = message.with_frame(1, foreign[:size])
        return [
            forged.with_fields(epoch=epoch + 1),
            forged.with_fields(room="e" * 32),
            forged.with_fields(instance="e" * 32),
            forged.with_fields(block=block + 7),
            forged.with_fields(block=2**48),
            forged.with_fields(size=size + 1),
            forged.with_frame(1, foreign[: size - 1]),
            Message((message.frames[0],)),
            Message((*message.frames, b"x")),
            message,
        ]

    rules = [proxy.down.rule(verb("Block"), change(forge)) for proxy in scene.cluster.kv.values()]
    calls = finished(scene, scene.traffic.start(*asks))
    assert not placed_again(calls), told(calls)
    num = sum(rule.num_done for rule in rules)
    names = ("stale_epoch", "unknown_room", "stale_instance", "unexpected", "malformed", "duplicate_blocks")
    refused = scene.until_counted("decode", *names, least=9 * num)
    assert scene.counted("decode", "digest_mismatches") == 0, (
        "each was refused before its bytes were looked at"
    )
    return f"{told(calls)}; {refused:g} forged messages refused"


def under_swaps(scene: Scene) -> list[Call]:
    """Calls, four of whose blocks are those of another request."""
    asks = scene.known(workload(352, 8, **BLOCKS))
    seen: dict[str, bytes] = {}

    def swap(message: Message) -> list[Message]:
        room = message.fields()["room"]
        others = [payload for owner, payload in seen.items() if owner != room]
        seen[room] = message.frames[1]
        return [message.with_frame(1, others[0])] if others else [message]

    proxy = scene.cluster.kv["prefill-0"]
    proxy.down.rule(verb("Block", block=0), change(swap), times=4)
    return finished(scene, scene.traffic.start(*asks))


@row(
    "F35b", "the bytes of another request's block under a right header", "its digest tells, tokens equal",
    quick=True, **COLD,
)  # fmt: skip
def f35b(scene: Scene) -> str:
    calls = under_swaps(scene)
    wrong = scene.until_counted("decode", "digest_mismatches")
    return f"{told(calls)}; {wrong:g} wrong digests"


# --- fuzz ---------------------------------------------------------------------------------------------------


@row(
    "F33", "KV headers with flipped bits, messages cut in the middle, garbage on living connections",
    "who gets it drops the peer or the message; all complete, no process ends", **COLD,
)  # fmt: skip
def f33(scene: Scene) -> str:
    asks = scene.known(workload(331, 16, **BLOCKS))
    rng = random.Random(33)
    for proxy in scene.cluster.kv.values():
        proxy.down.rule(
            nth(2, verb("Block"), every=9), lambda way, m: flip(0, rng.randrange(800))(way, m), times=3
        )
        proxy.down.rule(nth(3, verb("Block")), cut(5000))
        proxy.up.rule(nth(5, verb("Pull")), cut(7))
    calls = scene.traffic.start(*asks)
    wait_until(lambda: any(call.ids for call in calls), 10, "it runs", pause=0.002)
    for proxy in [
        *scene.cluster.kv.values(),
        scene.cluster.control["decode-0"],
        scene.cluster.control["prefill-1"],
    ]:
        proxy.up.inject(rng.randbytes(500))
        proxy.down.inject(rng.randbytes(500))
    finished(scene, calls)
    scene.cluster.wait_whole(10)
    again = finished(scene, scene.traffic.start(*asks))
    # two workers lose their connection to the router and all their rooms: none is denied the next attempt
    scene.promise = Promise(all_finish=True, spare_attempts=2 * len(asks))
    return f"{told(calls + again)}"
