"""The progress of a download from the hub, in bytes."""

import io
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

from ...cluster.process.progress import JobProgress

BYTES, WRITTEN = "B", "Reconstructing"  # unit and first word of the hub's bar of bytes that are on disk


def download_bar(name: str, progress: JobProgress) -> type[Any]:
    """A class for the hub's progress bars. `progress` shows the bytes of the model `name`, from the first one
    on; a model that is in the cache shows nothing."""
    has_begun = [False]

    class DownloadBar(tqdm):  # type: ignore[misc,unused-ignore]
        """Shows nothing itself."""

        def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401
            super().__init__(*args, **{**settings, "file": io.StringIO(), "disable": False})
            self._is_counted = settings.get("unit") == BYTES and str(settings.get("desc")).startswith(WRITTEN)

        def update(self, n: float | None = 1) -> bool | None:
            changed: bool | None = super().update(n)
            if self._is_counted and self.total:
                if not has_begun[0]:
                    progress.begin(f"downloading {name}")
                    has_begun[0] = True
                progress.show(self.n / self.total, f"{self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")
            return changed

    return DownloadBar
