"""The markers of a test say which command runs it first."""

from pathlib import Path

import pytest
from baton.tests.meta.tiers import (
    CLUSTER,
    FAST,
    FULL,
    GPU,
    SECOND,
    SECOND_FOLDERS,
    SLOWEST,
    TESTS,
    Collector,
    mark_tiers,
    table,
    tier_of,
)


class Item:
    """What the rules see of a test."""

    def __init__(self, path: str, *markers: str) -> None:
        self.path, self.markers = TESTS / path, list(markers)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, name: str) -> None:
        self.markers.append(name)


@pytest.mark.parametrize(
    ("item", "tier"),
    [
        (Item("unit/test_a.py"), FAST),
        (Item("meta/kubernetes/test_a.py"), FAST),
        (Item("unit/test_a.py", "slow"), FULL),
        (Item("unit/test_a.py", "smollm2"), CLUSTER),
        (Item("cluster/test_a.py"), CLUSTER),
        (Item("faults/test_a.py"), CLUSTER),
        (Item("cluster/test_a.py", "slow"), FULL),
        (Item("cluster/test_a.py", "smoke", "smollm2"), FAST),
        (Item("gpu/test_a.py", "gpu"), GPU),
        (Item("unit/test_a.py", "cluster"), CLUSTER),
        (Item("parity/test_mtp_engines.py"), CLUSTER),
        (Item("parity/test_mtp.py", "smoke"), FAST),
        (Item("parity/test_graph_injected_bugs.py"), CLUSTER),
        (Item("sim/test_mutants.py"), CLUSTER),
        (Item("sim/test_deterministic_pair.py"), CLUSTER),
        (Item("parity/test_batch_invariance.py", "smoke"), FAST),
        (Item("parity/test_eagle3.py"), FAST),
        (Item("parity/test_every_drafter.py"), FAST),
        (Item("unit/engine/test_dflash.py"), FAST),
    ],
)
def test_folder_and_markers_give_the_tier(item, tier):
    mark_tiers([item])
    assert tier_of(item) == tier


def test_the_slowest_files_come_first_and_the_others_keep_their_order():
    names = ["unit/test_b.py", SLOWEST[1], "unit/test_a.py", SLOWEST[0]]
    items = [Item(name) for name in names]
    mark_tiers(items)
    assert [item.path for item in items] == [TESTS / names[i] for i in (3, 1, 0, 2)]


def test_every_file_that_is_named_slowest_exists():
    assert [path for path in SLOWEST if not (TESTS / path).is_file()] == []


@pytest.mark.parametrize("pattern", SECOND)
def test_every_pattern_of_the_second_tier_names_a_file(pattern):
    assert any(path for folder in SECOND_FOLDERS for path in (TESTS / folder).glob(pattern))


def test_the_makefile_selects_the_tiers_by_their_markers():
    makefile = (Path(TESTS).parent / "Makefile").read_text(encoding="utf-8")
    assert "-m 'not cluster and not slow and not gpu'" in makefile.partition("\ntest: ")[2]
    assert "-m 'cluster and not slow and not gpu'" in makefile.partition("\ntest-cluster: ")[2]


def test_the_table_counts_the_tests_of_each_file_and_tier():
    collector = Collector()
    items = [Item("unit/test_a.py"), Item("unit/test_a.py", "slow"), Item("cluster/test_b.py")]
    mark_tiers(items)
    collector.pytest_collection_finish(type("Session", (), {"items": items}))
    lines = table(collector.counts).splitlines()
    assert lines[2:] == [
        "| cluster/test_b.py |  | 1 |  |  |",
        "| unit/test_a.py | 1 |  | 1 |  |",
        "| all | 1 | 1 | 1 | 0 |",
    ]
