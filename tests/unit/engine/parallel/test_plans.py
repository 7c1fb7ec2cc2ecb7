"""A plan arrives as it was told, and nothing else is taken for one."""

import msgspec
import pytest
from baton.engine.parallel.plan_messages import (
    CatchUpPlan,
    CopyPagePlan,
    DraftPart,
    DraftPrefillPlan,
    DrawPart,
    JoinPart,
    JoinPlan,
    LeavePlan,
    Plan,
    PromptPart,
    PromptPlan,
    StepPlan,
    StepShape,
    decode_plan,
    encode_plan,
)

DRAW = DrawPart(seed=2**64 - 1, temperature=0.5, top_k=3)
JOIN = JoinPart(slot=1, newest=5, length=6, remaining=7, capacity=32, draft_row=1, pages=[3, 4], draw=DRAW)
DRAFT = DraftPart(pages=[1], start=0, next_ids=[3], state_row=1, is_final=True, known_ids=[2, 3], draw=DRAW)
PLANS = [
    PromptPlan(parts=[PromptPart(ids=[1, 2], start=3, pages=[4])], logit_rows=[1], has_features=True),
    DraftPrefillPlan(parts=[DRAFT]),
    JoinPlan(joining=[JOIN]),
    StepPlan(slots=[1], shape=StepShape(steps=3, topk=1, num_nodes=4), num_rows=2, is_graph=True),
    CatchUpPlan(slots=[1, 2], num_rows=2, is_graph=False),
    CopyPagePlan(source=3, target=4),
    LeavePlan(),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: type(plan).__name__)
def test_a_plan_arrives_as_it_was_told(plan: Plan):
    assert decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize(
    "data", [b"", b"\x80", msgspec.msgpack.encode({"type": "RunPlan"}), b"\x93\x01\x02\x03"]
)
def test_other_bytes_are_no_plan(data: bytes):
    with pytest.raises(msgspec.DecodeError):
        decode_plan(data)
