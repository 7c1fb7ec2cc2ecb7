"""The loss of a drafter's outputs, with gradients that are computed together with it.

Logits are computed for a part of the rows at a time and replaced by their gradients, so that no more than
PART_ELEMENTS of them are in memory, and none is computed twice. Legend: P draft positions, M rows of each, V
vocabulary, H hidden size.
"""

from collections.abc import Callable

import torch

from .gradients import GradientContext

PART_ELEMENTS = 1 << 28

# (rows of the part, logits [P*m, V]): writes the gradient of the objective by the logits over them, and
# returns this part of the objective
Grade = Callable[[slice, torch.Tensor], torch.Tensor]


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, rows: torch.Tensor, weight: torch.Tensor, size: int, grade: Grade
    ) -> torch.Tensor:
        places, count, width = rows.shape
        product = weight.to(rows.dtype)
        needs_weight = weight.requires_grad
        by_rows = torch.empty_like(rows)
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            x = rows[:, part].reshape(-1, width)
            logits = x @ product.T
            total += grade(part, logits)
            by_rows[:, part] = (logits @ product).view(places, -1, width)
            if by_weight is not None:
                by_weight += logits.T @ x
        ctx.save_for_backward(by_rows, *(() if by_weight is None else (by_weight.to(weight.dtype),)))
        return total

    @staticmethod
    def backward(ctx: GradientContext, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_rows, *by_weight = ctx.saved_tensors
        (given,) = gradients
        of_weight = by_weight[0] * given.to(by_weight[0].dtype) if by_weight else None
        return by_rows * given.to(by_rows.dtype), of_weight, None, None


def output_loss(rows: torch.Tensor, weight: torch.Tensor, grade: Grade) -> torch.Tensor:
    """The objective, a scalar, of `rows` `[P, M, H]` under the output projection `weight` `[V, H]`.

    `grade` is called for consecutive parts of the M rows; its logits have P groups of them.
    """
    places = max(1, rows.shape[0])
    size = max(1, PART_ELEMENTS // (places * weight.shape[0]))
    loss: torch.Tensor = _OutputLoss.apply(rows, weight, size, grade)  # type: ignore[no-untyped-call]
    return loss
