"""Reads pins: constraints.txt and the lock files that `make lock` writes."""

from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PINS, LOCK = ROOT / "constraints.txt", ROOT / "requirements.lock"
IMAGES = ROOT / "deploy" / "packaging" / "images"


@dataclass(frozen=True)
class Pin:
    """One line: normalised name, version, environment marker ("": always), `sha256:...` of accepted files."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


def pins_of(path):
    """The pins of a constraints or lock file. Raises ValueError for a line that is no exact pin."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines(), 1):
        text, *hashes = line.partition("#")[0].split("--hash=")
        if not text.strip():
            continue
        wanted = Requirement(text.strip())
        versions = [part.version for part in wanted.specifier if part.operator == "=="]
        if wanted.url or len(versions) != 1 or len(wanted.specifier) != 1 or versions[0].endswith("*"):
            raise ValueError(f"line {number}: {text.strip()!r} is not a pin; write name==version")
        # uv writes the same condition in other words
        marker = str(wanted.marker or "").replace("python_full_version", "python_version")
        marker = marker.replace('platform_system == "Linux"', 'sys_platform == "linux"')
        marker = " and ".join(sorted(marker.split(" and ")))
        name = canonicalize_name(wanted.name)
        found.append(Pin(name, versions[0], marker, tuple(digest.strip() for digest in hashes)))
    return found
