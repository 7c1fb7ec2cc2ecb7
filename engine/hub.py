"""Finds the directory of a checkpoint, downloading it from the hub when it is named by a hub id.

Imports no torch, since `baton up` downloads before its workers start.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from .errors import CheckpointError

NGRAM = "ngram"  # as a draft: lookup in the request's own tokens, without a checkpoint
FILES = ("*.json", "*.safetensors", "*.model", "*.jinja")


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form owner/name and is no directory."""
    path = Path(model).expanduser()
    return not (path.is_dir() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1)


def resolve_checkpoint(model: str) -> Path:
    """The directory of a checkpoint.

    A name that is no directory is a hub id, downloaded or found in the hub's cache. Downloads show a progress
    bar on a terminal.

    Raises CheckpointError if `model` is neither, or the download fails.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(model):
        raise CheckpointError(f"model {model!r} is neither a directory nor a hub id (owner/name)")
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except Exception as error:
        raise CheckpointError(
            f"model {model!r} could not be fetched from the hub ({_reason_of(error)}); {_remedy_of(error)}"
        ) from error


def _reason_of(error: Exception) -> str:
    """The first line of the error's text, else the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _remedy_of(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "ask for access on the model's page and set HF_TOKEN, or name a directory"
    if isinstance(error, RepositoryNotFoundError):
        return "correct the id, set HF_TOKEN for a private model, or name a directory"
    return "name a directory"
