"""Sizes that have a graph, and the one predicate that decides whether a batch uses one."""

import logging

import pytest
import torch
from baton.decode.accept_monitor import AcceptCanary
from baton.engine.graphs.breakable import ReplayContext
from baton.engine.graphs.bucketed_graphs import BatchShape, GraphFamily, GraphLimits, PathDecision
from baton.engine.graphs.buckets import batch_buckets, bucket_for, sparse, token_buckets, with_middles
from baton.engine.graphs.errors import GraphError
from baton.engine.graphs.graph_pool import FallbackReason, GraphKind, GraphPool
from baton.engine.graphs.static import load_rows
from baton.engine.graphs.tape.tape import TapeBackend


def family(buckets=(2, 8, 32), **limits):
    made = GraphFamily(GraphPool(TapeBackend()), GraphKind.DECODE_STEP, buckets, GraphLimits(**limits))
    static = torch.zeros(max(buckets))
    made.capture(
        lambda bucket, _: static[:bucket] + 1, lambda bucket: ReplayContext(num_rows=bucket), lambda: ()
    )
    return made


@pytest.mark.parametrize("most", [1, 2, 5, 16, 17, 256, 300, 8192])
def test_token_buckets_end_with_the_largest_and_never_waste_more_than_half(most):
    buckets = token_buckets(most)
    assert buckets[-1] == most
    assert list(buckets) == sorted(set(buckets))
    for tokens in range(1, min(most, 1024) + 1):
        bucket = bucket_for(buckets, tokens)
        assert tokens <= bucket < 2 * tokens or bucket == tokens
        assert tokens < 32 or bucket < 1.51 * tokens
    assert len(buckets) < 30


@pytest.mark.parametrize(("most", "expected"), [
    (1, (1,)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 16)), (20, (1, 2, 4, 8, 16, 20)),
    (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
])  # fmt: skip
def test_batch_buckets(most, expected):
    assert batch_buckets(most) == expected


@pytest.mark.parametrize("most", [1, 3, 16, 24, 50, 128, 200, 256])
def test_sampled_steps_pad_at_most_a_third_with_few_sizes(most):
    buckets = batch_buckets(most)
    few, fewest = with_middles(buckets), sparse(buckets)
    assert {*fewest} <= {*few} <= {*buckets}
    assert len(few) <= len(fewest) + 4
    for count in range(1, most + 1):
        assert bucket_for(few, count) <= max(16, 1.5 * count)


def test_rows_beyond_the_largest_bucket_have_no_bucket():
    assert [bucket_for((2, 8), size) for size in (0, 1, 2, 3, 8, 9)] == [2, 2, 2, 8, 8, 0]


@pytest.mark.parametrize(("shape", "reason"), [
    (BatchShape(size=0, rows=4), FallbackReason.IDLE_RANK),
    (BatchShape(size=1, rows=4, hidden=2), FallbackReason.HIDDEN_MODE),
    (BatchShape(size=1, rows=3), FallbackReason.VERIFY_MODE),
    (BatchShape(size=1, rows=4, pages=11), FallbackReason.CONTEXT_OVER_PLANNED),
    (BatchShape(size=33, rows=4), FallbackReason.BATCH_OVER_PLANNED),
])  # fmt: skip
def test_each_reason_against_a_graph_has_its_name(shape, reason):
    made = family(is_by_token=False, rows=4, pages=10, hidden=1)
    assert made.decide(BatchShape(size=3, rows=4, pages=10, hidden=1)) == PathDecision(
        kind=made.kind, bucket=8
    )
    assert made.decide(shape) == PathDecision(kind=made.kind, reason=reason)
    assert made.pool.report().kinds[0].fallbacks == {reason.value: 1}


def test_objections_of_token_buckets():
    made = family(is_by_token=True)
    decided = {size: made.peek(BatchShape(size=size)) for size in (1, 3, 4, 15, 16, 33)}
    assert {size: d.bucket for size, d in decided.items()} == {1: 2, 3: 0, 4: 8, 15: 0, 16: 32, 33: 0}
    assert decided[3].reason is decided[15].reason is FallbackReason.PADDING_OVER_2X
    assert decided[33].reason is FallbackReason.TOKENS_OVER_MAX
    assert made.pool.report().kinds[0].fallbacks == {}, "peeking counts nothing"


def test_a_dropped_graph_and_a_disabled_family_are_reasons_of_their_own():
    made = family(is_by_token=False)
    made.drop(8)
    assert made.decide(BatchShape(size=5)).reason is FallbackReason.CAPTURE_FAILED
    assert made.decide(BatchShape(size=2)).bucket == 2
    assert made.pool.report().kinds[0].buckets == (2, 32)
    made.is_enabled = False
    assert made.decide(BatchShape(size=2)).reason is FallbackReason.DISABLED


def test_a_bucket_that_cannot_be_captured_is_logged_and_left_out(caplog):
    made = GraphFamily(
        GraphPool(TapeBackend()), GraphKind.EDITED_STEP, (1, 2, 4), GraphLimits(is_by_token=False)
    )
    static = torch.ones(4)

    def forward(bucket, _):
        return static[:bucket].sum() + (static[0].item() if bucket == 2 else 0)

    with caplog.at_level(logging.ERROR):
        made.capture(forward, lambda bucket: ReplayContext(num_rows=bucket), lambda: ())
    assert made.captured == (1, 4)
    assert "edited_step 2 cannot be captured" in caplog.text
    assert made.replay(made.decide(BatchShape(size=3)), ReplayContext(num_rows=3)) == 4.0


def test_a_decision_of_another_kind_or_for_eager_is_no_graph():
    made = family(is_by_token=False)
    other = PathDecision(kind=GraphKind.RANKED_STEP, bucket=2)
    for decision in (PathDecision(), other, PathDecision(kind=made.kind, bucket=3)):
        with pytest.raises(GraphError, match="no decision"):
            made.replay(decision, ReplayContext(num_rows=1))


def test_static_rows_are_loaded_with_their_padding_or_not_at_all():
    static = torch.full((6, 2), float("nan"))
    load_rows(static, torch.ones(3, 2), 5, name="x")
    assert static[:5].tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]] * 2
    assert static[5].isnan().all()
    for values in (torch.ones(3, 3), torch.ones(3, 1), torch.ones(6, 2), torch.ones(3, 2).long()):
        with pytest.raises(GraphError, match=r"x \(\d, \d\).*\(6, 2\)"):
            load_rows(static, values, 5, name="x")


# --- the canary ---------------------------------------------------------------------------------------------


def warnings(caplog):
    return [record.getMessage() for record in caplog.records]


def test_the_canary_waits_for_a_full_window_and_warns_once_per_cool_down(caplog):
    canary = AcceptCanary()
    for i in range(63):
        canary.observe(1, 0.1 * i)
    assert (canary.accept_length, warnings(caplog)) == (None, [])
    canary.observe(1, 7.0)
    assert "accept length 1.00 over the last 64 verifies" in warnings(caplog)[0]
    for now in (8.0, 100.0, 306.9):
        canary.observe(1, now)
    assert len(warnings(caplog)) == 1
    canary.observe(1, 307.0)
    assert len(warnings(caplog)) == 2


def test_the_canary_is_silent_while_drafts_are_accepted(caplog):
    canary = AcceptCanary()
    for i in range(400):
        canary.observe(3 if i % 20 == 0 else 1, float(i))  # 1.1: poor, but alive
    assert warnings(caplog) == []
    for i in range(64):
        canary.observe(1, 400.0 + i)
    assert len(warnings(caplog)) == 1
