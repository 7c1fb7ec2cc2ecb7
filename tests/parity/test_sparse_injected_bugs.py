"""Mistakes with plans that hold shapes and write targets, planted one at a time: none goes unnoticed.

The check is what `test_sparse` asserts: answers with partly accepted chains and trees, eagerly and in graphs,
are those of the definition, and the side caches hold the means of what is stored.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from baton.engine import sparse_rows
from baton.engine.attention import sparse_attention as backend
from baton.engine.attention.backend import PagedAttention
from baton.engine.attention.metadata import AttentionMetadata
from baton.engine.batch.padding import pad_rows
from baton.engine.kv.sparse_layout import SparseLayout
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.speculative.step import fused_step
from baton.kernels import sparse_attention, sparse_caches
from baton.kernels.sparse_caches import DENSE_TARGET, INDEX_TARGET, POSITION, PlanMismatch, SparsePlan
from baton.tests.parity.answer_engine import CHAIN, TREE, Models, Way
from baton.tests.parity.sparse_engine import Expected, check_way
from baton.tests.parity.sparse_toys import sparse_config

pytestmark = pytest.mark.usefixtures("one_thread")

Bug = Callable[[pytest.MonkeyPatch], None]
CHAINS = Way(shape=CHAIN, batch=3, chunk=16)
TREES = Way(shape=TREE, batch=3, chunk=16)
GRAPHS = Way(shape=CHAIN, batch=3, chunk=16, has_graphs=True)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(sparse_config(), torch.float32, "cpu")


@pytest.fixture(scope="module")
def expected(models: Models) -> Expected:
    return Expected.of(models)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


# --- plans of another batch ---------------------------------------------------------------------------------


def planned_before_padding(patch: pytest.MonkeyPatch) -> None:
    """The bug of an engine with such a backend: verify planned its batch, padded it in place for the peers'
    sake, and told the forward not to plan again. The forward's own check is left out, as it was there."""
    forward = ModelRunner.forward

    def plan_and_pad(runner: ModelRunner, batch, metadata=None):
        metadata = runner.attention.plan(batch)
        padded = pad_rows(batch, 4)
        for name in ("input_ids", "positions", "slots", "input_embeds"):
            setattr(batch, name, getattr(padded, name))
        return forward(runner, batch, metadata)

    patch.setattr(ModelRunner, "forward", plan_and_pad)
    patch.setattr(AttentionMetadata, "check", lambda metadata, num_rows: None)


