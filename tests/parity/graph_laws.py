"""The laws of every graph backend. Each law takes a fresh backend and its device."""

from collections.abc import Callable

import pytest
import torch
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.breakable import BreakableGraph, Breaks, ReplayContext
from baton.engine.graphs.errors import CaptureRefused, GraphError, StaleGraph
from baton.engine.graphs.graph_pool import GraphKind, GraphPool
from baton.engine.graphs.pytree import own
from baton.tests.parity.graph_toys import HIDDEN, LAYERS, ToyBucket, ToyDecoder, context_of, rows_of

Law = Callable[[GraphBackend, str], None]
ROWS = ReplayContext(num_rows=4)


def replay_equals_eager_in_every_bucket(backend: GraphBackend, device: str) -> None:
    model = ToyDecoder(device=device)
    for bucket in (16, 8, 4, 1):
        toy = ToyBucket(backend, model, bucket)
        assert toy.graph.num_breaks == LAYERS + 1
        for lens in [(1,), (bucket - 1,), (bucket,), (1, bucket - 2), (2, 1, bucket - 3)]:
            if min(lens) > 0:
                toy.check(sum(lens), *lens)


def replays_follow_their_inputs_and_contexts(backend: GraphBackend, device: str) -> None:
    toy = ToyBucket(backend, ToyDecoder(device=device), 8)
    hidden = rows_of(6, 1, device)
    alone, shared = toy.run(hidden, context_of(6)), toy.run(hidden, context_of(2, 4))
    assert not torch.equal(alone[0], shared[0])
    for seed, lens in enumerate([(6,), (2, 4), (6,), (8,), (1,)]):
        toy.check(seed, *lens)


def padding_never_reaches_a_real_row(backend: GraphBackend, device: str) -> None:
    toy = ToyBucket(backend, ToyDecoder(device=device), 8)
    hidden, context = rows_of(5, 3, device), context_of(5)
    first = toy.run(hidden, context)
    assert all(not tensor.isnan().any() for tensor in first)
    toy.static[5:] = 1e6
    again = own(toy.graph.replay(context), 5)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def pad_rows_of_out_are_zeroed(backend: GraphBackend, device: str) -> None:
    x = torch.ones(4, 2, device=device)

    def fill(context: ReplayContext, x: torch.Tensor, out: torch.Tensor) -> None:
        out[: context.num_rows] = x[: context.num_rows]

    def forward(breaks: Breaks[ReplayContext]) -> torch.Tensor:
        out = torch.full_like(x, float("nan"))
        breaks.graph_break(fill)(x, out=out)
        return out * 2

    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
    graph.capture(forward, ROWS)
    for num_rows in (1, 0, 3):
        replayed = graph.replay(ReplayContext(num_rows=num_rows))
        assert replayed.sum(1).tolist() == [4.0] * num_rows + [0.0] * (4 - num_rows)


def a_full_graph_has_no_breaks(backend: GraphBackend, device: str) -> None:
    x, state = torch.ones(4, device=device), torch.zeros(4, device=device)

    def forward(_: Breaks[ReplayContext]) -> torch.Tensor:
        state.add_(x)
        y = x
        for _ in range(3):
            y = y * 2 + 1
        return y

    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
    output = graph.capture(forward, ROWS)
    assert output.tolist() == [15.0] * 4
    assert state.tolist() == [1.0 + backend.num_warm_ups] * 4  # capturing runs once
    assert (graph.num_breaks, len(graph.segments)) == (0, 1)
    x.fill_(2)
    state.zero_()
    assert graph.replay(ROWS) is output
    assert output.tolist() == [23.0] * 4
    assert state.tolist() == [2.0] * 4


def segments_may_be_empty(backend: GraphBackend, device: str) -> None:
    seen: list[int] = []
    x = torch.zeros(4, device=device)

    def bump(context: ReplayContext, x: torch.Tensor) -> None:
        seen.append(context.num_rows)
        x.add_(1)

    def forward(breaks: Breaks[ReplayContext]) -> torch.Tensor:
        for _ in range(3):
            breaks.graph_break(bump)(x)
        return x

    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
    graph.capture(forward, ROWS)
    assert [segment.num_ops for segment in graph.segments] == [0] * 4
    x.zero_()
    seen.clear()
    assert graph.replay(ReplayContext(num_rows=2)).tolist() == [3.0] * 4
    assert seen == [2, 2, 2]


