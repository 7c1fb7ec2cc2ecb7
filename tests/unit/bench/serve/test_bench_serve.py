"""`baton bench serve` against a scripted endpoint in virtual time: its figures equal the scripted delays."""

import asyncio
import itertools
import json
import math
import random
from types import SimpleNamespace

import pytest
from baton.bench.arguments import SAMPLING
from baton.bench.serve.arguments import parse
from baton.bench.serve.bench import model_of, plan_of
from baton.bench.serve.client import LoadClient, TimedCall, endpoint_of
from baton.bench.serve.figures import Goals, figures_of, percentile, spread, ttft_ms
from baton.bench.serve.load import Bound, Level, Run
from baton.bench.serve.prompts import COMPLETION, Question, file_prompts, random_prompts
from baton.bench.serve.server import read_metrics, said, totals
from baton.bench.serve.table import as_table
from baton.cluster.errors import BatonError, ConfigError
from baton.tests.unit.bench.serve.scripted import GAP_S, NUM_TOKENS, TTFT_S, Scripted, measured
from baton.tests.unit.virtual_time import run


def test_known_delays_are_measured_exactly():
    _, found = measured(Scripted(), Level(width=2), Bound(num_requests=10))
    e2e = 1000 * (TTFT_S + (NUM_TOKENS - 1) * GAP_S)
    for shown, expected in ((found.ttft, 200), (found.itl, 50), (found.tpot, 50), (found.e2e, e2e)):
        assert (shown.mean, shown.p50, shown.p90, shown.p99) == pytest.approx((expected,) * 4)
    assert (found.num_ok, found.errors, found.mean_prompt_tokens, found.mean_output_tokens) == (10, {}, 11, 5)
    assert found.seconds == pytest.approx(5 * e2e / 1000), "two clients, five each"
    assert found.requests_per_s == pytest.approx(10 / found.seconds)
    assert found.output_tokens_per_s == pytest.approx(50 / found.seconds)


def test_an_event_of_several_tokens_is_one_gap_and_shares_its_time():
    _, found = measured(Scripted(per_event=4), Level(width=1), Bound(num_requests=2))
    assert found.itl.mean == pytest.approx(50)
    assert found.tpot.mean == pytest.approx(50 / 4)
    assert found.mean_output_tokens == 20


def test_a_closed_loop_keeps_its_width_and_its_connections():
    endpoint = Scripted()
    _, found = measured(endpoint, Level(width=3), Bound(num_requests=12))
    assert len(endpoint.wires) <= 4, "kept, one for /metrics"
    assert found.requests_per_s == pytest.approx(3 / 0.4)


def test_a_duration_ends_the_run_and_what_began_is_waited_for():
    running, found = measured(Scripted(), Level(width=1), Bound(seconds=1.0))
    assert (len(running.calls), found.num_ok) == (3, 3)
    assert found.seconds == pytest.approx(1.2)


