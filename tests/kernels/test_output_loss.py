"""The loss of rows of logits and its gradient in place equal autograd's, in torch and as kernels."""

import pytest
import torch
from baton.kernels import output_loss
from baton.kernels.output_loss import LossRows, loss_gradient, loss_rows
from baton.tests.kernels.cases import randn

Target = torch.Tensor
SHAPES = [(6, 3, 37), (4, 4, 5000)]


def targets(rows: int, count: int, width: int) -> list[Target]:
    return [randn(count, width, seed=1).softmax(-1), torch.arange(rows) * 7 % width]


def by_autograd(
    logits: torch.Tensor, target: Target, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, gradient of their weighted sum)."""
    given = logits.clone().requires_grad_()
    shares = given.log_softmax(-1)
    if target.dim() == 1:
        losses = -shares.gather(1, target[:, None])[:, 0]
    else:
        losses = -(target.repeat(len(logits) // len(target), 1) * shares).sum(-1)
    (losses * weights).sum().backward()
    assert given.grad is not None
    return losses.detach(), given.grad


def check(
    found: LossRows, logits: torch.Tensor, gradient: torch.Tensor, target: Target, weights: torch.Tensor
):
    losses, wanted = by_autograd(logits, target, weights)
    torch.testing.assert_close(found.loss, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert torch.equal(found.best, logits.argmax(-1))


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_equal_those_of_autograd(shape: tuple[int, int, int], is_dense: bool) -> None:
    rows, count, width = shape
    logits, weights = 4 * randn(rows, width), torch.arange(rows) / 7
    target = targets(rows, count, width)[0 if is_dense else 1]
    found, gradient = loss_rows(logits, target), logits.clone()
    loss_gradient(gradient, target, found.norm, weights)
    check(found, logits, gradient, target, weights)


@pytest.mark.parametrize("is_dense", [True, False])
def test_kernels_equal_autograd(interpreter: None, is_dense: bool) -> None:
    for rows, count, width in SHAPES:
        logits, weights = 4 * randn(rows, width), torch.arange(rows) / 7
        target = targets(rows, count, width)[0 if is_dense else 1]
        found, gradient = output_loss._rows_triton(logits, target), logits.clone()
        output_loss._gradient_triton(gradient, target, found.norm, weights)
        check(found, logits, gradient, target, weights)


def test_kernels_compile_for_an_h200(compiled_for_h200: list) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for target in (torch.zeros(3, 49_152, dtype=dtype), torch.zeros(6, dtype=torch.int64)):
            logits, norm = torch.zeros(6, 49_152, dtype=dtype), torch.zeros(6)
            output_loss._rows_triton(logits, target)
            output_loss._gradient_triton(logits, target, norm, norm)
    assert {name for name, _ in compiled_for_h200} == {"_loss_rows_kernel", "_loss_gradient_kernel"}


def test_targets_of_another_shape_are_refused() -> None:
    for target in (torch.zeros(4, 10), torch.zeros(5, dtype=torch.int64), torch.zeros(3, 9)):
        with pytest.raises(ValueError, match="output_loss"):
            loss_rows(torch.zeros(6, 10), target)
