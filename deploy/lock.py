"""`python -m baton.deploy.lock`: requirements.lock and an SBOM from the exact versions in constraints.txt.

    python -m baton.deploy.lock hashes        ask the package index for the SHA-256 of every file of every pin
    python -m baton.deploy.lock sbom          a CycloneDX 1.6 document of the pins, with those hashes, on stdout

`pip install --require-hashes --no-deps -r requirements.lock` then takes no file that the index did not have when the lock
was made. Hashes come from the index's simple pages (PEP 503); `--index` names another index than PyPI, and each
`--also` one whose files are accepted too, such as PyTorch's index of CPU wheels.
"""

import argparse
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

from ..cluster.errors import BatonError, ConfigError
from .cli.command import run_command

ROOT = Path(__file__).resolve().parents[1]
PINS, LOCK = ROOT / "constraints.txt", ROOT / "requirements.lock"
PYPI = "https://pypi.org/simple"
TIMEOUT_S = 30.0
HEADER = (
    "# Exact versions with the SHA-256 of their files, made from constraints.txt by `make lock`.\n"
    "# pip install --require-hashes --no-deps -r requirements.lock\n"
)
LINE = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)\s*(?:;\s*(.+?))?\s*")


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One pin: normalised name, version, environment marker ("": always), and `sha256:...` of its files."""

    name: str
    version: str
    marker: str = ""
    hashes: tuple[str, ...] = field(default=())

    def as_line(self) -> str:
        """As pip reads it."""
        head = f"{self.name}=={self.version}" + (f"; {self.marker}" if self.marker else "")
        return " \\\n".join([head, *(f"    --hash={digest}" for digest in self.hashes)])


def normalised(name: str) -> str:
    """A distribution's name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(text: str) -> list[Requirement]:
    """The pins of a constraints or lock file. Raises ValueError for a line that is none."""
    found = []
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        pin, *options = line.partition("#")[0].split("--hash=")
        if not pin.strip():
            continue
        named = LINE.fullmatch(pin.strip())
        if named is None:
            raise ValueError(f"line {number}: {pin.strip()!r} is not a pin; write name==version")
        name, version, marker = named.groups()
        hashes = tuple(option.strip() for option in options)
        found.append(Requirement(name=normalised(name), version=version, marker=marker or "", hashes=hashes))
    return found


class _Links(HTMLParser):
    """The addresses of a simple page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def digests_of(page: str, requirement: Requirement) -> list[str]:
    """`sha256:...` of the files of one version that a simple page lists, local versions (2.13.0+cpu) included."""
    links = _Links()
    links.feed(page)
    found = []
    for link in links.found:
        path, _, fragment = link.partition("#")
        file = urllib.parse.unquote(path.rpartition("/")[2])
        if _is_of(file, requirement) and fragment.startswith("sha256="):
            found.append(fragment.replace("=", ":", 1))
    return sorted(set(found))


def _is_of(file: str, requirement: Requirement) -> bool:
    stem = file.removesuffix(".tar.gz").removesuffix(".zip")
    if file.endswith(".whl"):
        name, version = file.split("-")[:2]
    else:
        name, _, version = stem.rpartition("-")
    is_version = version == requirement.version or version.startswith(f"{requirement.version}+")
    return normalised(name) == requirement.name and is_version


def fetch_page(index: str, name: str) -> str:
    """The simple page of a distribution; "" when the index does not have it. Raises BatonError."""
    url = f"{index.rstrip('/')}/{name}/"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read()
            return body.decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise BatonError(f"{url} answered {error.code}; try again, or name another --index") from None
    except OSError as error:
        raise BatonError(
            f"{url} does not answer ({error}); check the network, or name another --index"
        ) from None


def locked(pins: Iterable[Requirement], indexes: Sequence[str]) -> list[Requirement]:
    """The pins with the hashes that the indexes know. Raises BatonError for one that none of them has."""
    found = []
    for pin in pins:
        digests = {digest for index in indexes for digest in digests_of(fetch_page(index, pin.name), pin)}
        if not digests:
            raise BatonError(
                f"no file of {pin.name} {pin.version} on {', '.join(indexes)}: correct constraints.txt"
            )
        found.append(replace(pin, hashes=tuple(sorted(digests))))
    return found


def sbom(pins: Iterable[Requirement]) -> dict[str, object]:
    """A CycloneDX 1.6 document; a pin for some environments only says so in a property."""
    components = []
    for pin in pins:
        component: dict[str, object] = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{pin.name}@{pin.version}",
            "name": pin.name,
            "version": pin.version,
            "purl": f"pkg:pypi/{pin.name}@{pin.version}",
        }
        if pin.marker:
            component["properties"] = [{"name": "python:marker", "value": pin.marker}]
        if pin.hashes:
            digests = [{"hashes": [{"alg": "SHA-256", "content": d.partition(":")[2]}]} for d in pin.hashes]
            component["externalReferences"] = [
                {"type": "distribution", "url": f"{PYPI}/{pin.name}/", **digest} for digest in digests
            ]
        components.append(component)
    application = {"type": "application", "name": "baton", "bom-ref": "baton"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": application},
        "components": components,
    }


def main(argv: Sequence[str]) -> int:
    """The command; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.deploy.lock", description="Pins, hashes and an SBOM."
    )
    parser.add_argument("what", choices=("hashes", "sbom"))
    parser.add_argument("--index", default=PYPI, help="package index to ask (default: %(default)s)")
    parser.add_argument(
        "--also", action="append", default=[], help="a further index whose files are accepted"
    )
    parser.add_argument("--lock", type=Path, default=LOCK, help="what the SBOM is of (default: %(default)s)")
    options = parser.parse_args(argv)
    return run_command(parser.prog, lambda: _run(options.what, options.lock, [options.index, *options.also]))


def _run(what: str, lock: Path, indexes: Sequence[str]) -> int:
    if what == "sbom":
        document = sbom(requirements(_text_of(lock)))
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    made = locked(requirements(PINS.read_text(encoding="utf-8")), indexes)
    LOCK.write_text(
        HEADER + "\n".join(requirement.as_line() for requirement in made) + "\n", encoding="utf-8"
    )
    sys.stdout.write(f"{LOCK.name}: {len(made)} pins, {sum(len(r.hashes) for r in made)} hashes\n")
    return 0


def _text_of(lock: Path) -> str:
    try:
        return lock.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--lock: {lock} cannot be read ({error.strerror}); name a lock file") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