def test_an_open_loop_keeps_its_rate_independent_of_the_answers():
    running, found = measured(Scripted(lambda i: "slow"), Level(rate=20.0), Bound(num_requests=900))
    dues = sorted(call.due for call in running.calls)
    assert 900 / dues[-1] == pytest.approx(20.0, rel=0.1)
    gaps = [after - before for before, after in itertools.pairwise(dues)]
    deviation = math.sqrt(sum((gap - 0.05) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(0.05, rel=0.1), "Poisson: gaps deviate by their mean"
    assert found.ttft.p99 == pytest.approx(600)
    assert max(sum(call.due <= at < call.ended for call in running.calls) for at in dues[::50]) > 5


def test_an_open_loop_lasts_its_full_time_without_late_arrivals():
    running, found = measured(Scripted(), Level(rate=0.5), Bound(seconds=10.0))
    assert 0 < len(running.calls) < 10
    assert max(call.due for call in running.calls) < 10.0
    assert found.seconds == pytest.approx(max(10.0, *(call.ended for call in running.calls)))
    assert found.requests_per_s == pytest.approx(len(running.calls) / found.seconds)


def test_the_same_seed_sends_the_same_requests_at_the_same_times():
    def asked():
        endpoint = Scripted()
        running, _ = measured(endpoint, Level(rate=5.0), Bound(num_requests=20))
        return [call.due for call in running.calls], [body["prompt"] for body in endpoint.bodies]

    assert asked() == asked()


def test_a_stall_of_the_client_itself_is_in_the_times_of_an_open_loop():
    """For two seconds nothing is sent: requests that were due meanwhile have waited from then on."""
    running, found = measured(Scripted(), Level(rate=10.0), Bound(num_requests=60), busy=(1.0, 2.0))
    late = [call for call in running.calls if 1.0 < call.due < 3.0]
    assert len(late) > 10
    for call in late:
        assert call.sent >= 3.0
        assert ttft_ms(call) == pytest.approx(1000 * (3.0 - call.due + TTFT_S))
    assert found.late_ms > 1000
    assert found.ttft.p90 > 1000
    assert found.e2e.p90 > 1000
    assert "late (p99)" in as_table([found])


def test_failures_are_counted_by_kind_and_excluded_from_times():
    kinds = ["ok", "429", "cut", "frame", "early", "hang", "ok", "429"]
    _, found = measured(Scripted(lambda i: kinds[i]), Level(width=1), Bound(num_requests=8), timeout_s=5.0)
    assert found.errors == {
        "HTTP 429 overloaded": 2, "broken off": 1, "error frame server_error": 1, "the stream ended early": 1,
        "no end within 5 s": 1,
    }  # fmt: skip
    assert found.num_ok == 2
    assert found.ttft.p99 == pytest.approx(200)
    assert "2 x HTTP 429 overloaded" in as_table([found])


def test_a_missing_endpoint_is_an_error_of_every_request():
    _, found = measured(Scripted(lambda i: "refused"), Level(width=1), Bound(num_requests=2))
    assert (found.num_ok, found.errors) == (0, {"connection refused": 2})
    assert json.loads(json.dumps(found.as_dict()))["ttft"]["p99"] is None
    assert "| - / - / - / - |" in as_table([found])


def test_a_server_that_accepts_and_never_answers_is_one_error():
    async def connect(host, port, **_):
        return asyncio.StreamReader(), SimpleNamespace(write=len, drain=noop, close=lambda: None)

    async def noop():
        pass

    async def main():
        clock = asyncio.get_running_loop().time
        return await model_of(LoadClient(endpoint_of("http://x:1"), clock, connect=connect))

    with pytest.raises(BatonError, match="no answer to GET /v1/models within 60 s"):
        run(main())


def test_a_kept_connection_that_was_closed_is_replaced_silently():
    endpoint = Scripted()

    async def main():
        client = LoadClient(
            endpoint_of("http://x:1"), asyncio.get_running_loop().time, connect=endpoint.connect
        )
        first = await client.ask("/v1/completions", {}, 0.0)
        endpoint.wires[0].reader.feed_eof()
        return first, await client.ask("/v1/completions", {}, 0.0)

    assert [call.error for call in run(main())] == ["", ""]
    assert len(endpoint.wires) == 2


def test_goodput_counts_the_requests_that_met_both_goals():
    endpoint = Scripted(lambda i: "slow" if i % 2 else "ok")
    _, found = measured(endpoint, Level(width=1), Bound(num_requests=10), goals=Goals(ttft_ms=300, itl_ms=60))
    assert found.goodput_per_s == pytest.approx(found.requests_per_s / 2)
    _, found = measured(endpoint, Level(width=1), Bound(num_requests=10), goals=Goals(itl_ms=40))
    assert found.goodput_per_s == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0], (5, 5, 5)), ([1.0, 2.0, 3.0], (2, 2.8, 2.98)), (list(range(101)), (50, 90, 99))],
)
def test_percentiles_lie_between_the_nearest_ranks(values, expected):
    assert tuple(percentile(sorted(values), share) for share in (50, 90, 99)) == pytest.approx(expected)
    assert spread(values).mean == sum(values) / len(values)


