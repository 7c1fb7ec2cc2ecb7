"""The files of the package and of its tests with their syntax trees, and where each stands in the house."""

import ast
import functools
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One imported module: `baton.cluster.errors`, `torch.nn`, or the names after `from . import`."""

    module: str
    names: tuple[str, ...]
    level: int
    line: int


class Source:
    """One file of the package with its place in the house."""

    def __init__(self, relative: str, text: str) -> None:
        self.relative, self.text = relative, text
        self.tree = ast.parse(text, relative)
        parts = Path(relative).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.module = ".".join(("baton", *(parts[:-1] if self.is_package else parts)))
        self.folder = parts[0] if len(parts) > 1 else ""  # empty: the root

    def imports(self) -> Iterator[Import]:
        """Every import, wherever it stands (TYPE_CHECKING is no excuse); relative ones resolved."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, (), 0, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                names = tuple(alias.name for alias in node.names)
                yield Import(self._resolve(node), names, node.level, node.lineno)

    def _resolve(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = self.module.split(".") if self.is_package else self.module.split(".")[:-1]
        base = base[: len(base) - (node.level - 1)]
        return ".".join([*base, *((node.module,) if node.module else ())])

    def own_targets(self, known: set[str]) -> Iterator[tuple[str, int]]:
        """Our modules that this file imports, with the line; `from . import x` means x if x is a module."""
        for found in self.imports():
            if found.module == "baton" or found.module.startswith("baton."):
                submodules = [f"{found.module}.{name}" for name in found.names]
                for target in [name for name in submodules if name in known] or [found.module]:
                    yield target, found.line


@functools.cache
def package_files(*, naming: str = "") -> list[Source]:
    """All code files: of the root and of every folder but tests, examples, hidden folders and builds.

    With `naming` those whose text has this word.
    """
    skipped = {"tests", "build", "dist", "examples"}
    paths = [*ROOT.glob("*.py")]
    for folder in ROOT.iterdir():
        if folder.is_dir() and folder.name not in skipped and not folder.name.startswith((".", "__")):
            paths += folder.rglob("*.py")
    return _sources(paths, naming)


@functools.cache
def files_of_tests() -> list[Source]:
    return _sources((ROOT / "tests").rglob("*.py"))


def forget() -> None:
    """Frees the trees."""
    package_files.cache_clear()
    files_of_tests.cache_clear()


def _sources(paths: Iterable[Path], naming: str = "") -> list[Source]:
    texts = ((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in sorted(paths))
    gc.disable()  # millions of nodes, none of which is garbage: the search for some takes half of the time
    try:
        return [Source(relative, text) for relative, text in texts if naming in text]
    finally:
        gc.enable()