def what_a_break_returns_is_copied_to_where_it_was(backend: GraphBackend, device: str) -> None:
    x = torch.arange(4.0, device=device)

    def extremes(context: ReplayContext, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return x[: context.num_rows].max(), {"least": x[: context.num_rows].min()}

    def forward(breaks: Breaks[ReplayContext]) -> torch.Tensor:
        most, rest = breaks.graph_break(extremes)(x * 2)
        return most - rest["least"] + x

    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
    assert graph.capture(forward, ROWS).tolist() == [6.0, 7.0, 8.0, 9.0]
    x.mul_(10)
    assert graph.replay(ReplayContext(num_rows=2)).tolist() == [20.0, 30.0, 40.0, 50.0]


def a_break_that_changes_its_shape_is_refused(backend: GraphBackend, device: str) -> None:
    x = torch.ones(4, device=device)

    def real_rows(context: ReplayContext, x: torch.Tensor) -> torch.Tensor:
        return x[: context.num_rows].clone()

    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
    graph.capture(lambda breaks: breaks.graph_break(real_rows)(x) + 1, ROWS)
    with pytest.raises(GraphError, match=r"real_rows.*\(3,\).*\(4,\)"):
        graph.replay(ReplayContext(num_rows=3))
    assert graph.replay(ROWS).tolist() == [2.0] * 4


def a_break_inside_a_break_is_a_plain_call(backend: GraphBackend, device: str) -> None:
    x = torch.ones(4, device=device)

    def forward(breaks: Breaks[ReplayContext]) -> torch.Tensor:
        @breaks.graph_break
        def inner(context: ReplayContext, x: torch.Tensor) -> None:
            x.add_(context.num_rows)

        @breaks.graph_break
        def outer(context: ReplayContext, x: torch.Tensor) -> None:
            inner(x)
            x.mul_(2)

        y = x.clone()
        outer(y)
        return y + 0

    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
    assert graph.capture(forward, ROWS).tolist() == [10.0] * 4
    assert graph.num_breaks == 1


def a_failed_capture_leaves_nothing_behind(backend: GraphBackend, device: str) -> None:
    x = torch.ones(4, device=device)

    def fails_in_segment(breaks: Breaks[ReplayContext]) -> torch.Tensor:
        raise ZeroDivisionError

    def fail(context: ReplayContext) -> None:
        raise ZeroDivisionError

    def fails_in_break(breaks: Breaks[ReplayContext]) -> torch.Tensor:
        y = x + 1
        breaks.graph_break(fail)()
        return y

    for failing in (fails_in_segment, fails_in_break):
        graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
        with pytest.raises(ZeroDivisionError):
            graph.capture(failing, ROWS)
        assert (graph.is_captured, backend.is_capturing) == (False, False)
        assert (x + 1).tolist() == [2.0] * 4  # nothing records any more
        with pytest.raises(GraphError, match="not captured"):
            graph.replay(ROWS)
        graph.capture(lambda _: x * 3, ROWS)
        assert graph.replay(ROWS).tolist() == [3.0] * 4
    ToyBucket(backend, ToyDecoder(device=device), 4).check(0, 3)


def captures_do_not_nest(backend: GraphBackend, device: str) -> None:
    x = torch.ones(4, device=device)
    other: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend, name="other")
    other.capture(lambda _: x + 1, ROWS)

    def capture_inside(_: object) -> torch.Tensor:
        return BreakableGraph[ReplayContext, torch.Tensor](backend, name="inner").capture(
            lambda _: x + 1, ROWS
        )

    def replay_inside(_: object) -> torch.Tensor:
        return other.replay(ROWS)

    for inside in (capture_inside, replay_inside):
        for forward in (inside, lambda breaks, body=inside: breaks.graph_break(body)()):
            graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend, name="outer")
            num_warm_ups, backend.num_warm_ups = backend.num_warm_ups, 0
            with pytest.raises(GraphError, match="another graph"):
                graph.capture(forward, ROWS)
            backend.num_warm_ups = num_warm_ups
    assert other.replay(ROWS).tolist() == [2.0] * 4


