"""`baton bench load DIR`: the rate of loading weights beside plain reads of the same files, and its memory.

Each round reads the files without the page cache (O_DIRECT), plainly, and by the loader, first dropped from
the page cache and then from it. The loader runs as a worker's does: a process for each rank of --tp, which
reads its part. Its rate is the bytes that all ranks read by the time from the order to the end of the last
one. Starting processes, importing and a GPU's context are not in it. "of plain" compares with the faster
plain read of the same round and the same cache: into new memory, as a loader on a CPU does, which takes as
long as reading itself on some machines, and into a few buffers for a GPU. "memory" is the most that a rank's
process took beside what it had before, by the size of the rank's weights: a process on a CPU holds them, one
on a GPU does not.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cluster.process.progress import JobProgress
from ...engine.config import DTYPES, resolve_device
from ...engine.errors import CheckpointError
from ...engine.hub import resolve_checkpoint
from ...engine.models.registry import load_model_config
from ...engine.models.weight_cuts import rank_config
from ...engine.models.weight_reader import GIB, num_threads
from ...engine.models.weights import find_shards
from ..arguments import at_least
from .load_rank import READY, RankJob, RankLoad
from .plain_reads import drop_cached, file_system_of, read_plainly

PROG = "baton bench load"
COLD, WARM = "cold", "from cache"
DIRECT, PLAIN, LOADER = "O_DIRECT reads", "plain reads", "loader"
HEAD = ("way", "files", "GiB", "s", "GiB/s", "of plain", "memory of a rank, GiB", "of its weights")
EXIT_SLOW = 1
START_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One measurement; `ranks` are those of the loader."""

    way: str
    cache: str
    num_bytes: int
    total_s: float
    ranks: tuple[RankLoad, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.num_bytes / max(self.total_s, 1e-9)

    @property
    def memory(self) -> tuple[int, float]:
        """The most bytes that a rank's process took beside what it had before, and by its weights."""
        most = max(self.ranks, key=lambda rank: rank.peak_bytes - rank.before_bytes)
        taken = most.peak_bytes - most.before_bytes
        return taken, taken / most.held_bytes


def measure(path: Path, jobs: Sequence[RankJob], rounds: int, progress: JobProgress) -> list[list[Reading]]:
    """`rounds` rounds of readings. Raises CheckpointError for a checkpoint that a rank refuses."""
    files, found = find_shards(path), []
    threads = num_threads(sum(file.stat().st_size for file in files))
    steps = [(cache, way) for cache in (COLD, WARM) for way in (DIRECT, PLAIN, LOADER)]
    steps.remove((WARM, DIRECT))
    for number in range(rounds):
        progress.begin(f"round {number + 1} of {rounds}")
        readings: list[Reading] = []
        for at, (cache, way) in enumerate(steps):
            progress.show(at / len(steps), f"{way}, {cache}")
            reading = _reading(files, jobs, threads, cache, way)
            if reading is not None:
                readings.append(reading)
        found.append(readings)
    return found


def _reading(
    files: Sequence[Path], jobs: Sequence[RankJob], threads: int, cache: str, way: str
) -> Reading | None:
    """One measurement; None for direct reads on a file system without them."""
    if way == LOADER:
        children = [_start(job) for job in jobs]
        try:
            for child in children:
                _await_ready(child)
            if cache == COLD:
                drop_cached(files)
            ranks = _load(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
        total_s, num_bytes = max(rank.total_s for rank in ranks), sum(rank.read_bytes for rank in ranks)
        return Reading(way=way, cache=cache, num_bytes=num_bytes, total_s=total_s, ranks=ranks)
    if cache == COLD:
        drop_cached(files)
    try:
        is_kept = resolve_device(jobs[0].device).type == "cpu"
        read = read_plainly(files, threads, is_direct=way == DIRECT, is_kept=is_kept)
    except OSError:
        if way == DIRECT:
            return None
        raise
    return Reading(way=way, cache=cache, num_bytes=read.num_bytes, total_s=read.total_s)


def _start(job: RankJob) -> "subprocess.Popen[str]":
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return subprocess.Popen(
        [sys.executable, *safe, "-m", load_rank_module(), json.dumps(dataclasses.asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def load_rank_module() -> str:
    """The module of a rank's process."""
    return RankJob.__module__


def _await_ready(child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None
    if child.stdout.readline().strip() != READY:
        raise CheckpointError(f"a rank ended with exit code {child.wait(START_S)} before it could load")


def _load(children: Sequence["subprocess.Popen[str]"]) -> tuple[RankLoad, ...]:
    for child in children:
        assert child.stdin is not None
        child.stdin.write("load\n")
        child.stdin.flush()
    ranks = []
    for child in children:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise CheckpointError(f"a rank ended with exit code {child.wait(START_S)} while it loaded")
        ranks.append(RankLoad(**json.loads(line)))
    return tuple(ranks)


def plain_rate(readings: Sequence[Reading], cache: str) -> float:
    """The faster plain read of a round with the same cache, bytes per second."""
    return max(each.rate for each in readings if each.way != LOADER and each.cache == cache)


def share_of_plain(found: Sequence[Sequence[Reading]], cache: str) -> float:
    """The median over rounds of the loader's rate by that of the faster plain read."""
    return statistics.median(
        each.rate / plain_rate(readings, cache)
        for readings in found
        for each in readings
        if each.way == LOADER and each.cache == cache
    )


def table_of(found: Sequence[Sequence[Reading]]) -> list[str]:
    """The medians of all rounds as a markdown table."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    kinds = dict.fromkeys((each.way, each.cache) for readings in found for each in readings)
    for way, cache in kinds:
        own = [each for readings in found for each in readings if (each.way, each.cache) == (way, cache)]
        cells = [
            way,
            cache,
            f"{own[0].num_bytes / GIB:.2f}",
            f"{statistics.median(each.total_s for each in own):.2f}",
            f"{statistics.median(each.rate for each in own) / GIB:.2f}",
        ]
        if way == LOADER:
            taken = max(each.memory for each in own)
            cells += [f"{share_of_plain(found, cache):.2f}", f"{taken[0] / GIB:.2f}", f"{taken[1]:.2f}"]
        lines.append(f"| {' | '.join([*cells, *[''] * (len(HEAD) - len(cells))])} |")
    return lines


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=PROG,
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("model", metavar="DIR", help="a checkpoint, or its name on the hub")
    add("--tp", type=at_least(1), default=1, help="ranks that load at the same time (default 1)")
    add("--ep", action="store_true", help="ranks have whole experts, otherwise a part of the width of each")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: CUDA where it is")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of weights (default auto)")
    add("--quantize", choices=("none", "fp8"), default="none", help="as of a worker (default none)")
    add("--rounds", type=at_least(1), default=3, help="measurements of each way (default 3)")
    add(
        "--at-least",
        type=at_least(1),
        default=0,
        metavar="PERCENT",
        help="exit with 1 if the loader of dropped files has less of the plain rate",
    )
    add("--json", metavar="OUT", help="also write all measurements to this file")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench load` and returns its exit code."""
    options = parser().parse_args(list(argv))
    progress = JobProgress()
    try:
        path = resolve_checkpoint(options.model)
        jobs = [
            RankJob(
                path=str(path),
                rank=rank,
                size=options.tp,
                device=options.device,
                dtype=options.dtype,
                quantize=options.quantize,
                by_expert=options.ep,
            )
            for rank in range(options.tp)
        ]
        rank_config(load_model_config(path), jobs[0].sharing, str(path))
        found = measure(path, jobs, options.rounds, progress)
    except (CheckpointError, OSError) as error:
        progress.close()
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2
    progress.close()
    cores = len(os.sched_getaffinity(0))
    where = f"{path}, {file_system_of(path)}; {cores} cores, {jobs[0].sharing.setting}, {options.device}"
    sys.stdout.write("\n".join([where, "", *table_of(found)]) + "\n")
    if options.json:
        rows = [[dataclasses.asdict(each) for each in readings] for readings in found]
        Path(options.json).write_text(json.dumps({"where": where, "rounds": rows}) + "\n", encoding="utf-8")
    share = share_of_plain(found, COLD)
    if 100 * share < options.at_least:
        sys.stderr.write(
            f"{PROG}: the loader has {share:.0%} of the plain rate, --at-least {options.at_least}\n"
        )
        return EXIT_SLOW
    return 0