def step_planned_before_padding(patch: pytest.MonkeyPatch) -> None:
    """The same in a step: its plan is for the requests without the idle ones that pad them."""
    plan_rows = sparse_rows.plan_rows

    def unpadded(sizes, page_table, kv_lens, num_rows, **others):
        count = kv_lens.shape[0]
        real = max(count - 1, 1)
        return plan_rows(sizes, page_table[:real], kv_lens[:real], num_rows // count * real, **others)

    patch.setattr(sparse_rows, "plan_rows", unpadded)


def planned_once(patch: pytest.MonkeyPatch) -> None:
    """A graph replays with the plan that was made when it was captured, of idle requests. A step without a
    graph skips its plan, too."""
    known: dict[int, SparsePlan] = {}

    def kept(sizes, page_table, kv_lens, num_rows, **others):
        if num_rows not in known:
            rows = torch.full((4, num_rows), -1, dtype=torch.int64, device=kv_lens.device)
            rows[0].fill_(0)
            stamp = torch.zeros(2 + kv_lens.shape[0], dtype=torch.int64, device=kv_lens.device)
            stamp[0].fill_(num_rows)
            stamp[1].fill_(kv_lens.shape[0])
            known[num_rows] = SparsePlan(rows, stamp)
        return known[num_rows]

    patch.setattr(sparse_rows, "plan_rows", kept)


def without_assertions(patch: pytest.MonkeyPatch) -> None:
    """The kernels take any plan."""
    for module in (sparse_attention, sparse_caches):
        patch.setattr(module, "check_plan", lambda *args: None)


def refused(models: Models, way: Way, expected: Expected, **how: int) -> None:
    with pytest.raises(PlanMismatch, match="plan the padded batch, before each forward"):
        check_way(models, way, expected.tokens, **how)


def test_a_plan_made_before_padding_is_refused(models, expected, patch):
    planned_before_padding(patch)
    refused(models, Way(batch=3, chunk=7), expected)


def test_a_steps_plan_made_before_padding_is_refused(models, expected, patch):
    step_planned_before_padding(patch)
    refused(models, CHAINS, expected, row_multiple=4)


@pytest.mark.parametrize("way", [CHAINS, GRAPHS], ids=str)
def test_a_step_that_skips_its_plan_is_refused(models, expected, patch, caplog, way: Way):
    planned_once(patch)
    refused(models, way, expected)
    assert "cannot be captured" not in caplog.text, "the replay is what is refused"


@pytest.mark.parametrize(
    ("bug", "is_silent"),
    [(planned_before_padding, True), (step_planned_before_padding, True), (planned_once, False)],
)
def test_only_the_assertions_of_the_kernels_refuse_a_stale_plan(models, expected, patch, bug: Bug, is_silent):
    """Without them, an old plan gives wrong answers. A plan without the padding goes unnoticed on a CPU,
    whose kernels never touch padding, where those of a device would read past the plan's end."""
    without_assertions(patch)
    bug(patch)
    wrong: list[Exception] = []
    try:
        check_way(models, CHAINS, expected.tokens, row_multiple=4)
    except (AssertionError, IndexError) as error:
        wrong.append(error)
    assert bool(wrong) is not is_silent


# --- wrong write targets ------------------------------------------------------------------------------------


def changed_targets(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Every plan has the rows that `change` makes of the right ones."""
    with_targets = sparse_caches._with_targets
    patch.setattr(
        sparse_caches, "_with_targets", lambda *args, **others: change(with_targets(*args, **others))
    )


def moved(kind: int, by: int) -> Bug:
    def change(rows: torch.Tensor) -> torch.Tensor:
        rows[kind] = torch.where(rows[kind] >= 0, rows[kind] + by, -1)
        return rows

    return lambda patch: changed_targets(patch, change)


def other_pages(patch: pytest.MonkeyPatch) -> None:
    """The plan of a step has the targets of another request's pages."""
    plan_rows = sparse_rows.plan_rows

    def flipped(sizes, page_table, kv_lens, num_rows, **others):
        return plan_rows(sizes, page_table.flip(0), kv_lens, num_rows, **others)

    patch.setattr(sparse_rows, "plan_rows", flipped)


def one_token_late(patch: pytest.MonkeyPatch) -> None:
    """The target belongs to the row before: its group is not complete when it is compressed."""

    def change(rows: torch.Tensor) -> torch.Tensor:
        early = torch.cat((rows[INDEX_TARGET:, 1:], torch.full((2, 1), -1)), dim=1)
        is_next = torch.cat((rows[POSITION, 1:] == rows[POSITION, :-1] + 1, torch.zeros(1, dtype=torch.bool)))
        rows[INDEX_TARGET:] = early.where(is_next, -1)
        return rows

    changed_targets(patch, change)


def never_rewritten(patch: pytest.MonkeyPatch) -> None:
    """An entry that was written once is kept, though its last token was a rejected draft."""
    written: set[int] = set()

    def change(rows: torch.Tensor) -> torch.Tensor:
        for column, target in enumerate(rows[INDEX_TARGET].tolist()):
            if target in written:
                rows[INDEX_TARGET, column] = -1
            elif target >= 0:
                written.add(target)
        return rows

    changed_targets(patch, change)


def drafts_not_written(patch: pytest.MonkeyPatch) -> None:
    """Rows of drafts write nothing, in case they are rejected."""

    def first_rows(sizes, page_table, kv_lens, num_rows, **others):
        made = plan_rows(sizes, page_table, kv_lens, num_rows, **others)
        is_draft = torch.arange(num_rows) % (num_rows // max(kv_lens.shape[0], 1)) > 0
        made.rows[INDEX_TARGET:, is_draft] = -1
        return made

    plan_rows = sparse_rows.plan_rows
    patch.setattr(sparse_rows, "plan_rows", first_rows)


def branches_not_compressed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused_step, "compress_commits", lambda *args: None)


def nodes_write_at_their_slots(patch: pytest.MonkeyPatch) -> None:
    """Rows of a tree are planned like a chain's."""
    plan_rows = sparse_rows.plan_rows

    def as_chain(sizes, page_table, kv_lens, num_rows, tree_mask=None):
        return plan_rows(sizes, page_table, kv_lens, num_rows)

    patch.setattr(sparse_rows, "plan_rows", as_chain)


def branches_move_side_caches(patch: pytest.MonkeyPatch) -> None:
    """The rows of accepted branches are moved in every layer of a page."""
    patch.setattr(SparseLayout, "token_layers", property(lambda layout: layout.num_layers))


def windows_one_token_short(patch: pytest.MonkeyPatch) -> None:
    start = sparse_attention.window_start
    patch.setattr(sparse_attention, "window_start", lambda position, sizes: start(position, sizes) + 1)


def oldest_blocks_first(patch: pytest.MonkeyPatch) -> None:
    """Scores are ignored."""
    pick = sparse_attention._pick_blocks
    patch.setattr(
        sparse_attention, "_pick_blocks", lambda queries, *rest: pick(torch.zeros_like(queries), *rest)
    )


def unread_layers_complete_nothing(patch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt whose last layer is not read writes no entries of that layer."""
    patch.setattr(backend.SparseAttention, "_bind_unread", PagedAttention._bind_unread)


BUGS: dict[str, tuple[Bug, Way]] = {
    "index target off by one": (moved(INDEX_TARGET, 1), CHAINS),
    "dense target off by one": (moved(DENSE_TARGET, 1), CHAINS),
    "other pages": (other_pages, CHAINS),
    "one token early": (one_token_late, CHAINS),
    "never rewritten": (never_rewritten, CHAINS),
    "drafts not written": (drafts_not_written, CHAINS),
    "unread layers complete nothing": (unread_layers_complete_nothing, CHAINS),
    "branches not compressed": (branches_not_compressed, TREES),
    "nodes write at their slots": (nodes_write_at_their_slots, TREES),
    "branches move side caches": (branches_move_side_caches, TREES),
    "windows one token short": (windows_one_token_short, CHAINS),
    "scores ignored": (oldest_blocks_first, CHAINS),
}


ASSERTED = ("index target off by one", "dense target off by one", "other pages", "one token early")


@pytest.mark.parametrize("bug", ASSERTED)
def test_a_wrong_target_is_refused_by_the_kernels(models, expected, patch, bug: str):
    plant, way = BUGS[bug]
    plant(patch)
    with pytest.raises(PlanMismatch, match="planned for other pages"):
        check_way(models, way, expected.tokens)


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_target_or_window_is_detected(models, expected, patch, bug: str):
    """Without the assertions of the kernels, the law of the side caches or the tokens tell."""
    without_assertions(patch)
    plant, way = BUGS[bug]
    plant(patch)
    with pytest.raises((AssertionError, IndexError)):
        check_way(models, way, expected.tokens)


def test_the_plans_of_backend_and_steps_are_one_function(models, expected):
    """So that a bug planted in one is planted in all."""
    assert backend.plan_rows is sparse_rows.plan_rows is sparse_caches.plan_rows
    for way in (CHAINS, TREES):
        check_way(models, way, expected.tokens, row_multiple=4)
