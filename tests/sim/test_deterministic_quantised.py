"""Deterministic workers with quantised weights in bfloat16: equal bits alone, in a batch, with drafts, graphs
and over a hand-off.
"""

from pathlib import Path

import pytest
import torch
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.quant_toys import EXPERTS, SHAPE, write_quantised
from baton.tests.parity.test_gpt_oss import write_packed
from baton.tests.sim.test_deterministic_pair import GRAPHS, MODE, PROMPTS, served
from baton.tests.sim.worker_pair import Pair

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

LAYERS = 4
CASES = [
    ("qwen3_moe", "block"),
    ("llama", "awq"),
    ("llama", "gptq_ordered"),
    ("mixtral", "gptq"),
    ("gpt_oss", "mxfp4"),
]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_tokens_and_kv_have_the_bits_of_one_worker_alone(toy_checkpoint, toy_copy, tmp_path, family, form):
    target: Path = tmp_path / "target"
    sizes = SHAPE | EXPERTS.get(family, {}) | {"hidden_size": 64, "num_hidden_layers": LAYERS}
    if form == "mxfp4":
        write_packed(toy_copy(family, num_hidden_layers=LAYERS), target)
    else:
        write_quantised(toy_checkpoint(family, **sizes), target, form)
    head = write_head(tmp_path / "head", head_config(2, (1, 2, 3)), head_tensors())
    one = Pair(target, chunk_size=0, **MODE)
    alone = [served(one, [room], is_local=True)[0] for room in range(len(PROMPTS))]
    together = Pair(target, head, chunk_size=5, spec_steps=3, **MODE, **GRAPHS)
    found = served(together, range(len(PROMPTS)), is_local=False)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(found, alone, strict=True))
    assert together.decode.engine.fingerprint.endswith(" deterministic")
