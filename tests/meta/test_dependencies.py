"""Every dependency that serving needs was looked at: what a peer's bytes reach holds no way to turn them into code."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from baton.deploy.lock import Requirement, digests_of, requirements, sbom
from baton.tests.meta.test_layout import Source, unsafe_violations

ROOT = Path(__file__).resolve().parents[2]

# Distributions whose code sees bytes of clients or peers, and the modules that are scanned.
REACHED = {
    "anyio": "anyio", "crc32c": "crc32c", "cryptography": "cryptography",
    "httptools": "httptools", "jinja2": "jinja2", "llguidance": "llguidance",
    "markupsafe": "markupsafe", "msgspec": "msgspec",
    "prometheus-client": "prometheus_client", "psutil": "psutil", "pyzmq": "zmq", "starlette": "starlette",
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
    "torch": MODEL, "transformers": MODEL, "numpy": MODEL, "safetensors": MODEL, "regex": MODEL, "pyyaml": MODEL,
    "triton": BUILD, "sympy": BUILD, "mpmath": BUILD, "networkx": BUILD, "setuptools": BUILD, "fsspec": BUILD,
    "filelock": DOWNLOAD, "huggingface-hub": DOWNLOAD, "hf-xet": DOWNLOAD, "httpx2": DOWNLOAD, "httpcore2": DOWNLOAD,
    "httpx": DOWNLOAD, "httpcore": DOWNLOAD, "h11": DOWNLOAD, "click": DOWNLOAD, "certifi": DOWNLOAD, "idna": DOWNLOAD,
    "requests": DOWNLOAD,
    "urllib3": DOWNLOAD, "charset-normalizer": DOWNLOAD, "sniffio": DOWNLOAD, "truststore": DOWNLOAD, "tqdm": DOWNLOAD,
    "packaging": DOWNLOAD, "rich": TERMINAL, "typer": TERMINAL, "shellingham": TERMINAL, "markdown-it-py": TERMINAL,
    "mdurl": TERMINAL, "pygments": TERMINAL, "annotated-doc": TERMINAL, "typing-extensions": COMPILED,
    "pydantic": UNLOADED, "pydantic-core": UNLOADED, "annotated-types": UNLOADED, "typing-inspection": UNLOADED,
    "exceptiongroup": COMPILED, "tomli": COMPILED, "cffi": COMPILED, "pycparser": COMPILED,
}  # fmt: skip

# What the scan finds and why it is not a way in: (file, what) -> reason.
PYOBJ = "send_pyobj and recv_pyobj, which nothing of ours calls"
OWN_PROCESS = "talks to processes that it started itself, which anyio does not do here"
TEMPLATE = "compiles the served model's own chat template; requests cannot bring one"
CACHE = "a bytecode cache that is off unless an environment is given one"
ALLOWED = {
    ("zmq/eventloop/zmqstream.py", "pickle"): PYOBJ,
    ("zmq/sugar/socket.py", "pickle"): PYOBJ,
    (
        "msgspec/yaml.py",
        "yaml.load",
    ): "decodes YAML with the safe loader; ours decodes MessagePack and JSON only",
    ("anyio/to_interpreter.py", "pickle"): OWN_PROCESS,
    ("anyio/to_interpreter.py", "compile"): OWN_PROCESS,
    ("anyio/to_process.py", "pickle"): OWN_PROCESS,
    ("anyio/_lazyimport.py", "compile"): "compiles the source of its own package at import",
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
    """Names of all distributions that baton needs to serve, dependencies of dependencies included, as installed here."""
    seen, todo = set(), ["baton"]
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


def test_s1_every_dependency_was_looked_at():
    assert runtime_closure() - set(REACHED) - set(NOT_REACHED) == set()
    assert not set(REACHED) & set(NOT_REACHED)


def test_s1_what_a_peer_s_bytes_reach_turns_nothing_into_code():
    found = {item for name, top in REACHED.items() if is_installed(name) for item in scanned(top)}
    assert found - set(ALLOWED) == set()
    assert set(ALLOWED) - found == set(), "nothing is allowed that is not there"


def is_installed(name):
    try:
        return importlib.metadata.distribution(name) is not None
    except importlib.metadata.PackageNotFoundError:
        return False


# --- S30: what is installed is pinned by its hashes -------------------------------------------------------------------


def test_s30_every_pin_is_locked_with_hashes_and_nothing_else_is():
    pinned = requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    locked = requirements((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    assert {(r.name, r.version, r.marker) for r in locked} == {(r.name, r.version, r.marker) for r in pinned}
    for requirement in locked:
        assert requirement.hashes, requirement.name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in requirement.hashes)
        assert len(set(requirement.hashes)) == len(requirement.hashes)


def test_s30_everything_that_serving_needs_is_pinned():
    pinned = {r.name for r in requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))}
    assert runtime_closure() - pinned == set()


@pytest.mark.parametrize("line", ["torch>=2.11", "torch", "git+https://example.org/x", "torch==2.*"])
def test_s30_what_is_no_pin_is_refused(line):
    with pytest.raises(ValueError, match=r"line 2.*=="):
        requirements(f"# pins\n{line}\n")


def test_s30_only_files_of_the_very_version_are_accepted():
    digest = {
        name: f"{i:064x}" for i, name in enumerate(["wheel", "source", "cpu", "older", "other", "longer"])
    }
    files = {
        "wheel": "some_name-1.2-cp311-cp311-linux_x86_64.whl", "source": "some-name-1.2.tar.gz",
        "cpu": "some_name-1.2%2Bcpu-cp311-cp311-linux_x86_64.whl", "older": "some_name-1.1-py3-none-any.whl",
        "other": "some_name_more-1.2-py3-none-any.whl", "longer": "some_name-1.2.1.tar.gz",
    }  # fmt: skip
    page = "".join(f'<a href="https://x/{file}#sha256={digest[name]}">f</a>' for name, file in files.items())
    page += '<a href="https://x/some_name-1.2-py3-none-any.whl">no hash</a>'
    found = digests_of(page, Requirement(name="some-name", version="1.2"))
    assert found == sorted(f"sha256:{digest[name]}" for name in ("wheel", "source", "cpu"))


def test_s30_the_bill_of_materials_names_every_pin_with_its_hashes():
    locked = requirements((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    document = sbom(locked)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert [c["purl"] for c in document["components"]] == [f"pkg:pypi/{r.name}@{r.version}" for r in locked]
    assert all(c["externalReferences"] for c in document["components"])
    assert len({c["bom-ref"] for c in document["components"]}) == len(locked)
