"""Mistakes with MTP modules, planted one at a time: a law that is tested elsewhere breaks for each."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from baton.engine.host_copy import IntArray
from baton.engine.speculative.drafters import mtp_deep, mtp_prefill, mtp_window
from baton.engine.speculative.drafters.mtp_head import MtpHead
from baton.engine.speculative.drafters.mtp_prefill import look_ahead
from baton.engine.speculative.drafters.mtp_window import front_window, newest_rows, plan_modules, rotate
from baton.tests.parity import test_mtp
from baton.tests.parity.mtp_laws import check_accept_lens, write_kinds
from baton.tests.parity.mtp_oracles import write_oracle_target

pytestmark = pytest.mark.usefixtures("one_thread")

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="session")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_kinds(tmp_path_factory.mktemp("mtp"), target)


# --- bugs of the window -------------------------------------------------------------------------------------


def rows_at_the_end_of_the_window(planting: pytest.MonkeyPatch) -> None:
    """The front of the next step ends with the window instead of with the accepted rows."""
    planting.setattr(
        mtp_deep,
        "newest_rows",
        lambda values, emitted, count: newest_rows(
            values, torch.full_like(emitted, values.shape[1] - count), count
        ),
    )


def rows_one_behind_the_boundary(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        mtp_deep,
        "newest_rows",
        lambda values, emitted, count: newest_rows(values, (emitted - 1).clamp(min=0), count),
    )


def front_rows_are_not_written_again(planting: pytest.MonkeyPatch) -> None:
    def without_rows(*parts: object) -> object:
        window = front_window(*parts)
        return window._replace(rows=torch.zeros_like(window.rows))

    planting.setattr(mtp_deep, "front_window", without_rows)


def plan_of_the_first_module_for_all(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        mtp_deep,
        "plan_modules",
        lambda *parts, **settings: [plan_modules(*parts, **settings)[0]] * parts[-1],
    )


def tokens_are_not_rotated(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        mtp_window,
        "rotate",
        lambda tokens, select, drafts: tokens.scatter(1, select[:, None], drafts[:, None]),
    )


def proposal_one_row_off(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        mtp_window,
        "rotate",
        lambda tokens, select, drafts: rotate(tokens, (select - 1).clamp(min=0), drafts),
    )


def rows_of_the_last_verified_node_are_selected(planting: pytest.MonkeyPatch) -> None:
    run = mtp_window.draft_window

    def select_last(head: object, window: object, *parts: object) -> object:
        last = torch.full_like(window.select, window.tokens.shape[1] - 1)
        return run(head, window._replace(select=last), *parts)

    planting.setattr(mtp_deep, "draft_window", select_last)


# --- bugs of the prefill and of the hidden states -----------------------------------------------------------


def look_ahead_one_short(planting: pytest.MonkeyPatch) -> None:
    def short(item: object, first: int, depth: int) -> IntArray:
        found = look_ahead(item, first, depth)
        return np.concatenate((found[:, :1], found[:, : depth - 1]), axis=1)

    planting.setattr(mtp_prefill, "look_ahead", short)


def look_ahead_one_too_far(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        mtp_prefill, "look_ahead", lambda item, first, depth: look_ahead(item, first, depth + 1)[:, 1:]
    )


def recycled_on_the_other_side_of_the_norm(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        MtpHead,
        "feedback",
        lambda self, out, module=0: out if self.is_normed else self.modules[module].norm(out),
    )


def target_hidden_on_the_other_side_of_the_norm(planting: pytest.MonkeyPatch) -> None:
    planting.setattr(
        MtpHead,
        "project",
        lambda self, features: features if self.is_normed else self._target_norm(features),
    )


def logits_of_the_first_modules_norm(planting: pytest.MonkeyPatch) -> None:
    compute = MtpHead.compute_logits
    planting.setattr(MtpHead, "compute_logits", lambda self, out, module=0: compute(self, out, 0))


def behind_every_accept_length(target: Path, heads: dict[str, Path], kind: str) -> None:
    check_accept_lens(target, heads[kind])


def recomputed(target: Path, heads: dict[str, Path], kind: str) -> None:
    test_mtp.test_drafts_are_those_of_a_full_recompute_without_a_cache(target, heads, kind)


def chunked(target: Path, heads: dict[str, Path], kind: str) -> None:
    test_mtp.test_any_chunking_of_the_prefill_gives_the_same_kv_and_drafts(target, heads, kind, 3)


def decoded(target: Path, heads: dict[str, Path], kind: str) -> None:
    test_mtp.test_kv_after_decoding_is_that_of_a_prefill_of_the_same_tokens(target, heads, kind)


Law = Callable[[Path, dict[str, Path], str], None]
DEEP_BUGS: list[tuple[Plant, Law]] = [
    (rows_at_the_end_of_the_window, behind_every_accept_length),
    (rows_one_behind_the_boundary, behind_every_accept_length),
    (front_rows_are_not_written_again, behind_every_accept_length),
    (plan_of_the_first_module_for_all, behind_every_accept_length),
    (tokens_are_not_rotated, behind_every_accept_length),
    (proposal_one_row_off, behind_every_accept_length),
    (rows_of_the_last_verified_node_are_selected, behind_every_accept_length),
    (look_ahead_one_short, recomputed),
    (look_ahead_one_too_far, recomputed),
    (logits_of_the_first_modules_norm, recomputed),
    (plan_of_the_first_module_for_all, recomputed),
    (plan_of_the_first_module_for_all, decoded),
]


@pytest.mark.parametrize("kind", ["chained", pytest.param("independent", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("plant", "law"), DEEP_BUGS, ids=lambda part: part.__name__)
def test_a_bug_of_several_modules_breaks_a_law(target, heads, monkeypatch, kind, plant, law) -> None:
    law(target, heads, kind)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        law(target, heads, kind)


@pytest.mark.parametrize("kind", ["chained", "shared"])
@pytest.mark.parametrize(
    "plant", [recycled_on_the_other_side_of_the_norm, target_hidden_on_the_other_side_of_the_norm]
)
def test_a_hidden_on_the_wrong_side_of_a_norm_breaks_a_law(target, heads, monkeypatch, kind, plant) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        recomputed(target, heads, kind)


@pytest.mark.parametrize(
    ("plant", "source"),
    [
        (rows_at_the_end_of_the_window, "embed"),
        (front_rows_are_not_written_again, "embed"),
        (plan_of_the_first_module_for_all, "embed"),
        (tokens_are_not_rotated, "embed"),
        (rows_of_the_last_verified_node_are_selected, "embed"),
        (rows_at_the_end_of_the_window, "hidden"),
        (rows_of_the_last_verified_node_are_selected, "hidden"),
    ],
)
def test_the_oracle_sees_a_bug_where_some_drafts_are_wrong(tmp_path, monkeypatch, plant, source) -> None:
    """So acceptance alone raises the alarm. By hidden states it sees rows only: tokens are no part of them,
    and the KV of all modules holds the same.
    """
    plant(monkeypatch)
    target = write_oracle_target(tmp_path / "target")
    with pytest.raises(AssertionError):
        test_mtp.test_guesses_that_were_wrong_leave_no_trace_in_the_kv_of_any_module(
            target, tmp_path / "head", monkeypatch, source, True, 0.5
        )
