"""Mistakes with blocks and their context, planted one at a time: a law that is tested elsewhere fails."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.row_attention import RowPlan
from baton.engine.speculative.drafters import dflash, dflash_head
from baton.engine.speculative.drafters.dflash import DflashDrafter
from baton.engine.speculative.drafters.dflash_config import DflashConfig
from baton.engine.speculative.drafters.dflash_head import ContextProjection, DflashHead
from baton.engine.speculative.drafters.protocol import DraftView
from baton.engine.speculative.drafting.choice import DraftSampling
from baton.tests.parity import dflash_engine, test_dflash, test_dflash_oracle
from baton.tests.parity.dflash_toys import dflash_config, dflash_tensors, write_dflash, write_dflash_oracle

pytestmark = pytest.mark.usefixtures("one_thread")

Law = Callable[[Path, Path], None]


def with_config(planting: pytest.MonkeyPatch, change: Callable[[DflashConfig], DflashConfig]) -> None:
    load = dflash_engine.load_dflash_config
    planting.setattr(dflash_engine, "load_dflash_config", lambda *a, **k: change(load(*a, **k)))


def mask_id_off(planting: pytest.MonkeyPatch) -> None:
    with_config(planting, lambda config: replace(config, mask_token_id=config.mask_token_id - 1))


def causal_block(planting: pytest.MonkeyPatch) -> None:
    with_config(planting, lambda config: replace(config, are_causal=(True,) * config.num_layers))


def window_ignored(planting: pytest.MonkeyPatch) -> None:
    with_config(planting, lambda config: replace(config, windows=(None,) * config.num_layers))


def window_too_long(planting: pytest.MonkeyPatch) -> None:
    mask = dflash.window_mask
    planting.setattr(dflash, "window_mask", lambda window, *a, **k: mask(window + 1, *a, **k))


def window_of_other_pages(planting: pytest.MonkeyPatch) -> None:
    """Planted: the window is cut from the first pages instead of the last ones."""
    plan = dflash.RowPlan

    def first_pages(pool, rows, pages, lens, mask=None, **how):
        return plan(pool, rows, pages.roll(1, dims=1), lens, mask, **how)

    planting.setattr(dflash, "RowPlan", first_pages)


def context_includes_the_anchor(planting: pytest.MonkeyPatch) -> None:
    """Planted: one context row too many, so the newest token's row counts as committed."""
    plan = dflash.block_plan

    def longer(pool: object, rows: torch.Tensor, view: DraftView, *a: object, **k: object) -> RowPlan:
        return plan(pool, rows, replace(view, extend_lens=view.extend_lens + 1), *a, **k)

    planting.setattr(dflash, "block_plan", longer)


def features_one_row_late(planting: pytest.MonkeyPatch) -> None:
    observe = DflashDrafter.observe
    planting.setattr(
        DflashDrafter,
        "observe",
        lambda self, view, features, *rest: observe(self, view, features.roll(1, dims=0), *rest),
    )


def guesses_never_overwritten(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(DflashDrafter, "observe", lambda self, *_: None)


def projection_by_other_layers(planting: pytest.MonkeyPatch) -> None:
    init = ContextProjection.__init__
    planting.setattr(
        ContextProjection, "__init__", lambda self, layers, config: init(self, layers[::-1], config)
    )


def projection_at_the_next_position(planting: pytest.MonkeyPatch) -> None:
    project = DflashHead.project
    planting.setattr(
        DflashHead, "project", lambda self, features, positions: project(self, features, positions + 1)
    )


def context_without_its_norm(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(dflash_head.ContextProjection, "__call__", _of_unnormed(ContextProjection.__call__))


def _of_unnormed(call: Callable) -> Callable:
    return lambda self, vectors, cos, sin: call(self, 2 * vectors, cos, sin)


def noise_of_another_position(planting: pytest.MonkeyPatch) -> None:
    choose = DraftSampling.choose
    planting.setattr(DraftSampling, "choose", lambda self, logits, at, ids: choose(self, logits, at + 1, ids))


def is_a_recompute(layout: str) -> Law:
    return lambda target, path: test_dflash.test_drafts_are_those_of_a_full_recompute_without_a_cache(
        target, path, layout, False
    )


def the_oracle_is_accepted(target: Path, path: Path) -> None:
    models = write_dflash_oracle(path / "oracle")
    test_dflash_oracle.test_blocks_of_any_length_are_accepted_in_full_for_any_chunks(models, 4, 1000)


def noise_is_shared(target: Path, path: Path) -> None:
    head = write_dflash(path / "head", dflash_config(), dflash_tensors())
    test_dflash.test_a_block_with_the_targets_logits_proposes_what_the_target_chooses(target, head)


PLANTS = [
    (mask_id_off, is_a_recompute("full")),
    (mask_id_off, the_oracle_is_accepted),
    (causal_block, is_a_recompute("full")),
    (causal_block, is_a_recompute("sliding, not causal")),
    (window_ignored, is_a_recompute("sliding")),
    (window_too_long, is_a_recompute("sliding")),
    (window_too_long, is_a_recompute("window below the block")),
    (window_of_other_pages, is_a_recompute("sliding")),
    (context_includes_the_anchor, is_a_recompute("full")),
    (features_one_row_late, is_a_recompute("full")),
    (features_one_row_late, the_oracle_is_accepted),
    (guesses_never_overwritten, is_a_recompute("full")),
    (guesses_never_overwritten, the_oracle_is_accepted),
    (projection_by_other_layers, is_a_recompute("full")),
    (projection_by_other_layers, the_oracle_is_accepted),
    (projection_at_the_next_position, is_a_recompute("full")),
    (projection_at_the_next_position, the_oracle_is_accepted),
    (context_without_its_norm, is_a_recompute("full")),
    (noise_of_another_position, noise_is_shared),
]


@pytest.mark.parametrize(("plant", "law"), PLANTS)
def test_each_law_fails_for_its_bug(deep_target, tmp_path, monkeypatch, plant, law):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        law(deep_target, tmp_path)


@pytest.mark.parametrize("law", [the_oracle_is_accepted, noise_is_shared])
def test_the_laws_hold_without_a_bug(deep_target, tmp_path, law):
    law(deep_target, tmp_path)
