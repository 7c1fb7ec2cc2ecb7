"""The trace context of a client's headers, beside the OpenTelemetry SDK's own reading of them."""

import pytest
from baton.cluster.protocol.codec import control_down_decoder, encode
from baton.cluster.protocol.messages import Prefill, Sampling
from baton.cluster.telemetry.trace_context import (
    LONGEST_STATE,
    NOWHERE,
    TraceContext,
    carried_by,
    context_of,
    parent_of,
    state_of,
)
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.trace import TraceState

PARENT = "00-" + "4b" * 16 + "-" + "00f067aa0ba902b7" + "-01"
STATE = "rojo=00f067aa0ba902b7,1a@congo=t61rcWkgMzE"


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (PARENT, PARENT), (" " + PARENT + " ", PARENT), (PARENT[:-2] + "03", PARENT),
        (PARENT[:-2] + "fe", PARENT[:-2] + "00"),
        ("01" + PARENT[2:] + "-more", PARENT), ("", ""), (PARENT + "-more", ""), (PARENT.upper(), ""),
        ("ff" + PARENT[2:], ""), ("00-" + "0" * 32 + PARENT[35:], ""), (PARENT[:36] + "0" * 16 + "-01", ""),
        (PARENT[:-1], ""), ("01" + PARENT[2:] + "-" + "x" * 600, ""),
    ],
)  # fmt: skip
def test_a_parent_is_read_as_the_standard_says(header, parent):
    assert parent_of(header) == parent


@pytest.mark.parametrize(
    ("headers", "state"),
    [
        ([], ""), ([""], ""), ([STATE], STATE), ([" a=1 ,\t b=2,,"], "a=1,b=2"), (["a=1", "b=2"], "a=1,b=2"),
        (["a= x !"], "a= x !"), (["a=1,a=2"], ""), (["a=1", "a=1"], ""), (["a=1,b"], ""), (["A=1"], ""),
        (["=1"], ""),
        (["a="], ""), (["a=1=2"], ""), (["a=\u00e9"], ""), (["a=1\n"], ""), (["a b=1"], ""),
        (["a" * 257 + "=1"], ""),
        (["a=" + "1" * 257], ""), ([",".join(f"k{i}=1" for i in range(32))],
        ",".join(f"k{i}=1" for i in range(32))),
        ([",".join(f"k{i}=1" for i in range(33))], ""),
    ],
)  # fmt: skip
def test_an_invalid_state_is_dropped_whole(headers, state):
    assert state_of(headers) == state


def test_a_long_state_drops_long_members_first_and_then_the_last():
    members = [f"k{i}=" + "x" * 50 for i in range(8)]
    long = "long=" + "y" * 200
    assert state_of([",".join([members[0], long, *members[1:]])]) == ",".join(members)
    many = [f"k{i:02}=" + "x" * 60 for i in range(20)]
    kept = state_of([",".join(many)])
    assert kept == ",".join(many[:7])
    assert len(kept) + 1 + len(many[7]) > LONGEST_STATE >= len(kept)


@pytest.mark.parametrize("parents", [[], [PARENT, PARENT], ["00-xyz"], [PARENT + "-more"]])
def test_without_one_good_parent_there_is_no_state_either(parents):
    assert context_of(parents, [STATE]) == NOWHERE
    assert not context_of(parents, [STATE])


def test_a_bad_state_leaves_the_parent_as_it_is():
    assert context_of([PARENT], ["a=1,a=2"]) == TraceContext(PARENT)


member = st.from_regex(r"[a-z0-9_@*/ =,A-Z\t-]{0,12}=?[ -~]{0,6}", fullmatch=True)


@given(st.lists(member, max_size=5).map(",".join))
@example(STATE)
@example("a=1, ,b=2")
def test_a_trace_state_is_passed_on_as_the_sdk_reads_it(header):
    theirs = TraceState.from_header([header]).to_header()
    ours = state_of([header])
    if theirs:
        assert ours == theirs
    assert state_of([ours]) == ours, "what is passed on is good itself"


def test_every_state_that_is_passed_on_fits_its_message():
    longest = ",".join(f"k{i}=" + "~" * 120 for i in range(4))
    state = state_of([longest + ",e=" + "x" * (LONGEST_STATE - len(longest) - 3)])
    assert len(state) == LONGEST_STATE
    who = {"room": "a" * 32, "epoch": 0, "instance": "b" * 32}
    order = Prefill(
        prompt_ids=[1], sampling=Sampling(), deadline_ms=0, traceparent=PARENT, tracestate=state, **who
    )
    assert carried_by(control_down_decoder().decode(encode(order))) == TraceContext(PARENT, state)
