"""Segments, breaks and the graph pool on the tape in both of its memories, and the order of CUDA calls."""

import contextlib
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from baton.engine.graphs import cuda
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.breakable import BreakableGraph, Breaks, ReplayContext
from baton.engine.graphs.errors import CaptureRefused, GraphError
from baton.engine.graphs.graph_pool import FallbackReason, GraphKind, GraphPool, KindReport
from baton.engine.graphs.pytree import own
from baton.engine.graphs.tape.arena import ArenaMemory
from baton.engine.graphs.tape.tape import TapeBackend
from baton.tests.parity.graph_laws import LAWS, ROWS, Law

MEMORIES = {
    "kept": lambda: None,
    "arena": lambda: ArenaMemory(1 << 14),
    "poisoned": lambda: ArenaMemory(1 << 14, poison=True),
}


@pytest.fixture(params=MEMORIES)
def backend(request: pytest.FixtureRequest) -> GraphBackend:
    return TapeBackend(MEMORIES[request.param]())


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_hold_on_the_tape(law: Law, backend: GraphBackend):
    law(backend, "cpu")


def test_outside_a_capture_a_break_is_a_plain_call():
    breaks = Breaks(ROWS)

    @breaks.graph_break
    def first_rows(context: ReplayContext, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x[: context.num_rows] * scale

    assert first_rows(torch.ones(6), scale=2.0).tolist() == [2.0] * 4


def test_a_break_of_a_finished_capture_is_refused():
    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(TapeBackend())
    leaked = []

    def forward(breaks: Breaks[ReplayContext]) -> torch.Tensor:
        leaked.append(breaks.graph_break(lambda context, x: x.add_(context.num_rows)))
        return leaked[0](torch.zeros(2)).clone()

    graph.capture(forward, ROWS)
    with pytest.raises(GraphError, match="a capture that is over"):
        leaked[0](torch.zeros(2))


def test_a_second_capture_and_inference_mode_are_refused():
    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(TapeBackend(), name="g")
    x = torch.ones(2)
    with torch.inference_mode(), pytest.raises(GraphError, match="inference mode"):
        graph.capture(lambda _: x + 1, ROWS)
    assert repr(graph) == "<BreakableGraph g on tape, not captured>"
    graph.capture(lambda _: x + 1, ROWS)
    with pytest.raises(GraphError, match="already captured"):
        graph.capture(lambda _: x + 1, ROWS)
    assert repr(graph) == "<BreakableGraph g on tape, 1 segments, 0 breaks>"
    graph.release()
    assert not graph.is_captured


def test_own_copies_nests_and_cuts_rows():
    x = torch.arange(4.0)
    nest = {"a": (x, [x[:2]]), "b": None, "c": torch.Size([3])}
    copy = own(nest, 1)
    x.zero_()
    assert copy["a"][0].tolist() == [0.0]
    assert own(x).data_ptr() != x.data_ptr()
    assert copy["a"][1][0].shape == (1,)
    assert (copy["b"], copy["c"]) == (None, (3,))


# --- the inventory ------------------------------------------------------------------------------------------


def test_the_first_capture_of_each_kind_and_number_of_rows_is_guarded():
    pool, seen = GraphPool(TapeBackend()), []

    def capture(kind, bucket, rows):
        def forward(_):
            seen.append(pool.backend.is_guarded)
            return torch.ones(bucket)

        pool.capture(kind, bucket, forward, ReplayContext(num_rows=bucket), rows=rows)

    for bucket in (8, 4):
        for kind, rows in (
            (GraphKind.DECODE_STEP, 1),
            (GraphKind.DECODE_STEP, 4),
            (GraphKind.EDITED_STEP, 4),
        ):
            capture(kind, bucket, rows)
    assert seen == [True] * 3 + [False] * 3


def test_the_pool_counts_graphs_replays_padding_and_fallbacks():
    pool = GraphPool(TapeBackend())
    x = torch.ones(8, 2)
    graphs = {
        bucket: pool.capture(
            GraphKind.TARGET_PREFILL, bucket, lambda _, n=bucket: x[:n] + 1, ReplayContext(num_rows=bucket)
        )
        for bucket in (8, 4)
    }
    pool.capture(GraphKind.RANKED_STEP, 2, lambda _: x[:2] * 2, ReplayContext(num_rows=2))
    for rows in (3, 4):
        graphs[4].replay(ReplayContext(num_rows=rows))
    graphs[8].replay(ReplayContext(num_rows=5))
    pool.count_fallback(GraphKind.TARGET_PREFILL, FallbackReason.TOKENS_OVER_MAX)
    pool.count_fallback(GraphKind.DECODE_STEP, FallbackReason.DISABLED)
    report = pool.report()
    assert (report.backend, report.num_graphs, report.num_decode_graphs, report.pool_bytes) == (
        "tape",
        3,
        1,
        0,
    )
    assert report.own_bytes == (8 * 2 + 4 * 2 + 2 * 2) * 4
    prefill = report.kinds[0]
    assert prefill == KindReport(
        kind="target_prefill",
        buckets=(4, 8),
        rows=(0, 0),
        num_breaks=0,
        own_bytes=96,
        pool_growth_bytes=0,
        capture_seconds=prefill.capture_seconds,
        replays={4: 2, 8: 1},
        pad_rows=4,
        fallbacks={"tokens_over_max": 1},
    )
    assert [(kind.kind, kind.buckets) for kind in report.kinds[1:]] == [
        ("decode_step", ()),
        ("ranked_step", (2,)),
    ]


def test_dropped_graphs_are_gone_and_their_counts_stay():
    pool = GraphPool(TapeBackend())
    x = torch.ones(2, 2)
    verify = pool.capture(GraphKind.DECODE_STEP, 2, lambda _: x + 1, ROWS)
    pool.capture(GraphKind.DRAFT_PREFILL, 2, lambda _: x + 1, ROWS)
    verify.replay(ReplayContext(num_rows=2))
    with pytest.raises(GraphError, match="decode_step 2 is already captured"):
        pool.capture(GraphKind.DECODE_STEP, 2, lambda _: x, ROWS)
    assert pool.drop(GraphKind.DECODE_STEP) == 1
    with pytest.raises(GraphError, match="decode_step 2 is not captured"):
        verify.replay(ROWS)
    report = pool.report()
    assert (report.num_graphs, report.num_decode_graphs) == (1, 0)
    assert {kind.kind: kind.replays for kind in report.kinds}["decode_step"] == {2: 1}
    pool.capture(GraphKind.DECODE_STEP, 2, lambda _: x + 1, ROWS)
    assert pool.drop() == 2
    assert repr(pool) == "<GraphPool tape, graphs {}, 1 replays>"


def test_a_failed_capture_is_not_in_the_inventory():
    pool = GraphPool(TapeBackend())
    x = torch.ones(2)
    with pytest.raises(CaptureRefused):
        pool.capture(GraphKind.DECODE_STEP, 2, lambda _: x.sum().item(), ROWS)
    assert pool.report().num_graphs == 0
    pool.capture(GraphKind.DECODE_STEP, 2, lambda _: x + 1, ROWS)


def test_decode_kinds_are_those_of_the_decode_role():
    others = {kind.value for kind in GraphKind if not kind.is_decode}
    assert others == {"target_prefill", "whole_prefill", "draft_prefill"}


# --- the order in which CUDA is called ----------------------------------------------------------------------


class Driver:
    """Stands in for torch.cuda and records the calls; runs on CPU tensors, so it captures nothing."""

    def __init__(self, *, empty: bool = False, fail_end: bool = False) -> None:
        self.calls: list[object] = []
        self.current = "caller"
        self.num_ends = 0
        driver = self

        class Stream:
            def __init__(self, name: object = None) -> None:
                self.name = name if isinstance(name, str) else "capture"

            def wait_stream(self, other: "Stream") -> None:
                driver.calls.append(f"{self.name} waits for {other.name}")

        class CUDAGraph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                driver.calls.append(("begin", driver.current, pool, capture_error_mode, gc.isenabled()))

            def capture_end(self) -> None:
                driver.calls.append(("end", driver.current))
                if empty:
                    warnings.warn(
                        "The CUDA Graph is empty. This usually means a wrong stream.",
                        UserWarning,
                        stacklevel=1,
                    )
                driver.num_ends += 1
                if fail_end and driver.num_ends > 1:  # the first one keeps the pool
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                driver.calls.append(("replay", driver.current))

        self.Stream, self.CUDAGraph = Stream, CUDAGraph

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 7)

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: object) -> object:
        return self.Stream(self.current)

    @contextlib.contextmanager
    def stream(self, stream: object):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: object) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def memory_snapshot(self, pool_id: tuple[int, int]) -> list[dict[str, object]]:
        return [
            {"segment_pool_id": (0, pool), "total_size": size} for pool, size in ((7, 10), (0, 100), (7, 1))
        ]


