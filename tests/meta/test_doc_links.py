"""Every link between pages leads to a file that exists, and to a heading of it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for folder in (ROOT, *(ROOT / name for name in (".github", "assets", "deploy", "docs", "examples")))
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The names of a page's headings as GitHub makes them: letters, digits, hyphens; spaces as hyphens."""
    found = set()
    for heading in re.findall(r"^#{1,6} +(.*)$", prose(path), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", shown).replace(" ", "-"))
    return found


def broken(path: Path, text: str) -> list[str]:
    """The links in `text`, the prose of the page at `path`, that lead nowhere."""
    found = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue  # of the web, which no test asks
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


def test_there_are_pages_with_links():
    assert len(PAGES) > 25
    assert sum(len(LINK.findall(prose(path))) for path in PAGES) > 150


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(path: Path):
    assert broken(path, prose(path)) == []


def test_links_that_lead_nowhere_are_found():
    page = ROOT / "docs" / "gpu.md"
    wrong = ["nowhere.md", "benchmarks.md#no-such-heading", "#memory-of-a-mouse"]
    right = ["benchmarks.md#one-gpu", "#memory", "../README.md", "https://example.com/#any"]
    assert broken(page, " ".join(f"[x]({link})" for link in wrong + right)) == wrong
