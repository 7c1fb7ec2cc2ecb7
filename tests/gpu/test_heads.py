"""EAGLE heads and EAGLE3 heads of several layers on a device, in graphs of whole steps.

`test_drafters` has more prompts with the heads of KINDS; here are the forms that it leaves out.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.graphs.cuda import CudaBackend
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle3_toys import successor, write_head
from baton.tests.parity.eagle_toys import SourcedEngine, write_eagle_oracle
from baton.tests.parity.every_drafter import KINDS
from baton.tests.parity.graph_engine import BREAKABLE, FULL, with_graphs
from baton.tests.parity.test_eagle import BOTH, HEADS, PROMPTS, SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = {"chain": "{}", "tree": "{} tree"}  # of KINDS
OTHERS = [(name, shape) for name, shape in BOTH if NAMES[shape].format(name) not in KINDS]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=17, ignore_eos=True)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=12)


@pytest.mark.parametrize(("name", "shape"), OTHERS)
def test_tokens_of_graphs_are_those_of_plain_decode(
    target: Path, tmp_path: Path, name: str, shape: str
) -> None:
    wanted = Engine(target, device="cuda").generate(PROMPTS, GREEDY)
    head = write_head(tmp_path / "head", *HEADS[name]())
    for kinds in (set(), BREAKABLE, FULL):
        engine = SourcedEngine(target, head, device="cuda", is_greedy=True, **SHAPES[shape])
        with_graphs(engine, kinds=kinds, backend=CudaBackend())
        assert engine.generate(PROMPTS, GREEDY) == wanted
        assert {result.path for result in engine.results} == ({"graph"} if kinds == FULL else {"eager"})


@pytest.mark.parametrize("shape", SHAPES)
def test_the_oracle_is_accepted_in_full(tmp_path: Path, shape: str) -> None:
    engine = SourcedEngine(*write_eagle_oracle(tmp_path), device="cuda", is_greedy=True, **SHAPES[shape])
    with_graphs(engine, backend=CudaBackend())
    (tokens,) = engine.generate([[40, 7, 9]], GREEDY)
    assert tokens == [successor(token) for token in [9, *tokens[:-1]]]
    assert {n for result in engine.results for n in result.accept_lens} == {1 + engine.steps}
