"""Bugs of a target's forward, planted for the duration of a `with` block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from baton.engine.models.llama import LlamaForCausalLM
from baton.engine.row_attention import RowPlan
from baton.engine.row_plans import plan_rows
from baton.engine.speculative.step import fused_step


@contextmanager
def skipped_layer(model: LlamaForCausalLM) -> Iterator[None]:
    """The last layer is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "layers", model.layers[:-1])
        yield


@contextmanager
def wrong_position(model: LlamaForCausalLM) -> Iterator[None]:
    """The fourth row of each four has the position of the next one."""
    trunk = model.trunk

    def shifted(hidden: torch.Tensor, positions: torch.Tensor, *rest: object) -> object:
        number = torch.arange(positions.shape[0], device=positions.device)
        return trunk(hidden, positions + (number % 4 == 3), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "trunk", shifted)
        yield


@contextmanager
def wrong_page(model: LlamaForCausalLM) -> Iterator[None]:
    """Steps read the second page of a request in the place of its first one."""

    def make(
        pool: object, rows: object, pages: torch.Tensor, lens: object, mask: object, **others: bool
    ) -> RowPlan:
        wrong = pages.clone()
        wrong[:, 0] = torch.where(pages[:, 1] > 0, pages[:, 1], pages[:, 0])
        return plan_rows(pool, rows, wrong, lens, mask, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_step, "plan_rows", make)
        yield


FORWARD_BUGS: tuple[Callable[[LlamaForCausalLM], AbstractContextManager[None]], ...] = (
    skipped_layer,
    wrong_position,
    wrong_page,
)
