"""Kernels under Triton's interpreter, or compiled for a GPU that is not there, for one test at a time.

The documented switch, TRITON_INTERPRET=1, must be set before Triton is imported, turns every kernel of the
process into an interpreted one, and would thus depend on the order of test files and rob the GPU tests of
compiled kernels. What the switch does is done here for the duration of a test instead: each compiled
function, Triton's own library included, is replaced by its interpreted twin, and restored afterwards.
The interpreter also replaces the built-in operations of Triton's language. It leaves them replaced after a
kernel has called a helper, and a later compilation fails on them, so the fixture restores them too.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from baton.kernels import chained_launch
from packaging.version import Version

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@cache
def compiled_functions(prefixes: tuple[str, ...]) -> list[tuple[object, str, object]]:
    """(module, name, function) of every compiled function in the modules with these names."""
    from triton.runtime.jit import JITFunction

    for path in sorted(KERNELS.glob("*.py")):
        importlib.import_module(f"baton.kernels.{path.stem}")
    modules = [module for name, module in sys.modules.items() if name.startswith(prefixes)]
    found = [(module, name, value) for module in modules for name, value in vars(module).items()]
    return [each for each in found if isinstance(each[2], JITFunction)]


def replace_kernels(monkeypatch: pytest.MonkeyPatch, twin_of: Callable, prefixes: tuple[str, ...]) -> None:
    """Put `twin_of(kernel)` in the place of every compiled function in the modules with these names."""
    twins: dict[object, object] = {}
    for module, name, kernel in compiled_functions(prefixes):
        if kernel.fn not in twins:
            twins[kernel.fn] = twin_of(kernel)
        monkeypatch.setattr(module, name, twins[kernel.fn])


@cache
def interpreted(function: Callable) -> object:
    """The interpreted twin of the compiled function that was made from `function`."""
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function)


def parts_of_language(tl) -> list:
    """The modules of Triton's language and their classes, whose attributes the interpreter replaces."""
    modules = [tl, tl.core, tl.math]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith("triton.")
    }
    return [*modules, *classes]


@contextlib.contextmanager
def restored_language(tl) -> Iterator[None]:
    """Give every attribute of Triton's language its earlier value at the end."""
    before = [(part, dict(vars(part))) for part in parts_of_language(tl)]
    try:
        yield
    finally:
        for part, attributes in before:
            for name, value in list(vars(part).items()):
                if name not in attributes:
                    delattr(part, name)
                elif attributes[name] is not value:
                    setattr(part, name, attributes[name])


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every launcher called in this test runs its kernel in Triton's interpreter, on CPU tensors."""
    version = pytest.importorskip("triton", reason="Triton has no wheel for this platform").__version__
    if Version(version) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.skip(f"the interpreter of Triton {version} does not work with numpy {np.__version__}")
    import triton.language as tl
    import triton.runtime.interpreter as interpreting

    # Triton loads this at the first launch, and its import wants compiled functions.
    importlib.import_module("triton.experimental.gluon")
    # As on hardware, an overflow is silent; an invalid operation, such as inf - inf, still fails the test.
    with restored_language(tl), np.errstate(over="ignore"):
        replace_kernels(
            monkeypatch, lambda kernel: interpreted(kernel.fn), ("triton.language", "baton.kernels.")
        )
        replace_language_once(monkeypatch, interpreting)
        correct_bfloat16(monkeypatch, interpreting, tl)
        yield


def replace_language_once(monkeypatch: pytest.MonkeyPatch, interpreting) -> None:
    """Replace the operations of Triton's language once in a test, and leave them replaced.

    The interpreter looks through all names of the language at every launch and at every call of a helper,
    which takes longer than most helpers do. `restored_language` puts the operations back.
    """
    replace, replaced = interpreting._patch_lang, set()
    modules = {id(interpreting.tl), id(interpreting.tl.core)}

    def replace_first(fn):
        visible = frozenset(modules.intersection(map(id, fn.__globals__.values())))
        if visible not in replaced:
            replaced.add(visible)
            replace(fn)
        return SimpleNamespace(restore=lambda: None)

    monkeypatch.setattr(interpreting, "_patch_lang", replace_first)


class CompileOnly:
    """Stands for a kernel: a launch compiles it for the arguments given and keeps the result."""

    def __init__(self, kernel, compiled: list) -> None:
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments, **options) -> None:
            self.compiled.append((self.kernel.__name__, self.kernel.warmup(*arguments, grid=grid, **options)))

        return launch


@pytest.fixture
def compiled_for_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, object]]:
    """Launchers called in this test only compile their kernels for sm_90: (kernel name, compiled kernel).

    No device is needed: Triton brings the assembler along.
    """
    return compiling(monkeypatch, tmp_path, 90)


@pytest.fixture
def compiled_for_a100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, object]]:
    """As `compiled_for_h200`, for sm_80."""
    return compiling(monkeypatch, tmp_path, 80)


@pytest.fixture
def compiled_for_l40(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, object]]:
    """As `compiled_for_h200`, for sm_89, whose programs have 99 KB of shared memory."""
    return compiling(monkeypatch, tmp_path, 89)


def compiling(monkeypatch: pytest.MonkeyPatch, cache: Path, capability: int) -> list[tuple[str, object]]:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class AbsentDevice:
        def get_current_device(self) -> int:
            return -capability  # a kernel cache of its own beside that of any real device

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    compiled: list[tuple[str, object]] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(driver, "_active", AbsentDevice())
    monkeypatch.setattr(chained_launch, "has_chained_launches", lambda device: capability >= 90)

    def twin_of(kernel):
        return (
            CompileOnly(kernel, compiled) if kernel.__name__.endswith("_kernel") else kernel
        )  # helpers stay

    replace_kernels(monkeypatch, twin_of, ("baton.kernels.",))
    return compiled


def correct_bfloat16(monkeypatch: pytest.MonkeyPatch, interpreting, tl) -> None:
    """The interpreter keeps a bfloat16, or an e4m3, as the integer of its bits. It truncates where hardware
    rounds
    to the nearest, and multiplies matrices of those integers; here both are done by torch."""
    convert, multiply = interpreting._convert_float, interpreting.InterpreterBuilder.create_dot

    kept = {  # dtype of Triton -> that of torch, and of the bits
        tl.float32: (torch.float32, torch.uint32),
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    }

    def convert_float(data, source, target, rounding_mode):
        if source in kept and target in kept:
            (given, bits), (wanted, wanted_bits) = kept[source], kept[target]
            values = torch.tensor(data)
            values = values.view(given) if values.dtype == bits else values
            return values.to(torch.float32).to(wanted).view(wanted_bits).numpy()
        return convert(data, source, target, rounding_mode)

    def widened(handle):
        scalar = handle.dtype.scalar
        if scalar not in (tl.bfloat16, tl.float8e4nv):
            return handle
        data = convert_float(handle.data, scalar, tl.float32, None).view(np.float32)
        return interpreting.TensorHandle(data, tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreting, "_convert_float", convert_float)
    monkeypatch.setattr(interpreting.InterpreterBuilder, "create_dot", create_dot)
