"""`python -m baton.deploy.image_locks DEVICE`: deploy/packaging/images/DEVICE.lock, what the container image of a device installs.

requirements.lock has every file of every pin, tests included; an image needs one wheel of each distribution that serving
needs. pip itself says which, for the image's Python and C library and not for those of this machine, without installing
anything (`pip install --dry-run --report`, a stable format of pip's). Versions are those of constraints.txt; what that file
does not name, NVIDIA's libraries, is pinned exactly by torch. torch for CPUs is not on PyPI: name its index with --also, or
a folder that has the wheel with --find-links.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ..cluster.errors import BatonError
from .cli.command import run_command
from .lock import PINS, PYPI, ROOT, normalised
from .lock import Requirement as Pin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

IMAGES = ROOT / "deploy" / "packaging" / "images"
DEVICES = ("cpu", "cuda")
EXTRAS = ("otel",)
UNUSED = {"cpu": ("triton",), "cuda": ()}  # kernels of which the CPU path has none: 700 MB unpacked
PYTHON = "3.11"  # of the images' base
NEWEST_GLIBC = 36  # minor version, of the images' base: Debian 12
HEADER = (
    "# The wheels of the image for {device}, Python {python} on Linux x86_64, made from constraints.txt by `make lock`.\n"
    "# pip install --require-hashes --no-deps --only-binary=:all: -r {device}.lock\n"
)


def wanted(pyproject: Mapping[str, Any], device: str) -> list[str]:
    """What the image of a device has: what baton needs to serve there, and to export traces."""
    project = pyproject["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in EXTRAS for line in project["optional-dependencies"][extra]),
    ]
    return [line for line in lines if normalised(Requirement(line).name) not in UNUSED[device]]


def pip_arguments(requirements: Path, report: Path, options: argparse.Namespace) -> list[str]:
    """pip's words for: resolve for the image's platform, install nothing, tell what it would be."""
    tag = "cp" + PYTHON.replace(".", "")
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "any"]
    words = [
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--only-binary=:all:",
        "--target",
        str(report.parent),
    ]
    words += [
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
        "--abi",
        tag,
        "--abi",
        "abi3",
        "--abi",
        "none",
    ]
    words += [word for platform in platforms for word in ("--platform", platform)]
    words += ["--constraint", str(PINS), "--requirement", str(requirements), "--report", str(report)]
    words += ["--index-url", options.index]
    words += [word for index in options.also for word in ("--extra-index-url", index)]
    return [*words, *(word for folder in options.find_links for word in ("--find-links", folder))]


def locked(report: Mapping[str, Any]) -> list[Pin]:
    """The pins of pip's report, sorted, each with the digest of its one wheel. Raises BatonError for one without."""
    found = []
    for item in report["install"]:
        name, version = normalised(item["metadata"]["name"]), item["metadata"]["version"]
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            raise BatonError(f"pip names no SHA-256 for {name} {version}; take it from an index")
        found.append(Pin(name=name, version=version, hashes=(f"sha256:{digest}",)))
    return sorted(found, key=lambda pin: pin.name)


def main(argv: Sequence[str]) -> int:
    """The command; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.deploy.image_locks", description="Pins of an image."
    )
    parser.add_argument("device", choices=DEVICES)
    parser.add_argument("--index", default=PYPI, help="package index to ask (default: %(default)s)")
    parser.add_argument("--also", action="append", default=[], help="a further index")
    parser.add_argument("--find-links", action="append", default=[], metavar="DIR", help="a folder of wheels")
    options = parser.parse_args(argv)
    return run_command(parser.prog, lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        requirements, report = Path(folder) / "requirements.txt", Path(folder) / "report.json"
        requirements.write_text("\n".join(wanted(pyproject, options.device)) + "\n", encoding="utf-8")
        # what this machine's own settings add is not what the image will find
        ours = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        command = [sys.executable, "-m", "pip", *pip_arguments(requirements, report, options)]
        if subprocess.run(command, env={**os.environ, **ours}, check=False).returncode != 0:
            raise BatonError("pip found no set of wheels; what it says stands above")
        made = locked(json.loads(report.read_text(encoding="utf-8")))
    _check_torch(options.device, made)
    path = IMAGES / f"{options.device}.lock"
    head = HEADER.format(device=options.device, python=PYTHON)
    path.write_text(head + "\n".join(pin.as_line() for pin in made) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path.name}: {len(made)} wheels\n")
    return 0


def _check_torch(device: str, made: Sequence[Pin]) -> None:
    """The build of torch decides what an image can do; the wrong one would be noticed at the first request."""
    torch = next(pin.version for pin in made if pin.name == "torch")
    if torch.endswith("+cpu") != (device == "cpu"):
        remedy = "name its index with --also" if device == "cpu" else "leave --also and --find-links out"
        raise BatonError(f"torch {torch} is not of an image for {device}; {remedy}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
