"""`make faults`: play rows of the fault table, print the table and write it as markdown; the exit code says if all hold.

python tests/faults/run.py [--rows F01,F08] [--quick] [--out build/faults.md]
"""

import argparse
import sys
import tempfile
from pathlib import Path

from baton.tests.faults.bed import Bed
from baton.tests.faults.rows import as_markdown, attempt, load


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults")
    parser.add_argument("--rows", default="", help="names, separated by commas; empty: all")
    parser.add_argument("--quick", action="store_true", help="only the rows that `make test` plays")
    parser.add_argument("--out", default="build/faults.md", help="where the table goes")
    options = parser.parse_args()
    rows = load()
    names = options.rows.replace(" ", "").split(",") if options.rows else list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        print(f"unknown rows {', '.join(unknown)}; rows: {', '.join(rows)}", file=sys.stderr)
        return 2
    outcomes = []
    with tempfile.TemporaryDirectory() as directory, Bed(Path(directory)) as bed:
        for name in names:
            if options.quick and not rows[name].is_quick:
                continue
            outcome = attempt(bed, rows[name])
            outcomes.append(outcome)
            result = "FAILS" if outcome.problems else "holds"
            print(f"{name:8} {result} {outcome.seconds:6.1f} s  {outcome.measured}", flush=True)
            for problem in outcome.problems[:12]:
                print(f"    {problem}", flush=True)
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_markdown(outcomes))
    num_failed = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"\n{as_markdown(outcomes)}\n{len(outcomes)} rows, {num_failed} fail; written to {path}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
