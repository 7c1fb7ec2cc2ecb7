"""Files that are costly to make: written once in a test run, and read by all of its processes."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


class SharedFiles:
    """Folders under `root`. A folder gets its name when it is whole: no process sees a part of it.

    Two processes may write the same folder at once; then the first one stays.
    """

    def __init__(self, root: Path) -> None:
        self._root = root / "shared"
        self._root.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"SharedFiles({self._root})"

    def folder(self, kind: str, key: str, write: Callable[[Path], object]) -> Path:
        """The folder of `kind` and `key`, made by `write(empty folder)` when missing; read-only."""
        path = self._root / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        if not path.exists():
            made = Path(tempfile.mkdtemp(dir=self._root))
            try:
                write(made)
                made.rename(path)
            except OSError:
                if not path.exists():
                    raise
            finally:
                shutil.rmtree(made, ignore_errors=True)
        return path
