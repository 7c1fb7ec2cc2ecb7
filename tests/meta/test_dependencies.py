"""Every dependency that serving needs was reviewed: none that reads peers' bytes turns them into code."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from baton.cluster.distribution import DISTRIBUTION
from baton.tests.lock_files import LOCK, PINS, pins_of
from baton.tests.meta.test_layout import Source, unsafe_violations

# Distributions whose code sees bytes of clients or peers, and the modules that are scanned.
REACHED = {
    "crc32c": "crc32c", "cryptography": "cryptography",
    "httptools": "httptools", "jinja2": "jinja2", "llguidance": "llguidance",
    "markupsafe": "markupsafe", "msgspec": "msgspec",
    "prometheus-client": "prometheus_client", "psutil": "psutil", "pyzmq": "zmq",
    "tokenizers": "tokenizers", "uvloop": "uvloop",
}  # fmt: skip
COMPILED = "runs before serving or is compiled: has no Python source that a peer's bytes pass through"
MODEL = "reads model files and text that the tokenizer has made ids of; safetensors only, never a pickle"
DOWNLOAD = "used by the demo's download and by start-up with a model of the hub, not by a process that serves"
BUILD = (
    "a dependency of torch or triton at import or compile time; a peer's bytes reach tensors only, by copy"
)
TERMINAL = "commands of the terminal"
UNLOADED = "needed by a dependency's optional parts, which no process of ours loads"
NOT_REACHED = {
    "torch": MODEL, "transformers": MODEL, "numpy": MODEL, "safetensors": MODEL, "regex": MODEL,
    "pyyaml": MODEL, "gguf": MODEL,
    "triton": BUILD, "sympy": BUILD, "mpmath": BUILD, "networkx": BUILD, "setuptools": BUILD, "fsspec": BUILD,
    "filelock": DOWNLOAD, "huggingface-hub": DOWNLOAD, "hf-xet": DOWNLOAD, "httpx2": DOWNLOAD,
    "httpcore2": DOWNLOAD,
    "httpx": DOWNLOAD, "httpcore": DOWNLOAD, "h11": DOWNLOAD, "click": DOWNLOAD, "certifi": DOWNLOAD,
    "idna": DOWNLOAD,
    "requests": DOWNLOAD, "anyio": DOWNLOAD,
    "urllib3": DOWNLOAD, "charset-normalizer": DOWNLOAD, "sniffio": DOWNLOAD, "truststore": DOWNLOAD,
    "tqdm": DOWNLOAD,
    "packaging": DOWNLOAD, "rich": TERMINAL, "typer": TERMINAL, "shellingham": TERMINAL,
    "markdown-it-py": TERMINAL,
    "mdurl": TERMINAL, "pygments": TERMINAL, "annotated-doc": TERMINAL, "typing-extensions": COMPILED,
    "pydantic": UNLOADED, "pydantic-core": UNLOADED, "annotated-types": UNLOADED,
    "typing-inspection": UNLOADED,
    "exceptiongroup": COMPILED, "tomli": COMPILED, "cffi": COMPILED, "pycparser": COMPILED,
}  # fmt: skip

# What the scan finds and why it is not a way in: (file, what) -> reason.
PYOBJ = "send_pyobj and recv_pyobj, which nothing of ours calls"
TEMPLATE = "compiles the served model's own chat template; requests cannot bring one"
CACHE = "a bytecode cache that is off unless an environment is given one"
ALLOWED = {
    ("zmq/eventloop/zmqstream.py", "pickle"): PYOBJ,
    ("zmq/sugar/socket.py", "pickle"): PYOBJ,
    (
        "msgspec/yaml.py",
        "yaml.load",
    ): "decodes YAML with the safe loader; ours decodes MessagePack and JSON only",
    ("jinja2/bccache.py", "marshal"): CACHE,
    ("jinja2/bccache.py", "pickle"): CACHE,
    ("jinja2/debug.py", "compile"): TEMPLATE,
    ("jinja2/debug.py", "exec"): TEMPLATE,
    ("jinja2/environment.py", "compile"): TEMPLATE,
    ("jinja2/environment.py", "exec"): TEMPLATE,
    ("jinja2/loaders.py", "__import__"): "loads templates from packages; ours come from strings",
    ("jinja2/utils.py", "__import__"): "import_string, for names of extensions that code gives",
    (
        "prometheus_client/decorator.py",
        "compile",
    ): "makes wrappers with the signature of functions of a module",
    ("prometheus_client/decorator.py", "exec"): "makes wrappers with the signature of functions of a module",
}


def runtime_closure():
    """Names of all distributions that serving needs, directly or not, as installed here."""
    seen, todo = set(), [DISTRIBUTION]
    while todo:
        for text in importlib.metadata.requires(todo.pop()) or ():
            marker = text.partition(";")[2]
            name = re.match(r"[A-Za-z0-9._-]+", text).group().lower().replace("_", "-")
            if "extra" in marker or name in seen:
                continue
            try:
                importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # for another platform or version
            seen.add(name)
            todo.append(name)
    return seen


def scanned(top):
    """(file, what) of every way to turn data into code in an installed module's sources."""
    spec = importlib.util.find_spec(top)
    folder = Path(spec.origin).parent
    for path in sorted(folder.rglob("*.py")) if spec.submodule_search_locations else [Path(spec.origin)]:
        if "tests" in path.relative_to(folder).parts or path.suffix != ".py":
            continue
        relative = str(path.relative_to(folder.parent))
        for line in unsafe_violations(Source(relative, path.read_text(encoding="utf-8"))):
            what = re.search(r": (?:from )?(\S+) (?:is unsafe|is not allowed|import load)", line).group(1)
            if what != "global":
                yield relative, what


def test_s1_every_dependency_is_classified():
    assert runtime_closure() - set(REACHED) - set(NOT_REACHED) == set()
    assert not set(REACHED) & set(NOT_REACHED)


def test_s1_no_package_that_parses_peer_bytes_turns_data_into_code():
    found = {item for name, top in REACHED.items() if is_installed(name) for item in scanned(top)}
    assert found - set(ALLOWED) == set()
    assert set(ALLOWED) - found == set(), "nothing is allowed that is not there"


def is_installed(name):
    try:
        return importlib.metadata.distribution(name) is not None
    except importlib.metadata.PackageNotFoundError:
        return False


# --- S30: what is installed is pinned by its hashes ---------------------------------------------------------


def test_s30_exactly_the_pinned_packages_are_locked_with_hashes():
    pinned, locked = pins_of(PINS), pins_of(LOCK)
    assert {(r.name, r.version, r.marker) for r in locked} == {(r.name, r.version, r.marker) for r in pinned}
    for requirement in locked:
        assert requirement.hashes, requirement.name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in requirement.hashes)
        assert len(set(requirement.hashes)) == len(requirement.hashes)


def test_s30_everything_that_serving_needs_is_pinned():
    assert runtime_closure() - {pin.name for pin in pins_of(PINS)} == set()


@pytest.mark.parametrize("line", ["torch>=2.11", "torch", "x @ git+https://example.org/x", "torch==2.*"])
def test_s30_a_requirement_without_a_pin_is_refused(line, tmp_path):
    (tmp_path / "pins.txt").write_text(f"# pins\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2.*=="):
        pins_of(tmp_path / "pins.txt")
