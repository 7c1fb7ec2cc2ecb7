"""docs/mechanisms.md names tests that exist, for every numbered law."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAWS = {1: 8, 2: 9, 3: 6, 4: 7, 5: 6}


def rows() -> dict[str, list[str]]:
    """Law number -> what its row names in back-ticks."""
    text = (ROOT / "docs/mechanisms.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (M\d\.\d) \|.*\|(.*)\|$", text, flags=re.MULTILINE)
    return {law: re.findall(r"`([^`]+)`", tests) for law, tests in found}


def test_every_law_has_a_row_with_tests():
    assert list(rows()) == [f"M{part}.{n}" for part, count in LAWS.items() for n in range(1, count + 1)]
    assert [law for law, tests in rows().items() if not tests] == []


def test_every_named_test_exists():
    missing = []
    for law, tests in rows().items():
        for name in tests:
            file, _, function = name.partition("::")
            path = ROOT / "tests" / file
            functions = {
                n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)
            }
            if function not in functions:
                missing.append((law, name))
    assert missing == []
