"""rms_norm, silu_mul and rope equal their definitions, odd shapes and both dtypes included."""

import pytest
import torch
from baton.kernels.rms_norm import rms_norm, rms_norm_reference
from baton.kernels.rope import apply_rope, rope_reference
from baton.kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 42), (5, 7, 123)])
def test_rms_norm_equals_its_definition(shape: tuple[int, ...], dtype: torch.dtype):
    x, weight = randn(*shape, dtype=dtype), 1 + randn(shape[-1], dtype=dtype, seed=1)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-2),
        rms_norm_reference(x, weight, 1e-2),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


def test_rms_norm_makes_the_mean_square_one():
    assert rms_norm(randn(4, 64) * 30, torch.ones(64), 0.0).pow(2).mean(-1) == pytest.approx(
        [1.0] * 4, abs=1e-5
    )


@pytest.mark.parametrize("weight", [torch.ones(7), torch.ones(8, dtype=torch.bfloat16)])
def test_rms_norm_refuses_a_weight_that_does_not_fit(weight: torch.Tensor):
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(randn(2, 8), weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (6, 246)])
def test_silu_mul_gates_the_second_half_by_the_first(shape: tuple[int, ...], dtype: torch.dtype):
    x = randn(*shape, dtype=dtype)
    gate, up = x[:, : shape[1] // 2].double(), x[:, shape[1] // 2 :].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(silu_mul(x).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_silu_mul_refuses_an_odd_width():
    with pytest.raises(ValueError, match="7"):
        silu_mul(randn(2, 7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 2, 8), (1, 1, 2), (5, 3, 42)])
def test_rope_with_signed_tables_equals_its_definition(shape: tuple[int, int, int], dtype: torch.dtype):
    x = randn(*shape, dtype=dtype)
    angles = randn(shape[0], shape[2] // 2, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    ours = apply_rope(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    torch.testing.assert_close(
        ours, rope_reference(x, cos, sin), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_rope_keeps_lengths_and_makes_scores_depend_on_distance_alone():
    head_dim, inverse = 8, torch.tensor([1.0, 0.5, 0.1, 0.01])
    q, k = randn(1, 1, head_dim).expand(2, 1, -1), randn(1, 1, head_dim, seed=1).expand(2, 1, -1)

    def rotate(x: torch.Tensor, positions: list[float]) -> torch.Tensor:
        angles = torch.tensor(positions)[:, None] * inverse
        return apply_rope(x, angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1))

    rotated_q, rotated_k = rotate(q, [5.0, 105.0]), rotate(k, [2.0, 102.0])
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1))
    scores = (rotated_q * rotated_k).sum(-1).flatten()
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)
    assert abs(scores[0] - (q[0] * k[0]).sum()) > 1e-2


def test_rope_refuses_tables_of_other_rows():
    with pytest.raises(ValueError, match="apply_rope"):
        apply_rope(randn(3, 2, 8), randn(2, 8), randn(2, 8))
