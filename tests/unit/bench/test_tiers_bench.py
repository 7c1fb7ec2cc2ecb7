"""`baton bench tiers`: options, and the table of times by turn."""

import json
import math

import pytest
import tomllib
from baton.bench.pages.bench import main as pages_main
from baton.bench.serve.figures import Figures, Spread
from baton.bench.tiers.bench import _server, as_document, as_table, main, parse, times_faster

NAN = Spread(mean=math.nan, p50=math.nan, p90=math.nan, p99=math.nan)


def figures(*ttft, errors=0, **server):
    return Figures(
        load="c2", seconds=9.0, num_ok=8, errors={"500": errors} if errors else {}, requests_per_s=1.0,
        goodput_per_s=None, prompt_tokens_per_s=1.0, output_tokens_per_s=1.0, mean_prompt_tokens=1.0,
        mean_output_tokens=1.0, ttft=NAN, itl=NAN, tpot=NAN, e2e=NAN, late_ms=0.0, server=server,
        ttft_by_turn=list(ttft),
    )  # fmt: skip


def test_a_tier_is_measured_by_the_turns_after_the_first():
    found = {
        "none": figures(50.0, 60.0, 60.0, 66.0),
        "host": figures(500.0, 20.0, 21.0, 19.0, host_in_mb=120.0, host_out_mb=80.0),
        "disk": figures(500.0, 30.0, 30.0, 30.0, errors=2, disk_in_mb=7.0),
    }
    assert times_faster(found) == {"host": 3.0, "disk": 2.0}
    table = as_table(found)
    assert "| host | 500 | 20 | 21 | 19 | 20 | 0 | 120 MB into host memory, 80 MB back |" in table
    assert "| disk | 500 | 30 | 30 | 30 | 30 | 2 | 7 MB onto disk |" in table
    assert "host: 3.0 times faster from turn 2 on" in table
    document = json.loads(json.dumps(as_document(found)))
    assert document["times_faster_from_turn_2"]["disk"] == 2.0
    assert document["ttft_from_turn_2_ms"] == {"none": 60.0, "host": 20.0, "disk": 30.0}
    assert times_faster({"host": figures(1.0, 2.0)}) == {}, "there is nothing to compare with"
    assert "| none | nan | 9 |  |" in as_table({"none": figures(errors=9)}), "nothing was answered"


def test_pulls_are_compared_with_the_same_two_workers():
    found = {
        "none": figures(5.0, 6.0),
        "pair": figures(5.0, 9.0, cached_share=0.1),
        "pull": figures(5.0, 3.0, cached_share=0.9),
    }
    assert times_faster(found) == {"pull": 3.0}
    assert "| pull | 5 | 3 | 3 | 0 | 90% of the prompts were cached or pulled |" in as_table(found)


def test_decode_that_is_pulled_from_has_pages_for_all_conversations(tmp_path):
    options = parse(["--model", "m", "--tiers", "pull", "--pages", "50"])
    command = _server(options, "pull", tmp_path)
    assert "--prefix-pulls=always" in command
    assert tomllib.loads((tmp_path / "pair.toml").read_text()) == {
        "prefill": {"pages": 50},
        "decode": {"pages": (20 + 2) * 175},  # of 2000 + 10 * 80 tokens each
    }


def test_a_disk_needs_a_directory(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--model", "m"])
    assert ended.value.code == 2
    assert "--disk DIR" in capsys.readouterr().err
    assert parse(["--model", "m", "--tiers", "none", "host"]).disk == ""


@pytest.mark.parametrize(
    ("bench", "options"), [(main, ["--tiers", "none"]), (pages_main, ["--pages", "100", "--modes", "oracle"])]
)
def test_a_directory_without_a_checkpoint_is_one_line(tmp_path, capsys, bench, options):
    assert bench(["--model", str(tmp_path / "none"), *options]) == 1
    told = capsys.readouterr().err
    assert str(tmp_path / "none") in told
    assert told.count("\n") == 1
