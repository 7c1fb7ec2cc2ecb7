"""The tape records each operation, and replaying it equals running it."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.breakable import BreakableGraph, ReplayContext
from baton.engine.graphs.errors import CaptureRefused
from baton.engine.graphs.tape.arena import ArenaMemory
from baton.engine.graphs.tape.tape import TapeBackend
from hypothesis import given
from hypothesis import strategies as st

ROWS = ReplayContext(num_rows=4)
Graph = BreakableGraph[ReplayContext, object]


@pytest.fixture(params=["kept", "arena"])
def backend(request: pytest.FixtureRequest) -> GraphBackend:
    return TapeBackend(None if request.param == "kept" else ArenaMemory(1 << 14, poison=True))


def captured(backend: GraphBackend, fn: Callable[[], object]) -> Graph:
    graph: Graph = BreakableGraph(backend)
    graph.capture(lambda _: fn(), ROWS)
    return graph


def num_ops(fn: Callable[[], object], backend: GraphBackend | None = None) -> int:
    return captured(backend or TapeBackend(), fn).segments[0].num_ops


def x_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "linear with bias": lambda x, w: F.linear(x, w, w[0]),
    "rms norm": lambda x, w: F.rms_norm(x, (8,), w[0], 1e-5),
    "layer norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "embedding": lambda x, w: F.embedding((x[:, 0].abs() * 3).long().clamp(max=7), w),
    "attention": lambda x, w: F.scaled_dot_product_attention(
        x.view(1, 2, 4, 4), w[:4].view(1, 2, 4, 4), x.view(1, 2, 4, 4)
    ),
    "masked attention": lambda x, w: F.scaled_dot_product_attention(
        x.view(1, 2, 4, 4), x.view(1, 2, 4, 4), x.view(1, 2, 4, 4), attn_mask=w[:4, :4] > 0
    ),
    "dtypes": lambda x, w: (
        (x.to(torch.bfloat16) @ w.to(torch.bfloat16)).to(torch.float32) + x.double().float()
    ),
    "python scalars": lambda x, w: (x * 2 + 1.5) / 3 - (2 - x) ** 2,
    "layouts": lambda x, w: torch.cat(
        (x.t().contiguous(), w.flatten(0).view(8, 8)[:, :4].reshape(8, 4)), dim=1
    ),
    "roll and stack": lambda x, w: torch.stack((x.roll(4, dims=-1), x.flip(0))),
    "many outputs": lambda x, w: (
        x.topk(3, dim=-1),
        x.sort(dim=0),
        torch.max(x, dim=1),
        x.split(2),
        x.unbind(0),
    ),
    "gather and scatter": lambda x, w: torch.zeros_like(x).scatter(
        1, x.argsort(dim=1), x.gather(1, x.argsort(dim=1))
    ),
    "writes in place": lambda x, w: x.clone().mul_(2).index_copy_(0, torch.arange(2), w[:2]).clamp_(min=-0.5),
    "writes through views": lambda x, w: _write_columns(torch.empty_like(x), x),
    "cumulative": lambda x, w: (
        x.cumsum(0),
        x.softmax(-1),
        x.log_softmax(-1),
        x.argmax(-1),
        x.sum(),
        x.mean(0),
    ),
    "where and masks": lambda x, w: torch.where(x > 0, x, torch.full_like(x, -1.0)).masked_fill(x > 1, 9.0),
    "integers": lambda x, w: (x * 10).long() // 3 % 5 + torch.arange(8),
    "einsum and bmm": lambda x, w: torch.einsum("th,hk->kt", x, w) + torch.bmm(x[None], w[None])[0].t(),
    "one tensor back, unchanged": lambda x, w: x,
}


def _write_columns(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out[:, 4:] = x[:, :4]
    out[:, :4].copy_(x[:, 4:])
    out[:, 2] = 3
    out[0] += 1
    return out


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_replay_equals_doing_it_again(name: str, backend: GraphBackend):
    operation, x, w = OPERATIONS[name], x_of(), x_of().repeat(2, 1)
    graph = captured(backend, lambda: operation(x, w))
    for seed in range(1, 4):
        x.copy_(x_of(seed))
        torch.testing.assert_close(graph.replay(ROWS), operation(x.clone(), w), atol=0, rtol=0)


@pytest.mark.parametrize("name", OPERATIONS)
def test_capturing_returns_what_eager_returns(name: str, backend: GraphBackend):
    operation, x, w = OPERATIONS[name], x_of(3), x_of().repeat(2, 1)
    torch.testing.assert_close(
        captured(backend, lambda: operation(x, w)).output, operation(x, w), atol=0, rtol=0
    )


UNARY = [
    lambda t: t * 0.5 + 1, lambda t: t.t().contiguous().t(), lambda t: F.silu(t), lambda t: t.reshape(8,
    4).view(4, 8),
    lambda t: t.clone().add_(1), lambda t: t.chunk(2, dim=-1)[0].repeat(1, 2), lambda t: t.expand(2, 4, 8)[1],
    lambda t: t.to(torch.float64).to(torch.float32), lambda t: torch.cat((t[2:], t[:2])),
    lambda t: t.softmax(-1),
]  # fmt: skip


@given(program=st.lists(st.tuples(st.sampled_from(UNARY), st.booleans()), min_size=1, max_size=12))
def test_random_programs_replay_exactly(program: list[tuple[Callable[[torch.Tensor], torch.Tensor], bool]]):
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        tensors, kept = x, []
        for step, keeps in program:
            tensors = step(tensors)
            if keeps:
                kept.append(tensors)
        return [*kept, tensors]

    x = x_of()
    graphs = [
        captured(TapeBackend(memory), lambda: run(x)) for memory in (None, ArenaMemory(1 << 12, poison=True))
    ]
    for seed in (1, 2):
        x.copy_(x_of(seed))
        for graph in graphs:
            torch.testing.assert_close(graph.replay(ROWS), run(x.clone()), atol=0, rtol=0)


# --- what is written down -----------------------------------------------------------------------------------


def test_operations_are_dropped_as_views_only_when_they_did_not_copy():
    x = x_of()
    assert num_ops(lambda: x.view(8, 4).t()[1:].chunk(2)[0].expand(3, 2, 8)) == 0
    assert num_ops(lambda: x.reshape(8, 4)) == 0  # contiguous: a view
    assert num_ops(lambda: x.t().reshape(4, 8)) == 1  # not contiguous: a copy
    assert num_ops(lambda: (x.to(torch.float32), x.contiguous(), x.detach())) == 0
    assert num_ops(lambda: x.to(torch.float64)) == 1


def test_uninitialised_memory_needs_no_step():
    x = x_of()
    assert num_ops(lambda: (torch.empty_like(x), x.new_empty(3), torch.empty(2, 2))) == 0
    assert num_ops(lambda: torch.empty_like(x).zero_()) == 1


def test_writes_to_static_memory_happen_once_for_each_replay(backend: GraphBackend):
    counter = torch.zeros(2)
    graph = captured(backend, lambda: counter.add_(1))
    assert counter.tolist() == [1, 1]
    graph.replay(ROWS)
    graph.replay(ROWS)
    assert counter.tolist() == [3, 3]


def test_random_numbers_are_drawn_anew(backend: GraphBackend):
    generator = torch.Generator().manual_seed(5)
    graph = captured(backend, lambda: torch.rand(6, generator=generator))
    twice = [graph.replay(ROWS).clone() for _ in range(2)]
    generator.manual_seed(5)
    drawn = [torch.rand(6, generator=generator) for _ in range(3)]
    assert all(map(torch.equal, twice, drawn[1:]))


def test_an_empty_batch_is_captured_and_replayed(backend: GraphBackend):
    x, w = torch.empty(0, 8), x_of()
    graph = captured(backend, lambda: torch.cat((F.linear(x, w), F.linear(x, w))).softmax(-1))
    assert graph.replay(ROWS).shape == (0, 4)


# --- custom operations and what is refused ------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Iterator[str]:
    """Three operations whose bodies work below the dispatcher, with numpy, on addresses."""
    namespace = "baton_tape_test"
    library = torch.library.Library(namespace, "DEF")

    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * np.float32(factor))

    def store(pool: torch.Tensor, x: torch.Tensor) -> None:
        assert pool.data_ptr() != x.data_ptr()
        pool.numpy()[: x.shape[0]] = x.numpy()

    def secret(x: torch.Tensor) -> None:
        x.numpy()[:] = 0

    for schema, body in [
        ("scaled(Tensor x, float factor) -> Tensor", scaled),
        ("store(Tensor(a!) pool, Tensor x) -> ()", store),
        ("secret(Tensor x) -> ()", secret),
    ]:
        library.define(schema)
        library.impl(schema.partition("(")[0], body, "CPU")
    yield namespace
    library._destroy()


def test_custom_operations_are_replayed(library: str, backend: GraphBackend):
    ops, x, pool = getattr(torch.ops, library), x_of(), torch.zeros(6, 8)

    def forward() -> torch.Tensor:
        ops.store(pool, ops.scaled(x, 2.0))
        return pool[:4] + 1

    graph = captured(backend, forward)
    x.copy_(x_of(1))
    torch.testing.assert_close(graph.replay(ROWS), x_of(1) * 2 + 1)
    torch.testing.assert_close(pool[:4], x_of(1) * 2)


def test_a_custom_operation_with_undeclared_effects_is_refused(library: str):
    x = x_of()
    with pytest.raises(CaptureRefused, match=r"secret.*mutates_args"):
        captured(TapeBackend(), lambda: getattr(torch.ops, library).secret(x))


@pytest.mark.parametrize(
    ("doing", "named"),
    [
        (lambda x: x.data_ptr(), "data_ptr"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: np.asarray(x), "__array__"),
        (lambda x: int(x[0, 0]), "_local_scalar_dense"),
        (lambda x: [0] * 9 if x[0, 0] else [], "_local_scalar_dense"),
        (lambda x: torch.allclose(x, x), "allclose"),
        (lambda x: torch.from_numpy(np.zeros(2)), "lift_fresh"),
        (lambda x: torch.as_tensor([1]), "as_tensor"),
        (lambda x: x.t_(), "t_"),
        (lambda x: x.resize_(2, 2), "resize_"),
        (lambda x: x.set_(x.clone()), "set_"),
        (lambda x: x[x > 0].sum(), "index.Tensor.*boolean mask"),
        (lambda x: x.masked_scatter(x > 0, x).masked_select(x > 0), "masked_select"),
    ],
)
def test_an_operation_that_a_tape_cannot_record_is_refused_by_name(
    doing: Callable[[torch.Tensor], object], named: str
):
    x = x_of()
    with pytest.raises(CaptureRefused, match=named):
        captured(TapeBackend(), lambda: doing(x))
    assert (x.shape, x.sum().item(), x.data_ptr() > 0) == ((4, 8), x_of().sum().item(), True)


def test_host_reads_are_allowed_in_breaks(backend: GraphBackend):
    x, seen = x_of(), []
    graph: Graph = BreakableGraph(backend)
    graph.capture(lambda breaks: breaks.graph_break(lambda _, y: seen.append(y.sum().item()))(x * 2), ROWS)
    graph.replay(ROWS)
    assert seen == [(x * 2).sum().item()] * 2


def test_other_threads_are_neither_recorded_nor_refused(backend: GraphBackend):
    x, seen = x_of(), []

    def forward() -> torch.Tensor:
        thread = threading.Thread(target=lambda: seen.append((x_of(1) + 1).sum().item()))
        thread.start()
        thread.join()
        return x * 2

    assert num_ops(forward, backend) == 1
    assert seen == [(x_of(1) + 1).sum().item()]
