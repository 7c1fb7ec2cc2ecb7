"""Rows in which prefill pulls from decode what an earlier turn left there, and something happens to it."""

import signal

from baton.tests.faults.cluster import Late
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_network import placed_again
from baton.tests.faults.rows_process import play_fault
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, workload
from baton.tests.faults.zmtp_rules import flip, verb

PULLED = {"router": {"prefix-pulls": "always"}}
ELSEWHERE = {"router": {"prefix-pulls": "always", "decode-policy": "round-robin"}}  # than at their holder
LONG = (600, 800)  # tokens of the first turn's prompt: with its answer three or four blocks
ANSWER = 60
PREFILLS = ("prefill-0", "prefill-1")


def turns(scene: Scene, seed: int, count: int) -> tuple[list[Ask], list[Ask]]:
    """First and second turns of conversations, of both of which it is known what is said."""
    first = scene.known(workload(seed, count, prompt=LONG, max_tokens=ANSWER))
    second = [
        Ask(
            prompt=(*ask.prompt, *scene.bed.references[ask.key][:ANSWER], *range(9, 30)),
            sampling=ask.sampling,
            max_tokens=12,
        )
        for ask in first
    ]
    return first, scene.known(second)


def forget(scene: Scene, *names: str) -> None:
    """Workers start anew, with empty pools."""
    scene.victims.update(names)
    for name in names:
        scene.cluster.restart(name)
    scene.cluster.wait_whole(40)
    scene.rebase(*names)


def forget_all(scene: Scene) -> None:
    forget(scene, *(name for name in scene.cluster.nodes if not name.startswith("router")))


def told(scene: Scene, calls: list[Call]) -> str:
    pulled = scene.counted("prefill", "pulled_tokens")
    return (
        f"{len(calls)} of {len(calls)} complete, {placed_again(calls)} placed again, "
        f"{pulled:g} tokens pulled by those that live"
    )


@row(
    "F75",
    "prefill is killed with a part of a prefix pulled from decode",
    "all complete, nothing leaked on decode",
    quick=True,
    flags=PULLED,
)
def f75(scene: Scene) -> str:
    first, second = turns(scene, 175, 4)
    forget_all(scene)
    scene.traffic.run(first)
    forget(scene, "prefill-1")
    calls = play_fault(scene, "prefill-0", "pull:block:2", second)
    assert placed_again(calls), "somebody pulled there"
    return told(scene, calls)


@row(
    "F76",
    "decode is killed while prefill pulls a prefix from it",
    "all complete, nothing leaked on prefill",
    quick=True,
    flags=PULLED,
)
def f76(scene: Scene) -> str:
    first, second = turns(scene, 176, 4)
    forget(scene, "decode-1")
    scene.arm("decode-0", "offer:block:2")
    scene.traffic.run(first)
    forget(scene, *PREFILLS)
    scene.promise = Promise(all_finish=True, spare_attempts=len(second))
    calls = scene.traffic.start(*second)
    assert scene.cluster.wait_down("decode-0", 20) == -signal.SIGKILL
    scene.traffic.wait(calls)
    return told(scene, calls)


@row(
    "F77",
    "one bit of a block is flipped on its way from decode to prefill",
    "its digest tells, it is pulled again, tokens equal",
    quick=True,
    proxied=True,
    flags=PULLED,
)
def f77(scene: Scene) -> str:
    first, second = turns(scene, 177, 4)
    forget_all(scene)
    scene.traffic.run(first)
    forget(scene, *PREFILLS)
    rules = [
        proxy.down.rule(verb("Block", block=1), flip(1, 4321), times=1)
        for proxy in scene.cluster.prefixes.values()
    ]
    scene.promise = Promise(all_finish=True)
    calls = scene.traffic.wait(scene.traffic.start(*second))
    num_flips = sum(rule.num_done for rule in rules)
    num_seen = scene.counted("prefill", "prefix_digest_mismatches")
    if num_seen < max(num_flips, 1) and scene.counted("prefill", "pull_misses_late"):
        raise Late("a damaged block came when prefill had no patience any more")
    assert num_flips, "a block went that way"
    assert not placed_again(calls)
    assert num_seen == num_flips
    return f"{told(scene, calls)}; {num_flips} wrong digests, {num_flips} blocks pulled again"


@row(
    "F78",
    "a decode worker is silent for 4 s when prefill should pull a prefix from it for another one",
    "prefill computes it after its patience, all complete",
    flags=ELSEWHERE,
)
def f78(scene: Scene) -> str:
    first, second = turns(scene, 178, 4)
    forget(scene, "decode-1")
    scene.arm("decode-0", "decode:offer:1:pause")
    scene.traffic.run(first)
    forget(scene, *PREFILLS)
    scene.promise = Promise(all_finish=True, spare_attempts=len(second))
    calls = scene.traffic.wait(scene.traffic.start(*second))
    missed = scene.counted("prefill", "pull_misses_late", "pull_misses_lost")
    assert missed, "somebody waited for it"
    return f"{told(scene, calls)}; {missed:g} pulls given up"


@row(
    "F79",
    "every block from decode to prefill is damaged",
    "each prefix is computed, all complete in one attempt, tokens equal",
    proxied=True,
    flags=PULLED,
)
def f79(scene: Scene) -> str:
    first, second = turns(scene, 179, 4)
    forget_all(scene)
    scene.traffic.run(first)
    forget(scene, *PREFILLS)
    for proxy in scene.cluster.prefixes.values():
        proxy.down.rule(verb("Block"), flip(1, 4321))
    scene.promise = Promise(all_finish=True)
    calls = scene.traffic.wait(scene.traffic.start(*second))
    assert not placed_again(calls)
    lost, late = (scene.counted("prefill", f"pull_misses_{why}") for why in ("lost", "late"))
    assert lost or late, "somebody pulled"
    assert scene.counted("prefill", "pulled_tokens") == 0
    if not lost:
        raise Late("no block came while prefill had patience")
    return f"{told(scene, calls)}; {lost:g} pulls lost"
