"""The tokens of prompts between two decode steps follow card and model, within bounds."""

import pytest
import torch
from baton.engine.prompt_budget import PromptBudget, alone_tokens, prompt_budget, rate_of

H200 = 132 * 4096 * 1.98e9


def budget(weights, *, rate=H200, asked=0, num_layers=32):
    return prompt_budget(asked, operations_per_token=2 * weights, num_layers=num_layers, rate=rate)


def test_a_cpu_keeps_128_tokens_whatever_the_model():
    assert rate_of(torch.device("cpu")) is None
    for weights in (10**6, 10**11):
        assert budget(weights, rate=None) == PromptBudget(step_tokens=128, graph_tokens=128)
    assert budget(10**9, rate=None, asked=64).step_tokens == 64


@pytest.mark.parametrize(
    ("weights", "tokens"), [(135e6, 8192), (1.2e9, 8192), (7.5e9, 2048), (32e9, 512), (70e9, 256)]
)
def test_a_card_gets_as_many_tokens_as_it_computes_in_50_ms(weights, tokens):
    assert budget(int(weights)).step_tokens == tokens
    assert budget(int(weights), asked=1000).step_tokens == 1000


def test_a_slower_card_gets_fewer_tokens():
    sizes = [budget(7_500_000_000, rate=H200 / factor).step_tokens for factor in (1, 2, 4, 8, 100)]
    assert sizes == [2048, 1024, 512, 256, 256]


def test_graphs_end_where_the_device_is_slower_than_the_host():
    assert budget(7_500_000_000).graph_tokens == 512
    assert budget(135_000_000, num_layers=30).graph_tokens == 8192
    assert budget(70_000_000_000, num_layers=80).graph_tokens == 256


def test_a_prompt_alone_gets_four_parts_at_once_within_bounds():
    assert [alone_tokens(n) for n in (1, 128, 256, 2048, 4096, 8192)] == [512, 512, 1024, 8192, 8192, 8192]
