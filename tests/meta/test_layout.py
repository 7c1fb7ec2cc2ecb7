"""The house rules: floors and nevers, checked on the syntax trees of the whole package."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from baton.tests.meta.source_trees import ROOT, Source, files_of_tests, forget, package_files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What each folder may import of ours. An entry with a dot admits these modules only.
FLOORS: dict[str, tuple[str, ...]] = {
    "cluster": (),
    "kernels": (),
    "engine": ("kernels",),
    "router": ("cluster", "engine.kv.page_names"),
    "deploy": (
        "cluster",
        "engine.auto_sizes",
        "engine.errors",
        "engine.hub",
        "engine.kv.budget",
        "engine.models.config_reader",
        "engine.models.families",
        "engine.models.text_part",
        "engine.models.layer_windows",
        "engine.speculative.drafters.mtp_names",
    ),
    "kvtransfer": ("engine.kv", "kernels", "cluster"),
    "worker": ("kvtransfer", "engine", "cluster"),
    "prefill": ("worker", "kvtransfer", "engine", "cluster"),
    "decode": ("worker", "kvtransfer", "engine", "cluster"),
    "bench": ("kvtransfer", "engine", "kernels", "cluster"),
    "training": ("engine", "kernels"),
}
# Foreign imports of the lowest floors; other folders may import any dependency but the forbidden ones.
ALLOWED_FOREIGN = {
    "cluster": {"zmq", "msgspec", "psutil", "prometheus_client", "tomli", "opentelemetry"},
    "kernels": {"torch", "triton"},
}
FORBIDDEN_FOREIGN = {"router": {"torch", "triton"}, "deploy": {"torch", "triton"}}

# Sub-folders that import nothing of their own top folder but themselves and these modules.
ISLANDS: dict[str, tuple[str, ...]] = {"router.rooms": ("router.errors",), "router.api": ("router.errors",)}
# Top folders whose sub-folders still import each other in a circle.
CIRCULAR_ROOMS: tuple[str, ...] = ()

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}
UNSAFE_METHODS = {"send_pyobj", "recv_pyobj"}

MAX_TEST_NAME = 70


# --- the laws: each returns the violations of one file ------------------------------------------------------


def floor_violations(source: Source, known: set[str]) -> list[str]:
    """Imports of ours that the source's floor does not allow. The root's files may import anything."""
    if not source.folder:
        return []
    if source.folder not in FLOORS:
        return [f"{source.relative}: folder {source.folder!r} has no floor"]
    allowed = (source.folder, *FLOORS[source.folder])
    found = []
    for target, line in source.own_targets(known):
        inner = target.removeprefix("baton").removeprefix(".")
        if not any(inner == name or inner.startswith(name + ".") for name in allowed):
            found.append(f"{source.relative}:{line}: {source.folder} may not import {target}")
    return found


def foreign_violations(source: Source) -> list[str]:
    """Imports of other packages that the folder must not know."""
    found = []
    for imported in source.imports():
        top = imported.module.partition(".")[0]
        if imported.level or top in ("baton", "__future__") or top in sys.stdlib_module_names:
            continue
        allowed = ALLOWED_FOREIGN.get(source.folder)
        if (allowed is not None and top not in allowed) or top in FORBIDDEN_FOREIGN.get(source.folder, ()):
            found.append(f"{source.relative}:{imported.line}: {source.folder} may not import {top}")
    return found


def style_violations(source: Source) -> list[str]:
    """Code imports ours relatively and at the top of the file; `__main__` chooses its role late."""
    found = []
    folders = set(FLOORS)
    for imported in source.imports():
        top = imported.module.partition(".")[0]
        if imported.level == 0 and top in {"baton", "tests", *folders}:
            found.append(f"{source.relative}:{imported.line}: import {imported.module} relatively")
        if any(name == "*" for name in imported.names):
            found.append(f"{source.relative}:{imported.line}: star import")
    if Path(source.relative).name != "__main__.py":
        found += [
            f"{source.relative}:{line}: import inside a function" for line in inner_imports(source.tree)
        ]
    return found


def inner_imports(tree: ast.AST) -> list[int]:
    """Lines of imports inside functions."""
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    ]
    nodes = {node for function in functions for node in ast.walk(function)}
    return sorted(node.lineno for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))


def unsafe_violations(source: Source) -> list[str]:
    """Ways for data to become code, and `global`, which is module-level mutable state."""
    found = []
    for imported in source.imports():
        if imported.module.partition(".")[0] in UNSAFE_MODULES:
            found.append(f"{source.relative}:{imported.line}: {imported.module} is unsafe")
        if any((imported.module, name) in UNSAFE_ATTRIBUTES for name in imported.names):
            found.append(f"{source.relative}:{imported.line}: from {imported.module} import load is unsafe")
    for node in ast.walk(source.tree):
        name = _unsafe_name(node)
        if name:
            found.append(f"{source.relative}:{node.lineno}: {name} is not allowed")  # type: ignore[attr-defined]
    return found


def _unsafe_name(node: ast.AST) -> str:
    if isinstance(node, ast.Global):
        return "global"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
        return node.func.id
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if (owner, node.attr) in UNSAFE_ATTRIBUTES:
            return f"{owner}.{node.attr}"
        if node.attr in UNSAFE_METHODS:
            return node.attr
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        return "allow_pickle"
    return ""


def test_import_violations(source: Source) -> list[str]:
    """Tests import ours absolutely, under the name `baton`."""
    found = []
    for imported in source.imports():
        top = imported.module.partition(".")[0]
        if imported.level or top in FLOORS or top == "tests":
            found.append(f"{source.relative}:{imported.line}: import ours as baton...")
    return found


def name_violations(source: Source) -> list[str]:
    """Test functions, methods included, whose name is longer than MAX_TEST_NAME letters."""
    return [
        f"{source.relative}:{node.lineno}: {node.name} has {len(node.name)} letters"
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and len(node.name) > MAX_TEST_NAME
    ]


def find_circles(sources: list[Source]) -> list[list[str]]:
    """Groups of modules that import each other: strongly connected components, and self-imports."""
    known = {source.module for source in sources}
    return circles(
        {s.module: {target for target, _ in s.own_targets(known) if target in known} for s in sources}
    )


def room_of(module: str) -> str:
    """The sub-folder of a module ("router.rooms"); "" for a file that lies in its top folder."""
    parts = module.removeprefix("baton.").split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else ""


def find_room_circles(sources: list[Source]) -> list[list[str]]:
    """Groups of sub-folders of one top folder that import each other. Files beside them do not count."""
    known = {source.module for source in sources}
    edges: dict[str, set[str]] = {}
    for source in sources:
        room = room_of(source.module)
        if room:
            targets = {room_of(target) for target, _ in source.own_targets(known) if target in known}
            edges.setdefault(room, set()).update(
                target
                for target in targets - {"", room}
                if target.partition(".")[0] == room.partition(".")[0]
            )
    return circles({room: targets & edges.keys() for room, targets in edges.items()})


def island_violations(source: Source, known: set[str]) -> list[str]:
    """Imports by which an island knows more of its own top folder than it may."""
    room = room_of(source.module)
    if room not in ISLANDS:
        return []
    top, allowed = room.partition(".")[0], (room, *ISLANDS[room])
    found = []
    for target, line in source.own_targets(known):
        inner = target.removeprefix("baton.")
        is_ours = inner == top or inner.startswith(top + ".")
        if is_ours and not any(inner == name or inner.startswith(name + ".") for name in allowed):
            found.append(f"{source.relative}:{line}: {room} may not import {target}")
    return found


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, and nodes with an edge to themselves."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += edges[module]
        reach[start] = seen
    found = {
        frozenset(m for m in reach[start] if start in reach[m]) for start in edges if start in reach[start]
    }
    return sorted(sorted(circle) for circle in found)


test_import_violations.__test__ = False  # type: ignore[attr-defined]


# --- the package keeps them ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def trees_of_this_module():
    """Parsed once for all tests, and kept for no other."""
    yield
    forget()


def test_arrows_point_to_lower_floors_only():
    sources = package_files()
    known = {source.module for source in sources}
    assert [violation for source in sources for violation in floor_violations(source, known)] == []


def test_low_floors_import_only_listed_packages():
    assert [violation for source in package_files() for violation in foreign_violations(source)] == []


def test_imports_are_relative_and_at_the_top():
    assert [violation for source in package_files() for violation in style_violations(source)] == []


def test_tests_import_absolutely():
    assert [violation for source in files_of_tests() for violation in test_import_violations(source)] == []


def test_test_names_have_at_most_70_letters():
    assert [violation for source in files_of_tests() for violation in name_violations(source)] == []


def test_there_are_no_circles():
    assert find_circles(package_files()) == []


def test_there_are_no_circles_between_sub_folders():
    found = find_room_circles(package_files())
    assert [circle for circle in found if circle[0].partition(".")[0] not in CIRCULAR_ROOMS] == []
    assert {circle[0].partition(".")[0] for circle in found} == set(CIRCULAR_ROOMS), "list no others"


def test_islands_import_only_listed_modules_of_their_top_folder():
    sources = package_files()
    known = {source.module for source in sources}
    assert [violation for source in sources for violation in island_violations(source, known)] == []


def test_s1_nothing_turns_data_into_code():
    assert [violation for source in package_files() for violation in unsafe_violations(source)] == []


def test_folders_are_listed_as_packages_and_have_no_init():
    files = [source for source in package_files() if source.folder]
    assert [source.relative for source in files if source.is_package] == []
    folders = {"baton"} | {source.module.rpartition(".")[0] for source in files}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "packages"
    ]
    assert sorted(folders) == sorted(listed)


def test_root_module_holds_docstring_and_version_only():
    body = Source("__init__.py", (ROOT / "__init__.py").read_text(encoding="utf-8")).tree.body
    assert [type(node) for node in body] == [ast.Expr, ast.Assign]


def test_router_deploy_and_cluster_load_no_torch():
    folders = ("router", "deploy", "cluster")
    modules = [source.module for source in package_files() if source.folder in folders]
    assert "baton.router.app" in modules
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "heavy = {'torch', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} loaded' if heavy else 0)\n"
    )
    names = [name for name in modules if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", program, *names], capture_output=True, text=True, cwd="/", timeout=120
    )
    assert done.returncode == 0, done.stderr


# --- the laws can fail --------------------------------------------------------------------------------------

KNOWN = {
    "baton.cluster.protocol.messages", "baton.cluster.protocol.codec", "baton.engine.kv.pool",
    "baton.engine.sampling.sampler",
    "baton.router.app", "baton.prefill.worker", "baton.decode.worker",
    "baton.worker.link", "baton.kernels.rope", "baton.__init__",
}  # fmt: skip


def snippet(relative: str, text: str) -> Source:
    return Source(relative, textwrap.dedent(text))


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        ("prefill/a.py", "from ..decode.worker import x"),
        ("decode/a.py", "from ..prefill import worker"),
        ("router/a.py", "from ..engine.kv.pool import KVPool"),
        ("router/a.py", "from .. import kvtransfer"),
        ("engine/a.py", "from ..cluster.messages import Hello"),
        ("engine/models/a.py", "from ...worker.link import Link"),
        ("kvtransfer/a.py", "from ..worker.link import Link"),
        ("worker/a.py", "from ..decode.worker import DecodeWorker"),
        ("kernels/a.py", "from ..engine.kv.pool import KVPool"),
        ("cluster/a.py", "from .. import __version__"),
        ("kvtransfer/a.py", "from ..engine.sampling.sampler import Sampler"),
        ("kvtransfer/a.py", "from ..engine.sampling import sampler"),
        ("deploy/a.py", "from ..router.app import app"),
        ("cluster/a.py", "import typing\nif typing.TYPE_CHECKING:\n    from ..router.app import App"),
        ("attic/a.py", "import os"),
    ],
)
def test_an_arrow_up_is_seen(relative, text):
    assert len(floor_violations(snippet(relative, text), KNOWN)) == 1


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        (
            "prefill/a.py",
            "from ..worker.link import Link\nfrom ..cluster import messages\nfrom . import worker",
        ),
        ("engine/models/a.py", "from ..sampler import Sampler\nfrom ...kernels.rope import rope"),
        ("kvtransfer/transports/a.py", "from ...engine.kv.pool import KVPool\nfrom ..layout import KVLayout"),
        ("__main__.py", "from .prefill.worker import main"),
    ],
)
def test_an_arrow_down_is_allowed(relative, text):
    assert floor_violations(snippet(relative, text), KNOWN) == []


def test_foreign_packages_are_seen():
    assert len(foreign_violations(snippet("cluster/a.py", "import torch.nn\nimport zmq\nimport os"))) == 1
    assert len(foreign_violations(snippet("kernels/a.py", "import torch\nfrom transformers import x"))) == 1
    assert len(foreign_violations(snippet("router/a.py", "from torch import nn\nimport httptools"))) == 1
    assert foreign_violations(snippet("engine/a.py", "import torch\nimport safetensors")) == []


def test_late_and_absolute_imports_are_seen():
    late = "def f():\n    if x:\n        import os\n\nasync def g():\n    from a import b\n"
    assert len(style_violations(snippet("engine/a.py", late))) == 2
    assert style_violations(snippet("engine/__main__.py", late)) == []
    assert (
        len(
            style_violations(snippet("engine/a.py", "import baton.cluster\nimport kernels\nfrom os import *"))
        )
        == 3
    )
    assert (
        len(test_import_violations(snippet("tests/unit/a.py", "from ..x import y\nimport cluster.codec")))
        == 2
    )


def test_long_test_names_are_seen():
    allowed, long = "test_" + "x" * 65, "test_" + "x" * 66
    kept = f"def {allowed}(): pass\ndef helper_{long}(): pass\n"
    assert name_violations(snippet("tests/unit/test_a.py", kept)) == []
    broken = f"def {long}(): pass\nclass TestA:\n    async def {long}(self): pass\n"
    assert len(name_violations(snippet("tests/unit/test_a.py", broken))) == 2


def test_circles_are_seen():
    chain = [
        snippet("engine/a.py", "from .b import x"),
        snippet("engine/b.py", "from . import c"),
        snippet("engine/c.py", "from os import path"),
    ]
    assert find_circles(chain) == []
    closed = [*chain[:2], snippet("engine/c.py", "from ..engine.a import y")]
    assert find_circles(closed) == [["baton.engine.a", "baton.engine.b", "baton.engine.c"]]


def test_circles_between_sub_folders_are_seen():
    chain = [
        snippet("router/workers/a.py", "from ..rooms.b import x"),
        snippet("router/rooms/b.py", "from ..errors import ApiError"),
        snippet("router/rooms/c.py", "from .b import x"),
        snippet("router/errors.py", "from .workers.z import x"),  # a file beside them
        snippet("router/workers/z.py", "import os"),
    ]
    assert find_room_circles(chain) == []
    closed = [*chain, snippet("router/rooms/d.py", "from ..workers.a import y")]
    assert find_circles(closed) == [], "no two files import each other"
    assert find_room_circles(closed) == [["router.rooms", "router.workers"]]


def test_a_forbidden_import_of_an_island_is_seen():
    known = {
        "baton.router.errors",
        "baton.router.rooms.room.b",
        "baton.router.workers.a",
        "baton.cluster.protocol.messages",
    }
    allowed = "from ..errors import ApiError\nfrom .b import x\nfrom ...cluster.messages import Hello"
    assert island_violations(snippet("router/rooms/a.py", allowed), known) == []
    assert len(island_violations(snippet("router/rooms/a.py", "from ..workers.a import x"), known)) == 1
    assert len(island_violations(snippet("router/api/a.py", "from ..rooms.b import x"), known)) == 1
    assert island_violations(snippet("router/workers/a.py", "from ..rooms.b import x"), known) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "exec(x)",
        "import torch\ntorch.load('f')",
        "from torch import load",
        "import numpy as np\nnp.load('f')",
        "socket.recv_pyobj()",
        "f(allow_pickle=True)",
        "def f():\n    global x\n    x = 1",
    ],
)
def test_unsafe_code_is_seen(text):
    assert len(unsafe_violations(snippet("engine/a.py", text))) == 1


def test_module_eval_and_regex_compile_are_safe():
    assert (
        unsafe_violations(snippet("engine/a.py", "import re\nmodel.eval()\nre.compile('x')\nload('f')")) == []
    )


def test_no_main_module_names_its_logger_by_its_own_name():
    """`python -m` names it __main__. That logger has the level of other libraries and drops INFO lines."""
    mains = [path for path in ROOT.glob("*/__main__.py") if not path.parent.name.startswith(".")]
    assert ROOT / "router" / "__main__.py" in mains
    assert [path for path in mains if "getLogger(__name__)" in path.read_text()] == []
