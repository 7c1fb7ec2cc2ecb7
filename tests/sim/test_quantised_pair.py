"""Prefill and decode with quantised weights and 8-bit pages: over messages, with drafts and with graphs."""

from pathlib import Path

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.engine.models.quant.kv_scales import KVScales
from baton.kvtransfer.protocol.layout import KVLayout, agree
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.quant_toys import (
    EXPERTS,
    SHAPE,
    rounded_greedy,
    write_kv_scales,
    write_quantised,
)
from baton.tests.parity.test_gpt_oss import write_packed
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.worker_pair import Pair, layout, name

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [random_ids(count, seed=count) for count in (29, 3, 17)]
NEW_TOKENS = 12
# features in flight take a quarter of the pool at most, and they are not in 8 bits
MODE = {"kv_dtype": "fp8_e4m3", "pages": 400, "max_running": 4}
GRAPHS = {"graphs": "on", "graph_self_test": False, "captured": {"chunk_size": 32, "max_running": 4}}


@pytest.fixture(scope="module")
def models(toy_checkpoint, tmp_path_factory):
    """(quantised target with scales of keys and values, head)."""
    folder = tmp_path_factory.mktemp("quantised")
    path = folder / "target"
    write_quantised(toy_checkpoint("llama", num_hidden_layers=4), path, "channel")
    write_kv_scales(path, num_layers=4)
    return path, write_head(folder / "head", head_config(2, (0, 1, 3)), head_tensors())


@pytest.fixture(scope="module")
def expected(models):
    """The tokens of transformers with the values of the weights and a cache that is rounded alike."""
    path = models[0]
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale": base * (1 + layer)
        for layer in range(4)
        for kind, base in (("k", 0.011), ("v", 0.023))
    }
    theirs = reference_model(path / "values")
    return [rounded_greedy(theirs, prompt, NEW_TOKENS, scales)[0] for prompt in PROMPTS]


def tokens_of(pair: Pair, *, is_local: bool) -> list[list[int]]:
    for room, prompt in enumerate(PROMPTS):
        pair.send(name(room), prompt, max_new_tokens=NEW_TOKENS, is_local=is_local)
    pair.run()
    return [pair.tokens[name(room)] for room in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("is_local", "chunk_size", "shape"),
    [
        (False, 0, {"no_draft": True}),
        pytest.param(True, 5, {"spec_steps": 3}, marks=pytest.mark.slow),
        pytest.param(False, 5, {"spec_steps": 3, "spec_topk": 2, "spec_tokens": 6}, marks=pytest.mark.slow),
        (False, 8, {"spec_steps": 3} | GRAPHS),
    ],
    ids=["handed over", "aggregated chain", "handed over tree", "handed over graphs"],
)
def test_tokens_are_those_of_the_values_on_every_path(models, expected, is_local, chunk_size, shape):
    pair = Pair(*models, chunk_size=chunk_size, **MODE, **shape)
    assert pair.decode.engine.pool.dtype == torch.float8_e4m3fn
    assert tokens_of(pair, is_local=is_local) == expected
    pair.assert_nothing_is_held()


@pytest.mark.slow
@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "aggregated"])
@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_moe", "block"), ("deepseek_v3", "block"), ("mixtral", "gptq"), ("gpt_oss", "mxfp4")],
)
def test_experts_say_the_tokens_of_their_values_with_drafts_and_graphs(
    toy_checkpoint, toy_copy, tmp_path, family, form, is_local
):
    path = tmp_path / "target"
    if form == "mxfp4":
        values = toy_copy(family, num_hidden_layers=4)
        write_packed(values, path)
    else:
        sizes = SHAPE | EXPERTS[family] | {"hidden_size": 64, "num_hidden_layers": 4}
        values = write_quantised(toy_checkpoint(family, **sizes), path, form)
    theirs = reference_model(values)
    answers = [reference_greedy(theirs, prompt, NEW_TOKENS) for prompt in PROMPTS]
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 3)), head_tensors())
    pair = Pair(path, head, chunk_size=8, spec_steps=3, pages=96, max_running=4, **GRAPHS)
    assert tokens_of(pair, is_local=is_local) == answers
    pair.assert_nothing_is_held()


def test_decode_without_the_scales_of_the_pages_gives_other_tokens(models, expected, monkeypatch):
    """A planted bug: what is handed over are pages alone, and decode reads them with scales of 1."""
    pair = Pair(models[0], no_draft=True, **MODE)
    for layer in pair.decode.engine.model.layers:
        scales = layer.attention.kv_scales
        assert isinstance(scales, KVScales)
        scales.keys.fill_(1)
        scales.values.fill_(1)
    assert tokens_of(pair, is_local=False) != expected


def test_workers_of_another_form_do_not_pair(models, toy_checkpoint):
    """Weights rounded at load and pages in 8 bits each change the fingerprint, and layouts do not agree."""
    plain: Path = toy_checkpoint("llama", num_hidden_layers=4)
    forms = ({}, {"kv_dtype": "fp8_e4m3"}, {"quantize": "fp8"}, {"kv_dtype": "fp8_e4m3", "quantize": "fp8"})
    layouts = [layout(Pair(plain, **form).decode.engine) for form in forms]
    assert len({each.fingerprint for each in layouts}) == len(forms)
    for other in layouts[1:]:
        with pytest.raises(Exception, match="KV layouts differ"):
            agree(layouts[0], other)
    wire = layouts[1]
    assert (wire.dtype, wire.feature_dtype) == ("float8_e4m3fn", "float32")
    assert 4 * KVLayout(wire).kv_page_bytes == KVLayout(layouts[0]).kv_page_bytes


def test_a_start_logs_what_it_rounds(toy_checkpoint, caplog):
    caplog.set_level("INFO")
    config = EngineConfig(
        model=str(toy_checkpoint("llama")), quantize="fp8", dtype="float32", pages=16, page_size=4
    )
    loader = EngineLoader(config, has_drafter=False)
    loader.phases()[0][1]()
    assert "weights in fp8: " in caplog.text
