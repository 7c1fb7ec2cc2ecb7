"""Finds the directory of a checkpoint, downloading it from the hub when it is named by a hub id.

Imports no torch, since `baton up` downloads before its workers start.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from .errors import CheckpointError, UnknownCheckpoint

NGRAM = "ngram"  # as a draft: lookup in the request's own tokens, without a checkpoint
FILES = ("*.json", "*.safetensors", "*.model", "*.jinja")
NOT_READ = ("consolidated*.safetensors", "original/*")  # the same weights in the format of their authors


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form owner/name and is no directory."""
    path = Path(model).expanduser()
    return not (path.is_dir() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1)


def resolve_checkpoint(name: str, setting: str = "--model", bar: type[Any] | None = None) -> Path:
    """The directory of a checkpoint.

    A name that is no directory is a hub id, downloaded or found in the hub's cache. Downloads show `bar`, a
    class like tqdm, by default the hub's own on a terminal.

    Raises UnknownCheckpoint if `name` is neither, and CheckpointError if the download fails. Both name
    `setting`, which gave the name.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(name):
        raise UnknownCheckpoint(f"{setting} {name!r} is neither a directory nor a hub id (owner/name)")
    try:
        return _snapshot(name, bar)
    except Exception as error:
        raise CheckpointError(
            f"{setting} {name!r} could not be fetched from the hub ({_reason_of(error)}); {_remedy_of(error)}"
        ) from error


def kept_checkpoint(name: str) -> Path | None:
    """The directory of a checkpoint that is on this host, without asking the hub; None if it is not."""
    path = Path(name).expanduser()
    if path.is_dir() or not is_hub_id(name):
        return path if path.is_dir() else None
    try:
        return _snapshot(name, is_kept=True)
    except LocalEntryNotFoundError:
        return None


def _snapshot(name: str, bar: type[Any] | None = None, *, is_kept: bool = False) -> Path:
    """The directory with those files of a hub id that are read. `is_kept`: the hub is not asked."""
    found = snapshot_download(
        name,
        allow_patterns=list(FILES),
        ignore_patterns=list(NOT_READ),
        tqdm_class=bar,
        local_files_only=is_kept,
    )
    return Path(found)


def _reason_of(error: Exception) -> str:
    """The first line of the error's text, else the name of its class."""
    if isinstance(error, LocalEntryNotFoundError) and is_offline_mode():
        return "it is not in the cache, and HF_HUB_OFFLINE is set"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")[:200]


def _remedy_of(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "ask for access on the model's page and set HF_TOKEN, or name a directory"
    if isinstance(error, RepositoryNotFoundError):
        return "correct the id, set HF_TOKEN for a private model, or name a directory"
    return "name a directory"
