"""The cost model: the estimated time of a prompt on prefill and on decode."""

import pytest
from baton.cluster.protocol.messages import DecodeTimeline, PrefillTimeline
from baton.router.scheduling.cost_model import CostModel, LinearFit
from baton.router.workers.registry import Backlog


def line(*samples):
    made = LinearFit()
    for tokens, seconds in samples:
        made.add(tokens, seconds)
    return made


def test_a_line_finds_fixed_cost_and_slope():
    made = line(*[(tokens, 0.010 + 0.0002 * tokens) for tokens in (16, 100, 1000, 400, 32)])
    assert made.at(0) == pytest.approx(0.010, rel=1e-6)
    assert made.at(500) == pytest.approx(0.110, rel=1e-6)


def test_equal_sizes_give_their_mean_and_noise_no_negative_time():
    assert line((64, 0.02), (64, 0.04)).at(64) == pytest.approx(0.03, rel=0.02)
    falling = line((1, 0.5), (1000, 0.1))
    assert falling.at(5000) > 0
    steep = line((100, 0.001), (200, 0.1))
    assert steep.at(1) >= 0


def test_recent_measurements_outweigh_old_ones():
    made = line(*[(100, 1.0)] * 50, *[(100, 0.1)] * 200)
    assert made.at(100) == pytest.approx(0.1, rel=0.2)


def test_prompts_one_after_the_other_take_their_times_together():
    made = line(*[(1024, 0.022)] * 3)
    assert made.total(40, 40 * 1024) == pytest.approx(40 * 0.022)
    assert made.total(0, 0) == 0
    other = line(*[(tokens, 0.010 + 0.0002 * tokens) for tokens in (16, 100, 1000)])
    assert other.total(3, 600) == pytest.approx(3 * other.at(200))


def test_long_prompts_do_not_decide_the_time_of_short_ones():
    """Llama-3.1-8B on an H200: 35 us a token of the long one, 21 of the short ones."""
    made = line(*[(1024, 0.0215)] * 20, (8192, 0.194), (32768, 1.158), (32768, 1.158), *[(1024, 0.0215)] * 20)
    assert made.at(1024) == pytest.approx(0.0215, rel=0.1)
    assert made.total(32, 32 * 1024) == pytest.approx(32 * 0.0215, rel=0.1)


def test_forwards_that_wait_behind_each_other_count_once():
    made = CostModel()
    for _ in range(3):
        made.prefilled(PrefillTimeline(prefill_ms=86, work_ms=22, prompt_tokens=1024), is_local=False)
    assert made.on_prefill(Backlog(prompts=9, tokens=9 * 1024), 1024) == pytest.approx(0.22)
    older = PrefillTimeline(prefill_ms=86, prompt_tokens=1024)
    assert older.busy_ms == 86, "a worker that does not tell"


def costs(prefill_ms_per_token=0.1, handoff_ms=5.0, local_ms_per_token=0.0):
    made = CostModel()
    for tokens in (32, 256, 512):
        made.prefilled(
            PrefillTimeline(prefill_ms=prefill_ms_per_token * tokens, prompt_tokens=tokens), is_local=False
        )
        made.handed_over(tokens, DecodeTimeline(handoff_ms=handoff_ms, handoff_bytes=1))
        if local_ms_per_token:
            timeline = PrefillTimeline(prefill_ms=local_ms_per_token * tokens, prompt_tokens=tokens)
            made.prefilled(timeline, is_local=True)
    return made


def cheaper(made, new, *, on_prefill=None, queued=0, queued_here=0, running=0):
    return made.is_local_cheaper(
        new_on_prefill=new if on_prefill is None else on_prefill,
        new_on_decode=new,
        before_on_prefill=Backlog(prompts=bool(queued), tokens=queued),
        before_on_decode=Backlog(prompts=bool(queued_here), tokens=queued_here),
        running=running,
    )


def test_nothing_is_cheaper_on_decode_before_prefill_and_handoff_are_known():
    assert not cheaper(CostModel(), 1)
    one_sided = CostModel()
    for _ in range(9):
        one_sided.prefilled(PrefillTimeline(prefill_ms=1000, prompt_tokens=10), is_local=False)
    assert not cheaper(one_sided, 1)


def test_short_prompts_are_cheaper_on_idle_decode_and_long_ones_are_not():
    made = costs(handoff_ms=5.0)
    assert cheaper(made, 16)
    assert not cheaper(made, 16, running=8)  # 1.6 ms for each of nine requests
    assert not cheaper(made, 400, running=1)


def test_a_long_prefill_queue_or_a_cached_prompt_favours_decode():
    made = costs(handoff_ms=1.0)
    assert not cheaper(made, 200, running=1)
    assert cheaper(made, 200, running=1, queued=400)
    assert cheaper(made, 16, on_prefill=500, running=8)


def test_decodes_own_times_count_once_it_has_some():
    assert cheaper(costs(), 100)
    assert not cheaper(costs(local_ms_per_token=1.0), 100)


def test_cached_tokens_are_not_computed_and_count_for_nothing():
    made = CostModel()
    for _ in range(3):
        made.prefilled(PrefillTimeline(prefill_ms=10, prompt_tokens=1000, cached_tokens=900), is_local=False)
    assert made.prefill.at(100) == pytest.approx(0.010, rel=0.02)


def test_prompts_queued_on_decode_delay_the_new_one_but_no_stream_more():
    made = costs(handoff_ms=5.0)
    assert cheaper(made, 16, queued_here=40)
    assert not cheaper(made, 16, queued_here=60), "6 ms behind them, 5 ms over prefill"
    assert cheaper(made, 16, queued_here=60, queued=60)
    assert cheaper(made, 16, queued_here=10, running=2), "its own 1.6 ms count for each stream, theirs not"
