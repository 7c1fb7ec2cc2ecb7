"""The wheel and the source distribution: what they hold, and `baton demo` from the wheel alone.

The venv has the wheel only. A line in a `.pth` file lends it the packages of this environment, so that torch
is not installed again. baton itself comes from the wheel, since such a line finds no editable install.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import baton
import pytest
from baton.cluster.distribution import DISTRIBUTION
from baton.tests.lock_files import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STEM = DISTRIBUTION.replace("-", "_")
VERSION = baton.__version__
BUILD_S, DEMO_S = 180, 240
NOT_DATA = {".py", ".pyc", ".md"}


def run(*command, timeout=BUILD_S, **more):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=timeout, check=False, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The tracked files, as a checkout has them: builds write into their tree."""
    tree = tmp_path_factory.mktemp("source")
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def archives(source, tmp_path_factory):
    """(wheel, source distribution); the wheel is built from the latter, as PyPI's readers would."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", out, source)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def names(archives):
    """The files of the package in the wheel, relative to it."""
    files = zipfile.ZipFile(archives[0]).namelist()
    return {name.removeprefix("baton/") for name in files if name.startswith("baton/")}


def test_the_wheel_has_every_module_and_data_file_and_no_test(archives, names):
    packages = PROJECT["tool"]["setuptools"]["packages"]
    folders = [name.removeprefix("baton").lstrip(".").replace(".", "/") for name in packages]
    modules = {
        path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).glob("*.py")
    }
    data = {
        path.relative_to(ROOT).as_posix()
        for top in ("bench", "deploy", "router", "assets")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix not in NOT_DATA
    }
    assert {"router/endpoints/page/index.html", "bench/serve/mixes.json"} <= data
    assert any(name.startswith("deploy/packaging/grafana/") for name in data)
    assert modules | data == names
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(archives[0]).namelist()}
    assert tops == {"baton", f"{STEM}-{VERSION}.dist-info"}


def test_the_page_on_the_index_has_no_link_into_the_repository(archives):
    wheel = zipfile.ZipFile(archives[0])
    told = Parser().parsestr(wheel.read(f"{STEM}-{VERSION}.dist-info/METADATA").decode())
    page = told.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"pip install {DISTRIBUTION}" in page
    assert "Topic :: Scientific/Engineering :: Artificial Intelligence" in told.get_all("Classifier")
    figures = {line for line in page.splitlines() if re.match(r"\| \d", line)}
    assert figures
    assert figures <= set((ROOT / "README.md").read_text().splitlines())


def test_the_source_distribution_has_documents_and_no_test(archives):
    with tarfile.open(archives[1]) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "constraints.txt"}
    assert wanted | {"docs/running.md", "examples/README.md"} <= files
    assert not [name for name in files if name.startswith("tests/")]


@pytest.mark.smollm2
def test_the_demo_runs_from_the_wheel_alone(archives, smollm2_dir, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--offline", "--no-deps"]
    run(*install, f"--python={python}", archives[0])
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text("".join(f"{folder}\n" for folder in lenders()))
    bare = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    where = run(python, "-c", "import baton; print(baton.__file__)", cwd=tmp_path, env=bare)
    assert where.startswith(str(packages))
    doctor = [python, "-m", "baton", "doctor", "--json"]  # ends with 1 where this host has faults
    found = json.loads(
        subprocess.run(doctor, capture_output=True, cwd=tmp_path, env=bare, check=False).stdout
    )
    assert [one["level"] for one in found if one["check"] == "versions"] == ["ok"]
    answer = run(home / "bin" / "baton", "demo", "--once", "--port=0", timeout=DEMO_S, cwd=tmp_path, env=bare)
    assert "the road of this request" in answer
    assert re.search(r"[1-9]\d* of \d+ drafted tokens accepted", answer), "the head of the wheel drafts"
    assert str(ROOT) not in answer


def lenders():
    """The folders of this environment that have its packages."""
    found = {str(Path(importlib.metadata.distribution(name).locate_file(""))) for name in ("torch", "pyzmq")}
    return sorted(found)
