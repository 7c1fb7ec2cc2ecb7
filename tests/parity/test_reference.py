"""The demo model is the one it should be, and its references are worth comparing with."""

import pytest
from baton.tests.parity.prompts import CHATS, PROMPTS

pytestmark = pytest.mark.smollm2


def test_the_model_knows_the_capital_of_france(reference_greedy, smollm2_tokenizer):
    answer = smollm2_tokenizer.decode(reference_greedy["capital"].output_ids)
    assert answer.startswith("The capital of France is Paris.")


def test_prompts_cover_short_long_and_multi_turn(reference_greedy):
    lengths = sorted(len(reference.prompt_ids) for reference in reference_greedy.values())
    assert len(PROMPTS) == len({prompt.name for prompt in PROMPTS}) == len(reference_greedy) >= 25
    assert len(CHATS) == 20
    assert lengths[0] == 1
    assert sum(500 <= length <= 900 for length in lengths) >= 3
    assert max(len(prompt.turns) for prompt in CHATS) >= 5


def test_references_go_on_after_end_of_sequence(reference_greedy):
    assert all(len(reference.output_ids) == 64 for reference in reference_greedy.values())
    assert any(2 in reference.output_ids[:-1] for reference in reference_greedy.values())


def test_references_differ_from_prompt_to_prompt(reference_greedy):
    assert len({tuple(reference.output_ids) for reference in reference_greedy.values()}) == len(
        reference_greedy
    )
