"""docs/mechanisms.md and docs/drafters-tests.md name tests that exist, for every law and every drafter."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAWS = {1: 8, 2: 9, 3: 6, 4: 7, 5: 6}
DRAFTER_LAWS = ("formulas", "oracle", "law", "KV", "mistakes")


def rows() -> dict[str, list[str]]:
    """Law number -> what its row names in back-ticks."""
    text = (ROOT / "docs/mechanisms.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (M\d\.\d) \|.*\|(.*)\|$", text, flags=re.MULTILINE)
    return {law: re.findall(r"`([^`]+)`", tests) for law, tests in found}


def test_every_law_has_a_row_with_tests():
    assert list(rows()) == [f"M{part}.{n}" for part, count in LAWS.items() for n in range(1, count + 1)]
    assert [law for law, tests in rows().items() if not tests] == []


def drafter_rows() -> dict[tuple[str, str], list[str]]:
    """(drafter, law) -> what its row names in back-ticks; the drafter is empty for laws of all."""
    text = (ROOT / "docs/drafters-tests.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| ([^|]+) \|(?: ([^|]+) \|)? (`.+`) \|$", text, flags=re.MULTILINE)
    return {
        (first if second else "", second or first): re.findall(r"`([^`]+)`", tests)
        for first, second, tests in found
    }


def test_every_drafter_has_a_row_for_each_law():
    rows = [(drafter, law.partition(":")[0]) for drafter, law in drafter_rows() if drafter]
    drafters = dict.fromkeys(drafter for drafter, _ in rows)
    assert len(drafters) == 7
    wanted = [(drafter, law) for drafter in drafters for law in DRAFTER_LAWS]
    assert rows == [row for row in wanted if row != ("lookup", "KV")], "lookup has no KV"
    assert len(drafter_rows()) - len(rows) == 9, "laws of all drafters"


def missing(name: str) -> bool:
    """Whether the test that is named "file::function" does not exist."""
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return function not in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_every_named_test_exists():
    named = [*rows().items(), *drafter_rows().items()]
    assert [(law, name) for law, tests in named for name in tests if missing(name)] == []
