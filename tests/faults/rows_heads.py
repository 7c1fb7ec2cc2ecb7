"""Rows of draft heads: a worker dies while `baton draft swap` changes its own, a disk is full of samples."""

import contextlib
import io
import subprocess
from collections.abc import Iterator
from pathlib import Path

from baton.tests.cluster.random_heads import random_head
from baton.tests.faults.cluster import wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_process import ALL_FINISH
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import workload
from baton.training.command import main

LAYERS = (0, 1, 3)  # a head's
SMALL_DISK = "96k"


def with_flags(scene: Scene, roles: tuple[str, ...], **flags: str) -> None:
    """Restarts the workers of these roles with more flags."""
    for node in scene.cluster.workers:
        if node.role in roles:
            scene.victims.add(node.name)
            node.flags |= {name.replace("_", "-"): value for name, value in flags.items()}
            scene.cluster.restart(node.name)
    scene.cluster.wait_whole(60)
    scene.rebase(*scene.cluster.nodes)


def heads(scene: Scene) -> dict[str, str]:
    """The fingerprint of the head of each decode worker that serves."""
    workers = scene.cluster.status().get("workers", [])
    return {w["instance"]: w["draft"]["fingerprint"] for w in workers if w["role"] == "decode" and w["draft"]}


def swap(scene: Scene, head: Path) -> tuple[int, str]:
    """The exit code of a rollout without a comparison, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["swap", str(head), "--url", scene.cluster.url, "--verifies", "0"])
    return code, said.getvalue()


@row(
    "F60",
    "a decode worker is killed while its draft head is swapped, under load",
    "all complete with equal tokens; the command takes the head back and fails; a second run succeeds",
    quick=True,
)
def f60(scene: Scene) -> str:
    base = scene.bed.new_directory()
    old, new = (random_head(scene.bed.model, base / f"head-{seed}", seed, LAYERS) for seed in (1, 2))
    asks = scene.known(workload(160, 12, prompt=(30, 200), max_tokens=60))
    with_flags(scene, ("prefill", "decode"), draft=str(old))
    first = set(heads(scene).values())
    assert len(first) == 1
    scene.arm("decode-0", "decode:swap:1")
    scene.promise = ALL_FINISH
    calls = scene.traffic.start(*asks)
    code, said = swap(scene, new)
    assert (code, "was lost" in said) == (1, True), said
    scene.cluster.wait_down("decode-0", 20)
    calls = scene.traffic.wait(calls)
    scene.cluster.heal()
    assert set(heads(scene).values()) == first, "the restarted worker has the head of its --draft"
    more = scene.traffic.start(*asks)
    code, said = swap(scene, new)
    assert code == 0, said
    calls += scene.traffic.wait(more)
    second = set(heads(scene).values())
    assert len(second) == 1
    assert second != first
    scene.rebase(*scene.cluster.nodes)
    done = sum(call.end == "finished" for call in calls)
    return f"{done} of {len(calls)} complete, {said.count('drafts with')} workers swapped in the second run"


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[str]:
    """A file system of SMALL_DISK at `place`; where none may be mounted, the directory is deleted instead."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        yield "No such file or directory"
        return
    try:
        yield "No space left on device"
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@row(
    "F61",
    "the disk is full while a decode worker records its traffic",
    "all complete; one line says that recording ends; nothing is recorded from then on",
    decode=1,
)
def f61(scene: Scene) -> str:
    asks = workload(161, 60, prompt=(1800, 1900), max_tokens=4)
    scene.promise = Promise(all_finish=True)
    place = scene.bed.new_directory()
    with small_disk(place) as fault:
        with_flags(scene, ("decode",), record_drafts=str(place), record_shard_mb="1", record_total_mb="2")
        if "space" not in fault:
            place.rmdir()
        scene.known(asks)  # a shard of 1 MiB does not fit
        scene.traffic.run(asks, width=8)
        decode = scene.cluster.nodes["decode-0"]
        wait_until(lambda: "recording ends" in decode.said(), 20, "the worker says so")
        recording = next(w["recording"] for w in scene.cluster.status()["workers"] if w["recording"])
        assert (recording["is_on"], recording["fault"]) == (False, fault)
        scene.traffic.run(asks, width=8)
        assert decode.said().count("recording ends") == 1
        counted = scene.counted("decode", "record_dropped")
        assert scene.counted("decode", "recorded_samples") == 0
        for name in ("record-drafts", "record-shard-mb", "record-total-mb"):
            decode.flags.pop(name)
        scene.cluster.restart("decode-0", graceful=True)  # nothing of the disk is in use any more
        scene.cluster.wait_whole(40)
        scene.rebase(*scene.cluster.nodes)
    return f"{fault}; {counted:g} sequences dropped and counted"
