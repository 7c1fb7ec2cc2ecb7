"""The release of this package."""

import importlib.metadata

from ..distribution import DISTRIBUTION


def release() -> str:
    """The version of the installed distribution; "unknown" where none is installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
