"""Compilations, captures and compiled variants are counted, logged and kept on disk."""

import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from baton.engine.graphs.breakable import ReplayContext
from baton.engine.graphs.graph_pool import GraphKind, GraphPool
from baton.engine.graphs.tape.tape import TapeBackend
from baton.engine.warmup.compiler import compile_launches
from baton.engine.warmup.kernel_cache import VARIABLE, use_kernel_cache
from baton.engine.warmup.memory import reserve_memory
from baton.engine.warmup.watch import ReadyWatch, num_device_allocations

CPU = torch.device("cpu")


def compiles(triton: ModuleType) -> None:
    """What Triton does after it compiled a kernel."""
    triton.knobs.runtime.jit_post_compile_hook(
        fn=SimpleNamespace(name="pkg._rope_kernel"), repr="_rope_kernel[num_warps=4](...)", key="k"
    )


def test_compilations_after_ready_are_counted_and_named(caplog: pytest.LogCaptureFixture):
    triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    watch, other = ReadyWatch(CPU, None), ReadyWatch(CPU, None)
    with caplog.at_level(logging.WARNING):
        compiles(triton)
    assert watch.counters["compilations_after_ready"] == other.counters["compilations_after_ready"] == 1
    assert "kernel _rope_kernel was compiled while serving: _rope_kernel[num_warps=4](...)" in caplog.text
    other.close()
    compiles(triton)
    assert (watch.num_compilations, other.num_compilations) == (2, 1)
    gone = weakref.ref(watch)
    del watch
    assert gone() is None, "Triton's hook keeps no engine alive"
    compiles(triton)


def test_captures_after_ready_are_counted():
    pool = GraphPool(TapeBackend())

    def capture(bucket: int) -> None:
        pool.capture(GraphKind.DECODE_STEP, bucket, lambda _: torch.ones(1) + 1, ReplayContext(num_rows=1))

    capture(1)
    watch = ReadyWatch(CPU, pool)
    assert watch.counters == {
        "compilations_after_ready": 0, "captures_after_ready": 0, "allocations_after_ready": 0,
    }  # fmt: skip
    capture(2)
    pool.drop(bucket=2)
    assert watch.counters["captures_after_ready"] == 1, "a dropped graph was captured all the same"
    watch.close()


def test_device_allocations_after_ready_are_counted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    num_blocks = 7
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda device: {"num_device_alloc": num_blocks}
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 20)
    watch = ReadyWatch(torch.device("cuda", 0), None)
    with caplog.at_level(logging.WARNING):
        assert watch.counters["allocations_after_ready"] == 0
        num_blocks = 9
        assert [watch.counters["allocations_after_ready"] for _ in range(2)] == [2, 2]
    assert caplog.text.count("device memory grew while serving: 2 allocations, 3 MiB reserved now") == 1
    assert num_device_allocations(CPU) == 0
    watch.close()


class FakeLaunch:
    """A planned launch whose compilation notes its thread, or fails."""

    def __init__(self, name: str, meet: threading.Barrier, *, fails: bool = False) -> None:
        self.name, self.meet, self.fails = name, meet, fails
        self.loaded_by: threading.Thread | None = None

    def prepare(self) -> None:
        self.prepared_by = threading.current_thread()

    def compile(self) -> Callable[[], None]:
        assert self.prepared_by is not threading.current_thread()
        self.meet.wait(30)  # all of them at once, or never
        if self.fails:
            raise RuntimeError("out of registers")
        return self.load

    def load(self) -> None:
        self.loaded_by = threading.current_thread()

    def __str__(self) -> str:
        return self.name


def test_variants_compile_side_by_side_and_a_failure_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    meet = threading.Barrier(3)
    launches = [FakeLaunch(name, meet, fails=name == "b") for name in "abc"]
    with caplog.at_level(logging.INFO):
        assert compile_launches(launches, CPU) == 1
    here = threading.current_thread()
    assert [launch.loaded_by for launch in launches] == [here, None, here], "one thread loads them all"
    assert "kernel variant b cannot be compiled: out of registers" in caplog.text
    assert "2 kernel variants compiled in" in caplog.text
    assert compile_launches([], CPU) == 0


def test_compiled_kernels_outlive_the_process_in_a_private_folder(tmp_path: Path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = use_kernel_cache(environ)
    assert folder == tmp_path / "baton" / "kernels" == Path(environ[VARIABLE])
    assert folder.stat().st_mode & 0o077 == 0, "binaries of others must not be loaded"
    assert use_kernel_cache(environ) == folder
    chosen = {VARIABLE: str(tmp_path / "own"), "XDG_CACHE_HOME": str(tmp_path)}
    assert use_kernel_cache(chosen) == tmp_path / "own"


def test_without_a_place_for_kernels_triton_keeps_its_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "baton").write_text("in the way")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        assert use_kernel_cache(environ) is None
    assert VARIABLE not in environ
    assert f"set {VARIABLE}" in caplog.text


def test_a_cpu_reserves_nothing():
    assert reserve_memory(CPU, 1 << 40) == 0