def test_one_token_has_no_time_per_token():
    call = TimedCall(due=0.0, sent=0.0, ended=1.0, arrivals=[(1.0, 1)], num_output=1)
    found = figures_of(Run(Level(width=1), 0.0, [call]), Goals(itl_ms=1.0))
    assert math.isnan(found.tpot.mean)
    assert found.goodput_per_s == 1.0


def test_prompts_have_the_requested_lengths_and_shared_prefixes():
    asked = random_prompts(random.Random(2), inputs=(8, 12), outputs=(3, 4), vocab=300, prefix=6)
    bodies = [question.body for question in itertools.islice(asked, 200)]
    assert {len(body["prompt"]) for body in bodies} == {8, 9, 10, 11, 12}
    assert {body["max_tokens"] for body in bodies} == {3, 4}
    assert len({tuple(body["prompt"][:6]) for body in bodies}) == 1
    assert len({tuple(body["prompt"]) for body in bodies}) == 200
    assert all(3 <= token < 300 for body in bodies for token in body["prompt"])


def test_a_file_of_prompts_is_repeated(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "max_tokens": 9}\n\n{"messages": [{"role": "user", "content": "b"}], "id": 4}\n'
    )
    asked = list(itertools.islice(file_prompts(path, random.Random(0), (5, 5)), 3))
    assert [question.path for question in asked] == [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/completions",
    ]
    assert [question.body["max_tokens"] for question in asked] == [9, 5, 9]
    assert "id" not in asked[1].body


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": "a", "messages": []}', ""])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n' if line else "\n")
    with pytest.raises(ConfigError, match="line 2" if line else "no line"):
        file_prompts(path, random.Random(0), (5, 5))


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "0"], ["--rate", "x"], ["--rate", "1", "--concurrency", "2"], ["--input", "9-3"],
        ["--input", "0"],
        ["--output", "a"], ["--requests", "0"], ["--shared-prefix", "512"], ["--slo-ttft", "-1"],
        ["--temperature", "nan"], ["--sampling", "top_p=nan"], ["--sampling", "top_k=0.5"],
        ["--sampling", "warmth=1"], ["--sampling", "top_p"], ["--sampling", ""],
        ["--sampling", "top_k=20,temperature=1", "--plain"], ["--sampling", "top_p=1", "--temperature", "1"],
        ["--own-answers"], ["--own-answers", "--workload", "chat", "--plain"],
    ],
)  # fmt: skip
def test_an_invalid_option_is_refused(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(argv)
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "sent"),
    [
        ([], {"temperature": 0}),
        (["--temperature", "0.5"], {"temperature": 0.5}),
        (["--sampling", "top_k=20,top_p=0.8,repetition_penalty=1.05"],
         {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}),
        (["--plain", "--sampling", "temperature=1,top_p=0.9"], {"temperature": 1, "top_p": 0.9}),
    ],
)  # fmt: skip
def test_requests_carry_the_sampling_that_was_named_and_no_other(argv, sent):
    async def main():
        clock = asyncio.get_running_loop().time
        client = LoadClient(endpoint_of("http://x:1"), clock, connect=Scripted().connect)
        return await plan_of(parse([*argv, "--model", "m"]), client)

    common = run(main()).common
    assert {name: value for name, value in common.items() if name in SAMPLING} == sent
    assert ("ignore_eos" in common) == ("--plain" not in argv)


@pytest.mark.parametrize("url", ["x", "ftp://a", "http://", "http://a:b", "http://[1"])
def test_an_invalid_url_is_named(url):
    with pytest.raises(ConfigError, match="--url"):
        endpoint_of(url)


