"""Choosing tokens: launches against the definition, on rows that are drawn, likeliest, broken, and all of them together."""

import random
from collections.abc import Callable, Iterator

import torch
from baton.kernels.choose_token import choose_token, choose_token_reference, choose_token_triton
from baton.tests.kernels.cases import NAN, randn

INF = float("inf")


def check_choose_token(device: str, num_rows: int, vocab_size: int, is_cut: bool) -> None:
    """Equal to the bit. `is_cut`: the logits are a part of wider rows, whose rest is NaN."""
    rng = random.Random(num_rows * vocab_size)
    wide = torch.full((num_rows, vocab_size + 3 * is_cut), NAN)
    logits = wide[:, :vocab_size].copy_(4 * randn(num_rows, vocab_size)) if num_rows else wide[:, :vocab_size]
    for row, broken in ((1, NAN), (2, INF), (3, -INF)):
        if row < num_rows - 1:
            logits[row] = -INF if broken == -INF else logits[row]
            logits[row, rng.randrange(vocab_size)] = broken
    if num_rows:
        logits[-1] = logits[-1].round()  # ties
    knobs = (
        torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(num_rows)], dtype=torch.int64),
        torch.tensor([rng.randrange(10**6) for _ in range(num_rows)], dtype=torch.int64),
        torch.tensor([rng.choice([1e-30, 0.7, 1.0, 5.0]) for _ in range(num_rows)], dtype=torch.float64),
        torch.tensor([rng.choice([0.0, 0.05, 1.0]) for _ in range(num_rows)], dtype=torch.float64),
        torch.tensor([row % 3 > 0 for row in range(num_rows)], dtype=torch.bool),
        torch.randperm(3 * vocab_size, generator=torch.Generator().manual_seed(4))[:vocab_size],
    )
    on_device = wide.to(device)[:, :vocab_size]
    tokens, is_bad = choose_token_triton(on_device, *(knob.to(device) for knob in knobs))
    expected, expected_bad = choose_token_reference(logits, *knobs)
    assert is_bad.tolist() == expected_bad.tolist()
    assert tokens.tolist() == expected.tolist()
    assert choose_token(logits, *knobs)[0].tolist() == expected.tolist()


def choice_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for num_rows, vocab_size in ((0, 8), (1, 1), (5, 7), (7, 2048), (6, 5003)):
        yield check_choose_token, (num_rows, vocab_size, vocab_size % 2 == 1)
