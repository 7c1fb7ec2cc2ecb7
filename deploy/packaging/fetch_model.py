"""Downloads checkpoints into a volume, and waits for them: what the pods of the Helm chart run.

    python -m baton.deploy.packaging.fetch_model download org/model@main=/models/model
    python -m baton.deploy.packaging.fetch_model wait org/model@main=/models/model

A download that was interrupted continues. When it is whole, a file in the directory names what is there, so
that a directory with another checkpoint counts as missing.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from ...cluster.errors import BatonError, ConfigError, StartupError
from ...cluster.process.process import EXIT_CANNOT_START, EXIT_OK, EXIT_USAGE
from ...engine.hub import FILES, NOT_READ

PROG = "fetch_model"
MARK = ".baton-checkpoint"  # names the checkpoint of its directory
POLL_S = 2.0  # between looks at the mark
POLLS_A_LINE = 15


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint of the hub, and the directory that it belongs in."""

    repository: str
    revision: str
    directory: Path

    @classmethod
    def parsed(cls, text: str) -> "Checkpoint":
        """The checkpoint that REPOSITORY@REVISION=DIRECTORY means. Raises ConfigError."""
        name, _, directory = text.partition("=")
        repository, _, revision = name.partition("@")
        if repository.count("/") != 1 or not directory:
            raise ConfigError(f"{text!r} is not OWNER/NAME@REVISION=DIRECTORY")
        return cls(repository=repository, revision=revision or "main", directory=Path(directory))

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"

    @property
    def is_whole(self) -> bool:
        """Whether the directory has this checkpoint."""
        try:
            return (self.directory / MARK).read_text(encoding="utf-8") == str(self)
        except OSError:
            return False

    def download(self) -> None:
        """Raises StartupError when the hub or the disk does not let it."""
        try:
            (self.directory / MARK).unlink(missing_ok=True)
            snapshot_download(
                self.repository,
                revision=self.revision,
                local_dir=self.directory,
                allow_patterns=list(FILES),
                ignore_patterns=list(NOT_READ),
            )
            (self.directory / MARK).write_text(str(self), encoding="utf-8")
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise StartupError(
                f"{self} could not be downloaded to {self.directory} ({reason}); check the id, the token and "
                "the network policy, or fill the volume by hand"
            ) from error


def main(argv: Sequence[str]) -> int:
    """Downloads the checkpoints that `argv` names, or waits for them. Returns the exit code."""
    try:
        if not argv or argv[0] not in ("download", "wait"):
            raise ConfigError("write download or wait, then OWNER/NAME@REVISION=DIRECTORY")
        checkpoints = [Checkpoint.parsed(text) for text in argv[1:]]
        if argv[0] == "download":
            for checkpoint in checkpoints:
                download(checkpoint)
        else:
            wait(checkpoints)
    except BatonError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_CANNOT_START
    return EXIT_OK


def download(checkpoint: Checkpoint) -> None:
    """Downloads a checkpoint that is not whole. Raises StartupError."""
    if checkpoint.is_whole:
        tell(f"{checkpoint} is in {checkpoint.directory}")
        return
    tell(f"downloading {checkpoint} to {checkpoint.directory}")
    began = time.monotonic()
    checkpoint.download()
    size = sum(path.stat().st_size for path in checkpoint.directory.rglob("*") if path.is_file())
    tell(f"downloaded {size / 1e9:.2f} GB in {time.monotonic() - began:.0f} s")


def wait(checkpoints: Sequence[Checkpoint], sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when all checkpoints are whole."""
    num_polls = 0
    while missing := [str(checkpoint) for checkpoint in checkpoints if not checkpoint.is_whole]:
        if num_polls % POLLS_A_LINE == 0:
            tell(f"waiting for {', '.join(missing)}: the Job of the chart downloads it")
        sleep(POLL_S)
        num_polls += 1
    tell("the model is there")


def tell(text: str) -> None:
    """Writes a line of progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
