"""Typed access to the config.json of a checkpoint, without torch: `baton plan` reads it, too."""

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError


class ConfigReader:
    """Typed access to a parsed config.json. Every error names the file, the key, the value and the remedy."""

    def __init__(self, raw: Mapping[str, object], source: Path) -> None:
        self.raw = raw
        self.source = source

    def error(self, key: str, remedy: str) -> CheckpointError:
        """The error for the value of `key`."""
        return CheckpointError(f"{self.source}: {key} = {self.raw.get(key)!r}: {remedy}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer. `default` replaces an absent or null key; with None, the key is required."""
        value = self.raw.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a positive integer is required here; check that the file is complete")
        return value

    def number(self, key: str, default: float) -> float:
        """A number; `default` replaces an absent or null key."""
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number is required here")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; `default` replaces an absent or null key."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false is required here")
        return value


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`.

    Raises CheckpointError, naming the file, if it is missing, malformed or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; give the directory of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}); give the directory of a Hugging Face "
            "checkpoint"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a {type(value).__name__}, not a JSON object; fetch the file again"
        )
    return value
