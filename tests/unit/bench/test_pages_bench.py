"""`baton bench pages`: the same requests in every run, the oracle's limits, steady time, and the ratios."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from baton.bench.engine.checkpoint import main as write_checkpoint
from baton.bench.pages import bench
from baton.bench.pages.bench import GROW, ORACLE, WHOLE, Measured, as_document, as_table, parse, ratios
from baton.bench.pages.load import AnswerClient, PagesLoad, PagesRun, _steady, run_load
from baton.bench.serve.client import TimedCall, endpoint_of
from baton.tests.unit.bench.serve.scripted import NUM_TOKENS, Scripted
from baton.tests.unit.virtual_time import run

LOAD = PagesLoad(num_requests=12, width=4, prompt_tokens=20, vocab=500, seed=3, block=3, longer=40)


def test_a_request_is_the_same_in_every_run_but_for_its_limit():
    for number in range(12):
        whole, known = LOAD.body(number, 900), LOAD.body(number, 7)
        assert (whole.pop("max_tokens"), known.pop("max_tokens")) == (900, 7)
        least = 40 if number // 3 % 2 else 0
        assert (whole.pop("min_tokens"), known.pop("min_tokens")) == (least, min(least, 7))
        assert whole == known
    assert len({json.dumps(LOAD.body(number, 5)["prompt"]) for number in range(12)}) == 12
    assert len({LOAD.body(number, 5)["seed"] for number in range(12)}) == 12


def test_a_run_has_the_answers_of_all_requests_in_order_and_what_failed():
    endpoint = Scripted(lambda number: "429" if number == 5 else "ok")

    async def asked():
        clock = asyncio.get_running_loop().time
        client = AnswerClient(endpoint_of("http://x:1"), clock, timeout_s=60.0, connect=endpoint.connect)
        return await run_load(client, LOAD, [9] * 12)

    found = run(asked())
    assert found.answers == [[7] * NUM_TOKENS if number != 5 else [] for number in range(12)]
    assert sum(found.errors.values()) == 1
    assert found.num_tokens == 11 * NUM_TOKENS
    assert 0 < found.tokens_per_s <= found.steady_tokens_per_s
    assert [body["prompt"] for body in endpoint.bodies] == [LOAD.body(n, 9)["prompt"] for n in range(12)]


def test_the_steady_time_begins_when_each_client_has_had_an_answer():
    calls = [TimedCall(due=0.0, sent=float(sent), ended=sent + 4.0) for sent in range(10)]
    assert _steady(calls, 3, -1.0) == (6.0, 9.0)
    assert _steady(calls[:2], 3, -1.0) == (-1.0, 5.0), "a run without a steady time counts whole"


def runs_of(**rates):
    return [
        Measured(
            mode=mode,
            run=PagesRun(answers=[[1, 2]], errors={}, seconds=1.0, steady_tokens_per_s=rate),
            num_different=0,
        )
        for mode, each in rates.items()
        for rate in each
    ]


def test_modes_are_compared_by_the_medians_of_their_rounds():
    found = runs_of(grow=[90.0, 10.0, 95.0], oracle=[100.0, 101.0, 5.0], whole=[20.0, 20.0, 20.0])
    assert ratios(found) == {GROW: 0.9, WHOLE: 0.2}
    assert as_document(found)["of_oracle"] == {GROW: 0.9, WHOLE: 0.2}
    table = as_table(found)
    assert "grow: 0.900 of the oracle" in table
    assert "grow: 4.50 times whole" in table
    assert table.count("| oracle |") == 3
    alone = runs_of(grow=[90.0])
    assert ratios(alone) == {}
    assert as_document(alone)["times_whole"] is None


def test_grow_is_run_though_it_is_not_named():
    options = parse(["--model", "m", "--pages", "9", "--modes", "oracle"])
    assert options.modes == [ORACLE], "grow tells the oracle how long answers get"
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--pages", "1"])


def test_answers_of_a_checkpoint_end_at_one_token_of_so_many(tmp_path):
    made = ["--shape", "toy", "--device", "cpu", "--dtype", "float32", "--answers", "20"]
    assert write_checkpoint([str(tmp_path / "new"), *made]) == 0
    config = json.loads((tmp_path / "new/target/config.json").read_text())
    ends = config["eos_token_id"]
    assert len(ends) == (config["vocab_size"] - 1) // 20
    assert all(end % 20 == 0 for end in ends)
    assert not (tmp_path / "new/head").exists()


def test_an_interrupted_run_prints_what_had_ended(monkeypatch, capsys):
    ended = iter([runs_of(grow=[10.0])[0].run])

    def run_or_stop(options, extra, load, mode, limits):
        for one in ended:
            return one
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "load_model_config", lambda path: SimpleNamespace(vocab_size=500))
    monkeypatch.setattr(bench, "_run", run_or_stop)
    assert bench.main(["--model", "m", "--pages", "9", "--json"]) == 130
    said = capsys.readouterr()
    assert [row["mode"] for row in json.loads(said.out)["runs"]] == [GROW]
    assert "interrupted" in said.err
