"""Pages that grow and are taken back on a device: the tokens of an undisturbed run on the CPU."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.sim.test_page_growth import SAMPLING, Asked, pair_of, played, undisturbed
from baton.tests.sim.test_workers import prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 3)), head_tensors())


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("drafts", ["off", "chain", "tree"])
def test_retracted_requests_give_the_tokens_of_an_undisturbed_run(
    target: Path, head: Path, drafts: str, graphs: str
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rng = random.Random(f"{drafts}{graphs}")
    wanted = [(prompt, SAMPLING[i % len(SAMPLING)]) for i, prompt in enumerate(prompts(rng, 6))]
    pair = pair_of(
        target, head, drafts, device="cuda", graphs=graphs, graph_self_test=False, pages=34, max_running=8
    )
    pair.decode.growth.is_on, pair.decode.growth.ahead_tokens = True, 4
    asked = [Asked(pair, i, prompt, sampling, is_local=True) for i, (prompt, sampling) in enumerate(wanted)]
    played(pair, asked)
    assert sum(each.retractions for each in asked) >= 3, "the pool was never full, so this shows nothing"
    assert [each.told for each in asked] == undisturbed(target, head, drafts, wanted)
    pair.assert_nothing_is_held()
