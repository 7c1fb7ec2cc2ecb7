"""`baton bench serve --compare`: paired rounds, ratios, spread, and what drift of the host does to them."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from baton.bench.serve.arguments import parse
from baton.bench.serve.bench import LoadPlan, ServeBench
from baton.bench.serve.client import LoadClient, endpoint_of
from baton.bench.serve.compare import METRICS, as_comparison_table, compare
from baton.bench.serve.figures import CurvePoint, Goals
from baton.bench.serve.load import Bound, Level
from baton.bench.serve.plot import draw_curves
from baton.bench.serve.prompts import random_prompts
from baton.tests.unit.bench.serve.scripted import Scripted
from baton.tests.unit.virtual_time import run

TWO_CLIENTS = (Level(width=2),)
NAMED = {metric.name: metric for metric in METRICS}


def compared(a, b, num_rounds=4, levels=TWO_CLIENTS, num_requests=6):
    """The comparisons of two scripted endpoints, and the sides in the order of their measurements."""

    async def main():
        clock, order = asyncio.get_running_loop().time, []
        clients = [LoadClient(endpoint_of("http://x:1"), clock, connect=end.connect) for end in (a, b)]
        plan = LoadPlan(
            model="toy",
            common={},
            questions=iter(()),
            bound=Bound(num_requests=num_requests),
            goals=Goals(),
            warmup=0,
            rng=random.Random(0),
        )

        async def measure(side, level, number):
            order.append("AB"[side])
            rng = random.Random(f"{level} {number}")
            asked = random_prompts(rng, inputs=(11, 11), outputs=(5, 5), vocab=256, prefix=0)
            return (await ServeBench(clients[side], replace(plan, questions=asked)).measure(level))[1]

        return await compare(measure, levels, num_rounds), order

    return run(main())


def test_ratios_are_those_of_the_servers_whatever_the_host_does():
    """The host slows down by half in every measurement; both servers by the same factor within a round."""
    num_rounds = 6

    def drift(now):
        return 1.5 ** (now // 30.0)

    slow = Scripted(slowness=lambda now: 2.0 * drift(now))
    (found,), _ = compared(Scripted(slowness=drift), slow, num_rounds, num_requests=20)
    ttft = NAMED["TTFT p50"]
    values = found.values(ttft, 0)
    assert max(values) > 1.4 * min(values), "the host drifts"
    ratios = found.ratios(ttft)
    assert len(ratios) == num_rounds
    assert sorted(ratios)[num_rounds // 2] == pytest.approx(2.0, rel=0.01)
    assert found.better(ttft) == "A"
    assert found.better(NAMED["out tok/s"]) == "A"


def test_both_sides_get_the_same_requests_and_rounds_get_others():
    ends = Scripted(), Scripted()
    _, order = compared(*ends, num_rounds=3)
    prompts = [[tuple(body["prompt"]) for body in end.bodies] for end in ends]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 18
    assert order == ["A", "B", "B", "A", "A", "B"]


def test_rounds_that_disagree_and_single_rounds_show_no_better_side():
    by_turns = Scripted(lambda number: "slow" if number // 6 % 2 else "ok")
    (found,), _ = compared(by_turns, Scripted(slowness=lambda _: 2.0), num_rounds=2)
    assert [ratio > 1 for ratio in found.ratios(NAMED["TTFT p50"])] == [True, False]
    assert found.better(NAMED["TTFT p50"]) == ""
    (found,), _ = compared(Scripted(), Scripted(slowness=lambda _: 2.0), num_rounds=1)
    assert found.better(NAMED["TTFT p50"]) == ""


def test_a_round_without_a_figure_shows_no_better_side():
    dead_later = Scripted(lambda number: "ok" if number < 12 else "429")
    (found,), _ = compared(dead_later, Scripted(slowness=lambda _: 2.0), num_rounds=3)
    assert len(found.ratios(NAMED["TTFT p50"])) == 2
    assert [found.better(NAMED[name]) for name in ("TTFT p50", "req/s")] == ["", ""]


def test_table_and_json_have_values_ratios_spread_and_errors():
    failing = Scripted(lambda number: "429" if number == 1 else "ok", slowness=lambda _: 2.0)
    found, _ = compared(Scripted(), failing, num_rounds=2, levels=(Level(width=1), Level(width=2)))
    table = as_comparison_table(found, ("http://a", "http://b"))
    assert table.startswith("A: http://a\nB: http://b\n")
    assert "| TTFT p50 | 200 | 400 | 2.000 | 2.000 to 2.000 | A |" in table
    assert "B: 1 x HTTP 429 overloaded" in table
    assert table.count("| figure | A | B |") == 2
    document = json.loads(json.dumps([each.as_dict() for each in found]))
    assert [level["load"] for level in document] == ["1 clients", "2 clients"]
    assert document[0]["ratios"]["TPOT p50"] == {
        "median": pytest.approx(2.0), "low": pytest.approx(2.0), "high": pytest.approx(2.0), "better": "A",
    }  # fmt: skip
    assert document[0]["rounds"][0]["B"]["errors"] == {"HTTP 429 overloaded": 1}


def test_a_side_without_answers_has_no_ratios():
    (found,), _ = compared(Scripted(), Scripted(lambda number: "429"), num_rounds=2)
    assert found.ratios(NAMED["TTFT p50"]) == []
    assert "| TTFT p50 | 200 | - | - | - | - |" in as_comparison_table([found], ("a", "b"))
    assert json.loads(json.dumps(found.as_dict()))["ratios"]["TTFT p50"]["median"] is None


def test_a_chart_has_a_dot_for_each_load_with_answers(tmp_path):
    found, _ = compared(Scripted(), Scripted(lambda number: "429"), levels=(Level(width=1), Level(width=4)))
    curves = {name: [each.point(side) for each in found] for side, name in enumerate(("a", "b"))}
    assert [point.load for point in curves["a"]] == ["1 clients", "4 clients"]
    assert curves["a"][0].ttft_p50 == pytest.approx(200)
    draw_curves(curves, tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    empty = CurvePoint.median([found[0].rounds[0][1]])
    assert empty.ttft_p50 != empty.ttft_p50, "NaN"


@pytest.mark.parametrize(
    "argv",
    [
        ["--compare", "http://a"], ["--compare", "http://a", "http://b", "--url", "http://c"],
        ["--compare", "http://a", "http://b", "--metrics", "http://c"],
        ["--compare", "http://a", "http://b", "--plot", "x.png"], ["--rounds", "2"],
        ["--compare", "http://a", "http://b", "--rounds", "0"],
        ["--workload", "chat", "--prompts", "x"], ["--context", "100"],
        ["--workload", "chat", "--input", "9"], ["--workload", "chat", "--shared-prefix", "9"],
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(argv)
    assert "error" in capsys.readouterr().err
