"""Kernels that start before the one in front of them ends give the bits of kernels that do not."""

from collections.abc import Callable

import pytest
import torch
from baton.kernels import chained_launch
from baton.kernels.chained_launch import has_chained_launches, unchained_launches
from baton.kernels.choose_token import choose_token
from baton.kernels.kv_store import kv_rows
from baton.kernels.normed_linear import UnscaledRows, scaled_linear, sum_linear
from baton.kernels.rms_norm import NextNorm, rms_norm
from baton.kernels.rotary_product import rotary_product
from baton.kernels.rotate_store import rotate_store
from baton.kernels.skinny_linear import linear
from baton.kernels.verify_attention import paged_verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not has_chained_launches(torch.device("cuda")),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 9, 3, 64, 4096
LAYERS, PAGE_SIZE, CONTEXT, REPLAYS = 24, 16, 300, 200
DEVICE = "cuda"


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE) * scale


class Chain:
    """A decode step of random weights, of `num_rows` requests. The memory of each layer is given back before
    the next one, so that a kernel that starts too early meets what another still reads or writes.
    """

    def __init__(self, num_rows: int) -> None:
        torch.manual_seed(7)
        self.num_rows = num_rows
        self.x = random(num_rows, HIDDEN)
        self.norms = [NextNorm(1 + random(HIDDEN, scale=0.1), 1e-5) for _ in range(2 * LAYERS)]
        shapes = (
            ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN),
            (HIDDEN, INNER),
        )  # fmt: skip
        self.weights = [[random(*shape, scale=shape[1] ** -0.5) for shape in shapes] for _ in range(LAYERS)]
        self.head = random(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
        pages_each = CONTEXT // PAGE_SIZE + 1
        self.kv = random(1 + num_rows * pages_each, LAYERS, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.tables = 1 + torch.arange(num_rows * pages_each, device=DEVICE).view(num_rows, pages_each)
        self.lens = torch.full((num_rows,), CONTEXT, dtype=torch.int64, device=DEVICE)
        self.angles = random(num_rows, HEAD_DIM), random(num_rows, HEAD_DIM)
        self.knobs = (
            torch.arange(num_rows, device=DEVICE), torch.full((num_rows,), CONTEXT, device=DEVICE),
            torch.ones(num_rows, dtype=torch.float64, device=DEVICE), None,
            torch.arange(num_rows, device=DEVICE) % 2 == 0, None,
        )  # fmt: skip

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(the last rows, their tokens)."""
        places = self.tables[:, (CONTEXT - 1) // PAGE_SIZE] * PAGE_SIZE + (CONTEXT - 1) % PAGE_SIZE
        slots = kv_rows(places, self.kv)
        residual = self.x
        rows: UnscaledRows | None = None
        for layer, (_, output, gate_up, down) in enumerate(self.weights):
            if rows is None:
                heads = linear(rms_norm(residual, self.norms[0].weight, 1e-5), self.weights[0][0])
                heads = heads.view(self.num_rows, -1, HEAD_DIM)
                q = rotate_store(self.kv, layer, slots, heads, *self.angles)
            else:
                weight = self.weights[layer][0]
                q = rotary_product(self.kv, layer, slots, rows, weight, None, *self.angles)
            attended = paged_verify(q[:, None], self.kv, layer, self.tables, self.lens, HEAD_DIM**-0.5)
            attended = attended.reshape(self.num_rows, -1)
            middle, rows = sum_linear(attended, output, None, residual, self.norms[2 * layer + 1])
            inner = scaled_linear(rows, gate_up, is_gated=True)
            following = self.norms[2 * layer + 2] if layer + 1 < LAYERS else NextNorm(self.x[0], 1e-5)
            residual, rows = sum_linear(inner, down, None, middle, following)
        logits = linear(rms_norm(residual, self.norms[0].weight, 1e-5), self.head).float()
        return residual, choose_token(logits, *self.knobs)[0]


def captured(run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def check_equal(chain: Chain, run: Callable[[], tuple[torch.Tensor, ...]], times: int) -> None:
    """`run`, whose launches are chained, has the bits of a graph whose launches are not."""
    with unchained_launches():
        plain, expected = captured(chain.step)
    kv = chain.kv.clone()
    for turn in range(times):
        chain.x.copy_(random(*chain.x.shape))
        plain.replay()
        wanted, stored = [each.clone() for each in expected], chain.kv.clone()
        chain.kv.copy_(kv)
        found = run()
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs), f"replay {turn}"
        assert torch.equal(chain.kv, stored), f"pages of replay {turn}"
        kv = stored


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_a_graph_has_the_bits_of_launches_that_wait(num_rows: int):
    chain = Chain(num_rows)
    graph, results = captured(chain.step)

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return results

    check_equal(chain, replay, REPLAYS)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_launches_without_a_graph_have_the_bits_of_launches_that_wait(num_rows: int):
    chain = Chain(num_rows)
    check_equal(chain, chain.step, 20)


def test_the_launches_of_the_chain_are_chained(monkeypatch: pytest.MonkeyPatch):
    asked, known = [], chained_launch.has_chained_launches
    monkeypatch.setattr(
        chained_launch, "has_chained_launches", lambda device: asked.append(device) or known(device)
    )
    Chain(1).step()
    assert len(asked) > 6 * LAYERS
    with unchained_launches():
        count = len(asked)
        Chain(1).step()
        assert len(asked) == count, "nothing is asked where launches are unchained"