def test_the_default_model_is_the_first_that_the_server_lists():
    async def main(endpoint):
        clock = asyncio.get_running_loop().time
        return await model_of(LoadClient(endpoint_of("http://x:1/v1/"), clock, connect=endpoint.connect))

    assert run(main(Scripted())) == "toy"
    with pytest.raises(BatonError, match="nothing listens at http://x:1"):
        run(main(Scripted(lambda i: "refused")))
    for status, remedy in (("400", r"\(No\.\)$"), ("401", "BATON_API_KEY$"), ("404", "--model$")):
        with pytest.raises(BatonError, match=f"^http://x:1/v1/models answers {status} .*{remedy}"):
            run(main(Scripted(lambda i, status=status: status)))


def test_server_figures_are_the_difference_of_two_readings():
    def metrics(factor):
        lines = {
            "baton_handoff_seconds_sum": 0.5, "baton_handoff_seconds_count": 10,
            "baton_handoff_bytes_total": 2e7,
            "baton_prefill_seconds_sum": 1, "baton_prefill_seconds_count": 10,
            "baton_prefill_queue_seconds_sum": 0.2,
            "baton_prompt_tokens_total": 1000, "baton_cached_prompt_tokens_total": 250,
            "baton_retries_total": 1,
            'baton_verify_steps_total{model_name="m"}': 100,
            'baton_accepted_tokens_total{model_name="m"}': 150,
            'baton_drafted_tokens_total{model_name="m"}': 300,
            'baton_worker_tier_hit_tokens_total{tier="host"}': 50,
            'baton_worker_tier_moved_bytes_total{tier="host",direction="in"}': 1e6,
            'baton_worker_tier_moved_bytes_total{tier="disk",direction="out"}': 3e6,
        }  # fmt: skip
        return totals("".join(f"{name} {value * factor}\n" for name, value in lines.items()))

    assert said(metrics(1), metrics(3)) == pytest.approx(
        {
            "accept_length": 2.5, "accepted_share": 0.5, "handoff_ms": 50, "handoff_mb": 2,
            "handoff_mb_per_s": 40,
            "prefill_ms": 100, "prefill_wait_ms": 20, "cached_share": 0.25, "retries": 2,
            "tier_hit_share": 0.05, "host_in_mb": 2, "disk_out_mb": 6,
        }
    )  # fmt: skip
    assert totals("vllm_requests_total 1\n") == {}
    assert totals("no metrics {") == {}
    assert said({}, metrics(1)) == {}
    assert said(metrics(3), metrics(1)) == {}, "another process"


def test_router_metrics_are_summed_or_omitted_when_one_has_none():
    class Router:
        def __init__(self, status, prompt, retries):
            self.answer = (
                status,
                f"baton_prompt_tokens_total {prompt}\nbaton_retries_total {retries}\n".encode(),
            )

        async def get(self, path):
            assert path == "/metrics"
            return self.answer

    one, two, closed = Router(200, 100, 1), Router(200, 20, 2), Router(403, 7, 7)
    found = run(read_metrics([one, two]))
    assert (found["prompt"], found["retries"]) == (120, 3)
    assert run(read_metrics([one, closed])) == {}


def test_conversations_take_turns_and_are_told_by_turn():
    chat = [Question(path=COMPLETION, body={"prompt": [9], "max_tokens": 5}) for _ in range(9)]
    chats = iter([Question(path=each.path, body=each.body, then=(each, each)) for each in chat])
    endpoint = Scripted(lambda i: "slow" if 3 <= i < 6 else "ok")
    running, found = measured(
        endpoint, Level(width=1), Bound(num_requests=9), questions=chats, takes_turns=True
    )
    assert [call.turn for call in running.calls] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    first, second, third = found.ttft_by_turn
    assert (first, third) == pytest.approx((1000 * TTFT_S, 1000 * TTFT_S))
    assert second > first
    assert "TTFT p50 by turn 200 / " in as_table([found])
    assert found.as_dict()["ttft_by_turn"] == found.ttft_by_turn