def scripted(monkeypatch: pytest.MonkeyPatch, **faults: bool) -> tuple[Driver, cuda.CudaBackend]:
    driver = Driver(**faults)
    for name in (
        "Stream", "CUDAGraph", "graph_pool_handle", "current_device", "current_stream", "stream", "device",
        "synchronize",
        "empty_cache", "memory_snapshot",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(driver, name))
    return driver, cuda.CudaBackend()


def test_cuda_segments_share_a_pool_and_a_stream_and_launch_once(
    monkeypatch: pytest.MonkeyPatch,
):
    driver, backend = scripted(monkeypatch)
    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
    x, seen = torch.ones(2), []
    graph.capture(lambda breaks: breaks.graph_break(lambda context, y: seen.append(driver.current))(x), ROWS)
    begin, end, launch = (
        ("begin", "capture", (0, 7), "thread_local", False),
        ("end", "capture"),
        ("replay", "capture"),
    )
    around = ["capture waits for caller", "caller waits for capture", "synchronize"]
    warm_up, session, keeper = around, ["synchronize", "empty_cache", around[0]], [begin, end]
    assert driver.calls == [
        *warm_up,
        *session,
        *keeper,
        begin,
        end,
        launch,
        begin,
        end,
        launch,
        *around[1:],
    ]
    assert seen == ["capture"] * 2
    driver.calls.clear()
    graph.replay(ROWS)
    assert driver.calls == [("replay", "caller")] * 2
    assert seen[2:] == ["caller"]
    assert (backend.pool_bytes(), gc.isenabled(), backend.is_capturing) == (11, True, False)
    assert repr(backend) == "<CudaBackend cuda:0, pool (0, 7), capturing False>"


