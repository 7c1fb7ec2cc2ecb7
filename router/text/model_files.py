"""Finds the files of a model that the router reads: tokenizer, chat template and settings, but no weights."""

from pathlib import Path

from huggingface_hub import is_offline_mode, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ...cluster.errors import ConfigError, StartupError

FILES = ("*.json", "*.model", "*.jinja")
NOT_READ = ("*.safetensors.index.json",)


def model_directory(model: str) -> Path:
    """The directory of a model: `model` itself, or for a hub id (owner/name) that of its files in the hub's
    cache, into which they are downloaded once.

    Raises ConfigError for a name that is neither, StartupError in one line where the hub is not reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigError(f"--model {model!r} is neither a directory nor a hub id (owner/name)")
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES), ignore_patterns=list(NOT_READ)))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")[:200]
        if isinstance(error, LocalEntryNotFoundError) and is_offline_mode():
            reason = "it is not in the cache, and HF_HUB_OFFLINE is set"
        raise StartupError(
            f"--model {model!r} could not be fetched from the hub ({reason}); name a directory"
        ) from error
