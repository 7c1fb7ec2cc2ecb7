"""The tier of a test: the first command that runs it. `python -m baton.tests.meta.tiers` prints them all.

`make test`          every test that no later tier takes: at most 6 minutes on two cores
`make test-cluster`  the marker `cluster`: tests of a folder in CLUSTER_FOLDERS, tests with the real model
                     (`smollm2`), and files in SECOND: one drafter other than EAGLE3, planted bugs,
                     bits and near-ties of whole answers, full disks
`make test-full`     all tests, those with the marker `slow` included
`tests/gpu`          the marker `gpu`: a CUDA device

The marker `smoke` keeps a test of a later tier in `make test`. Of every drafter a cheap law stays there, too:
`parity/test_every_drafter.py`.
"""

import contextlib
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CLUSTER_FOLDERS = ("cluster", "faults")  # real processes and sockets
SECOND_FOLDERS = ("parity", "sim")
SECOND = (
    "test_mtp*", "test_latent_mtp*", "test_dflash*", "test_eagle.py", "test_eagle_*", "*_injected_bugs.py",
    "test_mutants.py", "test_batch_invariance.py", "test_deterministic_*", "test_bf16_audit.py",
    "test_full_disk.py",
)  # fmt: skip
FAST, CLUSTER, FULL, GPU = "make test", "make test-cluster", "make test-full", "tests/gpu"
TIERS = (FAST, CLUSTER, FULL, GPU)
# The files that take longest, the longest first: a run that begins with them keeps all workers busy.
SLOWEST = (
    "cluster/test_real_cluster.py",
    "parity/test_cluster_tokens.py",
    "cluster/test_failover.py",
    "parity/test_accept_length.py",
    "faults/test_rows.py",
    "faults/test_mutants.py",
    "parity/test_guided_model.py",
    "cluster/test_smoke.py",
    "cluster/test_hostile_frames.py",
    "cluster/test_security.py",
    "cluster/test_graphs_on.py",
    "sim/test_cluster_sim.py",
    "parity/test_overlap.py",
    "parity/test_graph_paths.py",
    "parity/test_graph_mechanisms.py",
    "parity/test_tree.py",
    "kernels/test_triton_kernels.py",
    "kernels/test_kernel_launches.py",
    "parity/test_graph_injected_bugs.py",
)


def relative_path(item: pytest.Item) -> str:
    """The test's file, relative to `tests/`; elsewhere its name."""
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else item.path.name


def is_of_cluster_tier(item: pytest.Item) -> bool:
    """Whether the test gets the marker `cluster`."""
    if item.get_closest_marker("smoke"):
        return False
    folder, _, name = relative_path(item).partition("/")
    is_second = folder in SECOND_FOLDERS and any(fnmatch(name, pattern) for pattern in SECOND)
    return folder in CLUSTER_FOLDERS or is_second or item.get_closest_marker("smollm2") is not None


def mark_tiers(items: list[pytest.Item]) -> None:
    """Adds the marker `cluster` where it belongs, and puts the slowest files first."""
    for item in items:
        if is_of_cluster_tier(item):
            item.add_marker("cluster")
    ranks = {path: rank for rank, path in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(relative_path(item), len(ranks)))


def tier_of(item: pytest.Item) -> str:
    """The first tier that runs the test; `mark_tiers` has seen it."""
    for marker, tier in (("gpu", GPU), ("slow", FULL), ("cluster", CLUSTER)):
        if item.get_closest_marker(marker):
            return tier
    return FAST


class Collector:
    """A plugin of pytest that counts the tests of each tier of each file."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.counts.setdefault(relative_path(item), Counter())[tier_of(item)] += 1


def table(counts: dict[str, Counter[str]]) -> str:
    """Markdown: the number of tests of each file in each tier."""
    lines = [f"| file | {' | '.join(f'`{tier}`' for tier in TIERS)} |", "|---" * (1 + len(TIERS)) + "|"]
    for path, of_file in sorted(counts.items()):
        lines.append(f"| {path} | {' | '.join(str(of_file[tier] or '') for tier in TIERS)} |")
    total = sum(counts.values(), Counter())
    return "\n".join([*lines, f"| all | {' | '.join(str(total[tier]) for tier in TIERS)} |"])


def main() -> int:
    """Prints the table; returns pytest's exit status when a file cannot be collected."""
    collector = Collector()
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main(
            [str(TESTS), "--collect-only", "-qq", "-p", "no:cacheprovider"], plugins=[collector]
        )
    print(table(collector.counts))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
