"""`baton bench engine --drafts dflash`: its acceptance is as requested, its counts are checked by hand."""

import json

import pytest
from baton.bench.engine.bench import main
from baton.bench.engine.blocks import block_config, block_counts, block_step
from baton.bench.engine.floors import PassCounts
from baton.bench.engine.shapes import target_config
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["--shape", "toy", "--device", "cpu", "--dtype", "float32", "--context", "12", "--repeats", "3"]


@pytest.mark.parametrize(("accept_length", "graphs"), [(1, "off"), (3, "on"), slow(4, "off")])
def test_blocks_yield_the_requested_accept_length(accept_length, graphs, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--drafts", "dflash", "--batch", "1", "2", "--prefill", "--graphs", graphs, "--json", str(out)]
    assert main([*SMALL, *flags, "--accept-length", str(accept_length)]) == 0
    cells = {(cell["kind"], cell["size"]): cell for cell in json.loads(out.read_text())["cells"]}
    assert set(cells) == {("decode", 1), ("decode", 2), ("dflash", 1), ("dflash", 2)}
    assert [cells["dflash", size]["accepted"] for size in (1, 2)] == [accept_length] * 2
    assert {cell["path"] for cell in cells.values()} == {"graph" if graphs == "on" else "eager"}


def test_a_step_of_blocks_is_a_verify_one_block_and_a_projection(tmp_path):
    target = target_config("llama-3.1-8b", "", tmp_path)
    config, counts = block_config(target, "bfloat16", 8, tmp_path), PassCounts.of_target(target, 2)
    drafter = block_counts(config, 2)
    verify, block, projection = block_step(counts, config, batch=2, steps=7, context=100)
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert [drafter.body, drafter.vocab, drafter.fc] == [5 * layer, 128256 * 4096, 5 * 4096 * 4096]
    assert verify == counts.step(2, 8, 100, logit_rows=8)
    assert block.num_bytes == 2 * (5 * layer + 128256 * 4096 + 2 * 108 * 5 * 2048)
    weights = 5 * 4096 * 4096 + 5 * 2048 * 4096
    assert projection.num_bytes == 2 * (weights + 2 * 8 * 5 * 2048)
    assert projection.num_flops == 2 * 2 * 8 * weights