def test_an_empty_cuda_segment_is_never_launched(monkeypatch: pytest.MonkeyPatch):
    driver, backend = scripted(monkeypatch, empty=True)
    graph: BreakableGraph[ReplayContext, None] = BreakableGraph(backend)
    graph.capture(lambda _: None, ROWS)
    graph.replay(ROWS)
    assert [segment.num_ops for segment in graph.segments] == [0]
    assert [call for call in driver.calls if call[0] == "replay"] == []


def test_a_host_read_ends_a_cuda_capture_before_the_driver_sees_it(monkeypatch: pytest.MonkeyPatch):
    driver, backend = scripted(monkeypatch)
    backend.num_warm_ups = 0
    x = torch.ones(2)
    graph: BreakableGraph[ReplayContext, object] = BreakableGraph(backend)
    with pytest.raises(CaptureRefused, match="item"):
        graph.capture(lambda _: x.sum().item(), ROWS)
    assert [call[0] for call in driver.calls if isinstance(call, tuple)] == ["begin", "end"] * 2, (
        "keeper, ours"
    )
    assert (gc.isenabled(), backend.is_capturing, driver.current) == (True, False, "caller")
    assert x.sum().item() == 2
    graph.capture(lambda _: x.data_ptr(), ROWS)  # kernels are launched by address


def test_the_error_of_the_code_wins_over_that_of_the_invalidated_capture(monkeypatch: pytest.MonkeyPatch):
    _, backend = scripted(monkeypatch, fail_end=True)
    backend.num_warm_ups = 0

    def fails(_: object) -> None:
        raise ZeroDivisionError

    with pytest.warns(UserWarning, match="previous error during capture"), pytest.raises(ZeroDivisionError):
        BreakableGraph[ReplayContext, None](backend).capture(fails, ROWS)
    assert not backend.is_capturing


class CountingTape(TapeBackend):
    """A tape that warms up, as devices do, and counts it. The first `num_refused` captures fail."""

    num_warm_ups = 1
    num_run = num_refused = 0

    def warm_up(self, run: Callable[[], object]) -> None:
        self.num_run += 1
        super().warm_up(run)

    def open_segment(self) -> None:
        if self.num_refused:
            self.num_refused -= 1
            raise GraphError("not ready")
        super().open_segment()


def test_code_is_warmed_up_at_its_first_size_only():
    backend = CountingTape()
    pool, x = GraphPool(backend), torch.ones(8)
    warm_ups = []
    for kind in (GraphKind.DECODE_STEP, GraphKind.RANKED_STEP, GraphKind.DRAFT_CATCH_UP):
        for bucket in (8, 4, 2):
            pool.capture(kind, bucket, lambda _, n=bucket: x[:n] + 1, ReplayContext(num_rows=bucket))
            warm_ups.append(backend.num_run)
            backend.num_run = 0
    assert warm_ups == [1, 0, 0] * 3


def test_a_capture_that_fails_cold_is_warmed_up_and_tried_again():
    backend = CountingTape()
    pool, x = GraphPool(backend), torch.ones(8)
    pool.capture(GraphKind.RANKED_STEP, 8, lambda _: x, ReplayContext(num_rows=8))
    backend.num_run, backend.num_refused = 0, 1
    pool.capture(GraphKind.RANKED_STEP, 4, lambda _: x[:4], ReplayContext(num_rows=4))
    assert backend.num_run == 1
    backend.num_refused = 1
    with pytest.raises(GraphError, match="not ready"):
        pool.capture(GraphKind.DECODE_STEP, 2, lambda _: x[:2], ReplayContext(num_rows=2))


def test_a_capture_does_not_import_torch_s_compiler():
    code = (
        "import sys, torch\n"
        "from baton.engine.graphs.breakable import BreakableGraph, ReplayContext\n"
        "from baton.engine.graphs.guard import HOST_READS, HostReadGuard, HostSyncGuard\n"
        "from baton.engine.graphs.tape.tape import TapeBackend\n"
        "guard, x = HostReadGuard(HOST_READS), torch.ones(2)\n"
        "with guard, HostSyncGuard(guard): x + 1\n"
        "BreakableGraph(TapeBackend()).capture(lambda _: x + 1, ReplayContext(num_rows=2))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, "it takes seconds"
