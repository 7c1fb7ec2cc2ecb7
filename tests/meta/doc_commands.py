"""The commands of the pages for users, by section, with the machine that each section names.

A section with commands says `Runs on: ...` in a paragraph of its own. tests/cluster/test_documents.py runs
the sections that need no GPU.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = (
    "quickstart", "models", "gpu", "drafters", "tuning", "runbook", "architecture", "faq", "compare",
)  # fmt: skip
PROGRAMS = (
    "baton", "curl", "docker", "helm", "journalctl", "kubectl", "make", "nvidia-smi", "pip", "systemctl",
)  # fmt: skip
HERE = ("Linux without a GPU", "any machine")  # beginnings of marks whose sections every machine can run


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a page. `mark` is the text behind `Runs on:`, empty without one."""

    page: str
    title: str
    mark: str
    blocks: tuple[str, ...]

    @property
    def runs_here(self) -> bool:
        return self.mark.startswith(HERE)

    def __str__(self) -> str:
        return f"{self.page}: {self.title}"


def sections(page: str) -> list[Section]:
    """The sections of docs/`page`.md that have commands."""
    found = []
    for part in re.split(r"^## ", (DOCS / f"{page}.md").read_text(), flags=re.MULTILINE):
        title, _, text = part.partition("\n")
        mark = re.search(r"^Runs on: (.+?)\.$", text, re.MULTILINE)
        blocks = tuple(block for block in _blocks(text) if _begins_with_program(block))
        if blocks:
            found.append(
                Section(page=page, title=title.strip("# "), mark=mark.group(1) if mark else "", blocks=blocks)
            )
    return found


def baton_calls(page: str) -> list[list[str]]:
    """The words of every call of `baton` on a page, in blocks and between backticks."""
    text = (DOCS / f"{page}.md").read_text()
    inline = [code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith("baton ")]
    lines = [line for section in sections(page) for block in section.blocks for line in block.splitlines()]
    calls = inline + [line.strip() for line in lines if line.strip().startswith("baton ")]
    return [shlex.split(call, comments=True) for call in calls]


def _blocks(text: str) -> list[str]:
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^    \S.*\n(?:^(?:    .*)?\n)*)+", rest + "\n", re.MULTILINE)
    return fenced + [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in indented]


def _begins_with_program(block: str) -> bool:
    return block.split(maxsplit=1)[0] in PROGRAMS
