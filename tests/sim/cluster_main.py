"""Runs seeds of the simulated cluster: `python -m baton.tests.sim.cluster_main --seeds 2000`.

Progress goes to stderr. The end is a table of what was reached, and exit code 1 with the first failing seeds
if an invariant was broken. `--trace SEED` plays one seed and prints its story.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from baton.tests.sim.cluster_faults import KINDS, TRANSITIONS
from baton.tests.sim.cluster_world import Options, run

SEEDS_PER_TASK = 20
YOUNG_OBJECTS = (
    50_000  # a seed makes many, of which reference counts end nearly all: looking for more took a tenth of it
)
MOST_FAILURES = 20  # then there is no point in going on


@dataclass
class Summary:
    """What many seeds came to."""

    num_seeds: int = 0
    num_events: int = 0
    virtual_s: float = 0.0
    trace_hash: int = 0
    seconds: float = 0.0
    failures: list = field(default_factory=list)  # (seed, violation)
    reached: Counter = field(default_factory=Counter)
    seen: Counter = field(default_factory=Counter)
    outcomes: Counter = field(default_factory=Counter)

    def add(self, other):
        self.num_seeds += other.num_seeds
        self.num_events += other.num_events
        self.virtual_s += other.virtual_s
        self.trace_hash ^= other.trace_hash  # of any order
        self.failures += other.failures
        for mine, theirs in (
            (self.reached, other.reached), (self.seen, other.seen), (self.outcomes, other.outcomes)
        ):  # fmt: skip
            mine.update(theirs)

    @property
    def gaps(self):
        """Faults and deaths at transitions that no seed has reached."""
        rows = [*KINDS, *(f"died at {transition}" for transition in TRANSITIONS)]
        unmarked = {
            "leave",
            "stop",
            "slow",
            "tight",
            "burst",
        }  # these are habits of a seed, counted where it was drawn
        return [row for row in rows if row not in unmarked and not self.reached[row]]


def run_range(seeds):
    """One task of a process of the pool."""
    summary = Summary()
    for seed in seeds:
        outcome = run(seed)
        summary.num_seeds += 1
        summary.num_events += outcome.num_events
        summary.virtual_s += outcome.seconds
        summary.trace_hash ^= (outcome.trace_hash * (2 * seed + 1)) & 0xFFFFFFFF
        summary.reached.update(outcome.reached)
        summary.reached.update(
            {name: 1 for name in outcome.faults.names if name in ("tight", "burst", "slow")}
        )
        summary.seen.update(outcome.seen)
        summary.outcomes.update(outcome.outcomes)
        if outcome.violation:
            summary.failures.append((seed, outcome.violation))
    return summary


def run_many(first, num_seeds, jobs, *, is_quiet=False):
    """Seeds [first, first + num_seeds) over `jobs` processes; stops early when many fail."""
    total, started, shown = Summary(), time.monotonic(), 0.0
    end = first + num_seeds
    tasks = [range(at, min(at + SEEDS_PER_TASK, end)) for at in range(first, end, SEEDS_PER_TASK)]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for part in pool.imap_unordered(run_range, tasks):
            total.add(part)
            for seed, violation in part.failures:
                print(f"\nseed {seed}: {violation}\n  replay: {replay(seed)}", file=sys.stderr, flush=True)
            if not is_quiet and time.monotonic() - shown > 1.0:
                shown = time.monotonic()
                rate = total.num_seeds / max(1e-9, shown - started)
                done = (
                    f"{total.num_seeds}/{num_seeds} seeds, {rate:.0f} a second, {len(total.failures)} failed"
                )
                print(f"\r{done}", end="", file=sys.stderr, flush=True)
            if len(total.failures) >= MOST_FAILURES:
                pool.terminate()
                break
    total.seconds = time.monotonic() - started
    if not is_quiet:
        print(file=sys.stderr)
    return total


def replay(seed):
    return f"python -m baton.tests.sim.cluster_main --trace {seed}"


def report(total):
    """The table of a run."""
    lines = ["", "how requests ended"]
    lines += [f"  {how:28} {count:>9}" for how, count in total.outcomes.most_common()]
    lines += ["", "faults, and how often each struck"]
    lines += [f"  {kind:28} {total.reached[kind]:>9}" for kind in KINDS if kind in total.reached]
    lines += ["", "a process died at                passed    died"]
    lines += [f"  {t:28} {total.seen[t]:>9} {total.reached['died at ' + t]:>7}" for t in TRANSITIONS]
    if total.gaps:
        lines += ["", "gaps, reached by no seed: " + ", ".join(total.gaps)]
    rate = 1000 * total.seconds / max(1, total.num_seeds)
    lines += [
        "",
        f"{total.num_seeds} seeds, {total.num_events} events, {total.virtual_s:.0f} virtual seconds "
        f"in {total.seconds:.1f} s ({rate:.1f} ms a seed), hash {total.trace_hash:08x}",
    ]
    lines += [
        f"seed {seed}: {violation}\n  replay: {replay(seed)}"
        for seed, violation in sorted(total.failures)[:10]
    ]
    lines.append(f"{len(total.failures)} seeds failed" if total.failures else "every invariant held")
    return "\n".join(lines)


def as_json(total):
    return json.dumps(
        {
            "seeds": total.num_seeds, "seconds": round(total.seconds, 1), "failures": sorted(total.failures),
            "gaps": total.gaps, "hash": total.trace_hash, "outcomes": total.outcomes,
            "reached": total.reached,
            "died": sum(n for row, n in total.reached.items() if row.startswith("died at ")),
        }
    )  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(prog="cluster_main", description="Runs seeds of the simulated cluster.")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--trace", type=int, help="play this seed and print its story")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    if options.trace is not None:
        outcome = run(options.trace, Options(is_told=True))
        print("\n".join(outcome.story))
        print(f"\nseed {options.trace}: {', '.join(outcome.faults.names) or 'no faults'}")
        print(f"hash {outcome.trace_hash:08x}: {outcome.violation or 'every invariant held'}")
        return int(bool(outcome.violation))
    total = run_many(options.first, options.seeds, options.jobs, is_quiet=options.json)
    print(as_json(total) if options.json else report(total))
    return int(bool(total.failures))


if __name__ == "__main__":
    sys.exit(main())
