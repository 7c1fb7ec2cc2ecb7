"""`make faults`: plays rows of the fault table and writes a table; the exit code says whether all hold.

python tests/faults/run.py [--rows F01,F08] [--quick] [--shards 6] [--out build/faults.md]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

from baton.tests.faults.rows import HEAD, as_line, attempt, load
from baton.tests.faults.testbed import Bed

LONGEST = (
    "F50",
    "F15",
    "F51",
    "F27h",
    "F27",
    "F38",
    "F46v",
    "F25",
    "F28",
    "F52",
    "F56",
    "plan",
    "F46",
    "F33b",
)
"""Begun first when there are shards."""
CORES_PER_SHARD = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults")
    parser.add_argument("--rows", default="", help="names, separated by commas; empty: all")
    parser.add_argument("--quick", action="store_true", help="only the rows that `make test-cluster` plays")
    parser.add_argument(
        "--shards", type=int, default=1, help="so many rows at a time, each on two cores of its own"
    )
    parser.add_argument("--out", default="build/faults.md", help="where the table goes")
    options = parser.parse_args()
    rows = load()
    names = options.rows.replace(" ", "").split(",") if options.rows else list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        print(f"unknown rows {', '.join(unknown)}; rows: {', '.join(rows)}", file=sys.stderr)
        return 2
    names = [name for name in names if rows[name].is_quick or not options.quick]
    cores = sorted(os.sched_getaffinity(0))
    wanted = CORES_PER_SHARD * options.shards
    if options.shards > 1 and len(cores) < wanted:
        print(
            f"--shards {options.shards} needs {wanted} cores, and {len(cores)} are here: ask for fewer",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    lines = play(names) if options.shards == 1 else play_sharded(names, options.shards, cores)
    table = "\n".join((*HEAD, *lines)) + "\n"
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table)
    num_failed = sum("| **fails** |" in line for line in lines)
    print(
        f"\n{table}\n{len(lines)} rows, {num_failed} fail, {time.monotonic() - began:.0f} s; written to "
        f"{path}"
    )
    return 1 if num_failed else 0


def play(names: list[str]) -> list[str]:
    """The rows one after the other; their lines of the table."""
    rows, lines = load(), []
    with tempfile.TemporaryDirectory() as directory, Bed(Path(directory)) as bed:
        for name in names:
            outcome = attempt(bed, rows[name])
            lines.append(as_line(outcome))
            result = "FAILS" if outcome.problems else "not run" if outcome.skipped else "holds"
            print(
                f"{name:8} {result} {outcome.seconds:6.1f} s  {outcome.measured or outcome.skipped}",
                flush=True,
            )
            for problem in outcome.problems[:12]:
                print(f"    {problem}", flush=True)
    return lines


def play_sharded(names: list[str], num_shards: int, cores: list[int]) -> list[str]:
    """Plays the rows, `num_shards` at a time, each in a process on its shard's cores; lines in name order."""
    waiting = deque(sorted(names, key=lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST)))
    lines: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:

        def serve(shard: int) -> None:
            while waiting:
                name = waiting.popleft()
                lines[name] = in_shard(name, shard, cores, Path(directory))

        threads = [threading.Thread(target=serve, args=(shard,)) for shard in range(num_shards)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [lines[name] for name in names]


def in_shard(name: str, shard: int, cores: list[int], directory: Path) -> str:
    """Plays one row in a process of its own; its line of the table."""
    own = cores[CORES_PER_SHARD * shard :][:CORES_PER_SHARD]
    out = directory / f"{name}.md"
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, own)), sys.executable, __file__, "--rows", name, "--out",
        str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print("\n".join(done.stdout.split("\n| row |")[0].splitlines()), flush=True)
    if not out.exists():
        return f"| {name} | | | **fails** | the row did not come to an end: {done.stderr[-300:]!r} | |"
    return out.read_text().splitlines()[len(HEAD)]


if __name__ == "__main__":
    sys.exit(main())