def host_reads_are_refused_by_name(backend: GraphBackend, device: str) -> None:
    x = torch.ones(4, device=device)
    for reading, named in [
        (lambda: x.sum().item(), "item"),
        (lambda: bool(x.sum() > 0), "_local_scalar_dense"),
        (lambda: x.tolist(), "tolist"),
        (lambda: x.cpu().numpy() if device == "cpu" else x.cpu(), "numpy|_to_copy"),
        (lambda: x.nonzero(), "nonzero"),
        (lambda: x[x > 0], "index"),
        (lambda: x.masked_select(x > 0), "masked_select"),
        (lambda: torch.equal(x, x), "equal"),
        (lambda: x.repeat_interleave(x.long()), "repeat_interleave"),
        (lambda: torch.unique(x), "unique"),
        (lambda: x.index_put_((x > 0,), x.sum()), "index_put_"),
        (lambda: torch.tensor([1.0, 2.0], device=device), r"torch\.tensor"),
    ]:
        graph: BreakableGraph[ReplayContext, object] = BreakableGraph(backend)
        num_warm_ups, backend.num_warm_ups = backend.num_warm_ups, 0
        with pytest.raises(CaptureRefused, match=named):
            graph.capture(lambda _, reading=reading: (x * 2, reading()), ROWS)
        backend.num_warm_ups = num_warm_ups
    assert x.sum().item() == 4.0
    graph = BreakableGraph(backend)
    graph.capture(lambda _: x[torch.arange(2, device=device)], ROWS)


def outputs_outlive_the_next_replay_as_copies_only(backend: GraphBackend, device: str) -> None:
    toy = ToyBucket(backend, ToyDecoder(device=device), 8)
    held = toy.run(rows_of(8, 1, device), context_of(8))
    before, leased = own(held), toy.graph.output
    toy.run(rows_of(8, 2, device), context_of(8))
    assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))
    assert not torch.equal(leased[0], before[0])


def exchanged_weights_are_found_and_changed_ones_followed(backend: GraphBackend, device: str) -> None:
    model, static = ToyDecoder(device=device), rows_of(4, 1, device)
    pool = GraphPool(backend)
    pooled = pool.capture(
        GraphKind.DRAFT_PREFILL,
        4,
        lambda b: model.forward(b, static),
        context_of(4),
        parameters=model.parameters,
    )
    model.weights["1.o"].mul_(2)
    assert pool.stale() == {}
    expected = model.eager(static, context_of(4))
    torch.testing.assert_close(pooled.replay(context_of(4)), expected, atol=1e-5, rtol=1e-5)
    model.weights["1.o"] = model.weights["1.o"] * 2
    torch.testing.assert_close(pooled.replay(context_of(4)), expected, atol=1e-5, rtol=1e-5)  # the old memory
    assert pool.stale() == {"draft_prefill 4": ["1.o"]}
    pool.check_every = 1
    with pytest.raises(StaleGraph, match=r"1\.o"):
        pooled.replay(context_of(4))


def big_small_churn_and_back(backend: GraphBackend, device: str) -> None:
    model = ToyDecoder(device=device)
    big, small = ToyBucket(backend, model, 16), ToyBucket(backend, model, 4)
    with backend.eager_region():
        churn = [torch.full((count, HIDDEN), float("nan"), device=device) for count in (4, 16, 1, 64) * 8]
        del churn[::2]
        for seed, (toy, *lens) in enumerate([(big, 9, 4), (small, 3), (big, 16), (small, 4), (big, 1)]):
            toy.check(seed, *lens)
    assert all(tensor.isnan().all() for tensor in churn)  # and the graphs wrote to nobody else's memory


def one_eager_break_gives_the_same(backend: GraphBackend, device: str) -> None:
    toy = ToyBucket(backend, ToyDecoder(device=device), 8, as_one_break=True)
    assert toy.graph.num_breaks == 1
    assert [segment.num_ops for segment in toy.graph.segments] == [0, 0]
    for seed, lens in enumerate([(6,), (2, 4), (8,)]):
        toy.check(seed, *lens)


def python_branches_are_frozen(backend: GraphBackend, device: str) -> None:
    model = ToyDecoder(device=device)
    toy = ToyBucket(backend, model, 4)
    model.aux = (1, 2)
    hidden, context = rows_of(4, 1, device), context_of(4)
    replayed, eager = toy.run(hidden, context), model.eager(hidden, context)
    torch.testing.assert_close(replayed[0], eager[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(replayed[1], eager[1], atol=1e-3)


LAWS: list[Law] = [
    replay_equals_eager_in_every_bucket,
    replays_follow_their_inputs_and_contexts,
    padding_never_reaches_a_real_row,
    pad_rows_of_out_are_zeroed,
    a_full_graph_has_no_breaks,
    segments_may_be_empty,
    what_a_break_returns_is_copied_to_where_it_was,
    a_break_that_changes_its_shape_is_refused,
    a_break_inside_a_break_is_a_plain_call,
    a_failed_capture_leaves_nothing_behind,
    captures_do_not_nest,
    host_reads_are_refused_by_name,
    outputs_outlive_the_next_replay_as_copies_only,
    exchanged_weights_are_found_and_changed_ones_followed,
    big_small_churn_and_back,
    one_eager_break_gives_the_same,
    python_branches_are_frozen,
]
