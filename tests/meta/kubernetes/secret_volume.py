"""A mounted Secret as kubelet keeps it: names that point through `..data` at a folder, exchanged as a whole.

After pkg/volume/util/atomic_writer.go: a new folder is written, `..data` is renamed over, the old folder
goes. The names that a program opens never change themselves.
"""

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


class SecretVolume:
    """Mounted at `path`, empty until it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turns = itertools.count()
        path.mkdir()

    def write(self, content: Mapping[str, bytes]) -> None:
        """The Secret has this content now."""
        data = self.path / "..data"
        before = data.resolve()
        folder = self.path / f"..2026_11_22_00_00_00.{next(self._turns)}"
        folder.mkdir()
        for name, value in content.items():
            (folder / name).write_bytes(value)
            (folder / name).chmod(0o440)
        beside = self.path / "..data_tmp"
        beside.symlink_to(folder.name)
        os.replace(beside, data)
        for name in content:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        if before != data:
            shutil.rmtree(before)
