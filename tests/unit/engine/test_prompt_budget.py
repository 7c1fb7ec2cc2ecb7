"""The tokens of forwards over prompts on decode follow card and model, within bounds."""

from baton.engine.prompt_budget import alone_tokens, graph_tokens

H200 = 750e12


def test_graphs_end_where_the_device_is_slower_than_the_host():
    assert graph_tokens(7_500_000_000, 32, H200) == 1024
    assert graph_tokens(135_000_000, 30, H200) == 8192
    assert graph_tokens(70_000_000_000, 80, H200) == 256
    assert graph_tokens(7_500_000_000, 32, H200 / 100) == 256


def test_a_prompt_alone_gets_four_parts_at_once_within_bounds():
    assert [alone_tokens(n) for n in (1, 128, 256, 2048, 4096, 8192)] == [512, 512, 1024, 8192, 8192, 8192]
