"""Keeps what a start has found out beside the compiled kernels: the planned kernel variants of an engine, and
that its graphs have passed their self-test.

Either takes seconds, and depends only on the configuration, the model's config, the device with its driver,
the libraries and this source. A second start reads it instead.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ...kernels.launch_plan import decode_launches, encode_launches
from ...kernels.triton_jit import Launch

logger = logging.getLogger(__name__)

SOURCES = ("engine", "kernels")  # the packages whose code decides which kernels are launched
PLAN, VERDICT = "plan-", "graphs-tested-"  # how their files' names begin
KEPT = 32  # plans, and verdicts, in a folder; those that were used last stay


def plan_key(parts: Sequence[object], root: Path | None = None) -> str:
    """The name of a plan: a hash of the texts of `parts` and of the source below `root`, by default this
    package's.
    """
    found = hashlib.sha256()
    base = root or Path(__file__).parents[2]
    for path in sorted(path for name in SOURCES for path in (base / name).rglob("*.py")):
        found.update(str(path.relative_to(base)).encode() + b"\0" + path.read_bytes() + b"\0")
    for part in parts:
        found.update(str(part).encode() + b"\0")
    return found.hexdigest()[:32]


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the driver, which replays graphs, as the driver words it; "" if it is not known."""
    try:
        return path.read_text()
    except OSError:
        return ""


def kept_launches(
    folder: Path | None,
    key: str,
    plan: Callable[[], list[Launch]],
    clock: Callable[[], float] = time.monotonic,
) -> list[Launch]:
    """The launches that `folder` keeps under `key`, else those of `plan`, which it keeps from then on.

    Without a folder nothing is kept. A file that cannot be read is replaced, and one that cannot be written
    is left out. A new file removes all but the KEPT that were used last. Raises the errors of `plan`.
    """
    path = None if folder is None else folder / f"{PLAN}{key}.json"
    if path is not None and path.exists():
        try:
            launches = decode_launches(path.read_text())
            _note_use(path)
            return launches
        except (OSError, ValueError) as error:
            logger.warning("planned kernels are planned again: %s: %s", path, error)
    started = clock()
    launches = plan()
    logger.info("a dry run found %d kernel variants in %.1f s", len(launches), clock() - started)
    if path is not None:
        try:
            _write(path, encode_launches(launches))
            _remove_unused(path.parent, PLAN)
        except (OSError, TypeError) as error:
            logger.warning("planned kernels are not kept: %s: %s", path, error)
    return launches


def were_tested(folder: Path | None, key: str) -> bool:
    """Whether all graphs of an engine of this key have passed their self-test before."""
    if folder is None or not _verdict(folder, key).exists():
        return False
    _note_use(_verdict(folder, key))
    return True


def keep_verdict(folder: Path | None, key: str, *, has_passed: bool) -> None:
    """Keeps the result of a self-test for `were_tested`. A folder that cannot be written is left as it is."""
    if folder is None:
        return
    try:
        if has_passed:
            _write(_verdict(folder, key), "")
            _remove_unused(folder, VERDICT)
        else:
            _verdict(folder, key).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the self-test of graphs is not kept: %s: %s", folder, error)


def _verdict(folder: Path, key: str) -> Path:
    return folder / f"{VERDICT}{key}"


def _write(path: Path, text: str) -> None:
    """Writes a file whole, or not at all: workers of one host may write the same one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def _note_use(path: Path) -> None:
    with suppress(OSError):  # a folder that only its owner may write to
        os.utime(path)


def _remove_unused(folder: Path, prefix: str) -> None:
    """Removes the files of a prefix, and parts of interrupted writes, that were used least recently."""
    used: list[tuple[int, Path]] = []
    for path in folder.glob(f"{prefix}*"):
        with suppress(FileNotFoundError):  # another worker removes the same ones
            used.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(used, reverse=True)[KEPT:]:
        path.unlink(missing_ok=True)
