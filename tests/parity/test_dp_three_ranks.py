"""Three ranks that share experts, of which one has nothing to do, say what transformers says."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from baton.tests.parity.dp_cases import Asked, DpCases
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

NUM_TOKENS = 9
ASKED = {0: [(9, 0)], 1: [(14, 3), (21, 3)], 2: []}  # lengths, and rounds before they come, by rank


def answered(
    path: Path, prompts: Mapping[int, Sequence[tuple[int, int]]]
) -> tuple[dict[int, list[Asked]], list[list[list[int]]]]:
    """Requests for `prompts` as in ASKED, and the answers of transformers by rank."""
    model = reference_model(path)
    asked = {
        rank: [Asked(tuple(random_ids(length, seed=length)), NUM_TOKENS, at) for length, at in mine]
        for rank, mine in prompts.items()
    }
    answers = [
        [reference_greedy(model, list(each.ids), NUM_TOKENS) for each in mine] for mine in asked.values()
    ]
    return asked, answers


def test_three_ranks_say_what_transformers_says(toy_checkpoint: Callable[..., Path], tmp_path: Path):
    path, head = toy_checkpoint("qwen3_moe"), write_head(tmp_path, head_config(2, (0, 1, 2)), head_tensors())
    way, answers = answered(path, ASKED)
    cases = DpCases(3)
    try:
        for graphs in ("off", "on"):
            with cases.workers(path, head, ep=True, graphs=graphs) as workers:
                assert workers.ask(way) == answers
    finally:
        cases.close()
