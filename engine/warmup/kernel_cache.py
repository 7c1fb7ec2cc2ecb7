"""The folder in which compiled kernels outlive the process: a second start reads them from it."""

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "TRITON_CACHE_DIR"


def use_kernel_cache(environ: MutableMapping[str, str] = os.environ) -> Path | None:
    """Makes Triton keep compiled kernels in `$XDG_CACHE_HOME/baton/kernels` (`~/.cache/baton/kernels`).

    All workers of a user share the folder; Triton replaces files atomically. TRITON_CACHE_DIR wins, if set.
    The folder is only for its owner, because its binaries are loaded. Returns the folder; None if it cannot
    be written, and then Triton's own default holds.
    """
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    base = environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "baton" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        logger.warning("kernels are not kept in %s: %s; set %s to a folder", folder, error, VARIABLE)
        return None
    if owner != os.getuid() or not os.access(folder, os.W_OK | os.X_OK):
        logger.warning("kernels are not kept in %s, which belongs to another user; set %s", folder, VARIABLE)
        return None
    environ[VARIABLE] = str(folder)
    return folder
