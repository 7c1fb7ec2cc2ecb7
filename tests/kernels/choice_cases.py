"""Kernels around the forwards of a step and the choice of tokens: bitwise equal to their definitions."""

import random
from collections.abc import Callable, Iterator

import torch
from baton.kernels.chain_verify import chain_verify, chain_verify_triton
from baton.kernels.choose_token import choose_token, choose_token_reference, choose_token_triton
from baton.kernels.match_ngrams import NgramSizes, match_ngrams, match_ngrams_triton
from baton.kernels.step_glue import (
    CAPACITY,
    DRAFT_ROW,
    LENGTH,
    PAGES,
    REMAINING,
    PlaceSizes,
    step_outcome,
    step_outcome_reference,
    step_outcome_triton,
    step_places,
    step_places_reference,
    step_places_triton,
)
from baton.tests.kernels.cases import NAN, randn

INF = float("inf")


def check_choose_token(device: str, num_rows: int, vocab_size: int, is_cut: bool, each: int = 1) -> None:
    """Drawn, greedy and broken rows, `each` of a request. `is_cut`: part of wider rows, whose rest is NaN."""
    rng, count = random.Random(num_rows * vocab_size), num_rows // each
    wide = torch.full((num_rows, vocab_size + 3 * is_cut), NAN)
    logits = wide[:, :vocab_size].copy_(4 * randn(num_rows, vocab_size)) if num_rows else wide[:, :vocab_size]
    for row, broken in ((1, NAN), (2, INF), (3, -INF)):
        if row < num_rows - 1:
            logits[row] = -INF if broken == -INF else logits[row]
            logits[row, rng.randrange(vocab_size)] = broken
    if num_rows:
        logits[-1] = logits[-1].round()  # ties
    knobs = (
        torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(count)], dtype=torch.int64),
        torch.tensor([[rng.randrange(10**6), -1] for _ in range(num_rows)]).view(-1, 2)[:, 0].long(),
        torch.tensor([rng.choice([1e-30, 0.7, 1.0, 5.0]) for _ in range(count)], dtype=torch.float64),
        torch.tensor([rng.choice([0.0, 0.05, 1.0]) for _ in range(count)], dtype=torch.float64),
        torch.tensor([row % 3 > 0 for row in range(count)], dtype=torch.bool),
        torch.randperm(3 * vocab_size, generator=torch.Generator().manual_seed(4))[:vocab_size],
    )
    wider = [torch.stack((knob, knob, -knob), dim=1)[:, 1] for knob in knobs[:4]]  # columns of wider rows
    for given in (knobs, (*wider[:3], None, knobs[4], None), (*wider, *knobs[4:])):
        on_device = (None if knob is None else knob.to(device) for knob in given)
        tokens, is_bad = choose_token_triton(wide.to(device)[:, :vocab_size], *on_device)
        expected, expected_bad = choose_token_reference(logits, *given)
        assert is_bad.tolist() == expected_bad.tolist()
        assert tokens.tolist() == expected.tolist()
        assert choose_token(logits, *given)[0].tolist() == expected.tolist()


def check_step_places(device: str, count: int, page_size: int, num_places: int) -> None:
    """Idle requests, cold ones, and ones at the end of their pages or of the context."""
    rng, num_pages = random.Random(count), 9
    state = torch.randint(1, 90, (count, PAGES + num_pages), generator=torch.Generator().manual_seed(count))
    longest = num_pages * page_size - num_places
    for row in range(count):
        capacity = rng.randrange(1, longest + 1)
        state[row, :PAGES] = 0
        state[row, LENGTH], state[row, CAPACITY] = rng.randrange(capacity), capacity
        state[row, REMAINING], state[row, DRAFT_ROW] = rng.choice([0, 1, 7]), rng.choice([0, 3])
    sizes = PlaceSizes(
        num_places=num_places, num_nodes=max(num_places - 1, 1), num_path=min(num_places, 2),
        page_size=page_size,
        max_context=longest - 1, target_page=60 * page_size, draft_page=2 * page_size,
    )  # fmt: skip
    expected = step_places_reference(state, sizes)
    for ours, theirs in zip(step_places_triton(state.to(device), sizes), expected, strict=True):
        assert ours.tolist() == theirs.tolist()
    assert all(torch.equal(*pair) for pair in zip(step_places(state, sizes), expected, strict=True))


def check_step_outcome(device: str, count: int, num_nodes: int, num_path: int) -> None:
    """Padding requests share the idle slot 0; branches, flags and what is left to say are random."""
    generator, rng = torch.Generator().manual_seed(count + num_nodes), random.Random(num_path)
    table = torch.randint(1, 50, (count + 3, PAGES + 2), generator=generator)
    table[:, REMAINING] = torch.tensor([0, *(rng.choice([0, 1, 3, 99]) for _ in range(count + 2))])
    slots = (torch.randperm(count + 2, generator=generator)[:count] + 1) * (
        torch.arange(count) < max(count - 2, 1)
    )
    table[0] = 0
    wide = torch.randint(0, num_nodes, (count, num_nodes), generator=generator)
    tokens, path = 100 + wide[:, :num_path], wide[:, :num_path].sort(dim=1).values
    accept_len = torch.tensor([rng.randrange(num_path + 1) for _ in range(count)], dtype=torch.int64)
    flags = [torch.rand(count * num_nodes, generator=generator) < 0.15 for _ in range(2)]
    given = (_apart(slots), tokens, path, _apart(accept_len), *flags, _apart(torch.arange(count)))
    ours, theirs, plain = table.to(device), table.clone(), table.clone()
    report, emitted = step_outcome_triton(ours, *(x.to(device) for x in given))
    expected = step_outcome_reference(theirs, *given)
    assert (report.tolist(), emitted.tolist()) == (expected.report.tolist(), expected.emitted.tolist())
    assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(step_outcome(plain, *given).report, expected.report)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same values, with another behind each."""
    return torch.stack((x, x + 1), dim=1)[:, 0]


def check_chain_verify(device: str, count: int, num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(count * num_nodes)
    tokens, targets = (torch.randint(0, 2, (count, num_nodes), generator=generator) for _ in range(2))
    limits = torch.randint(0, num_nodes + 2, (count,), generator=generator)
    expected = [
        min(1 + next((j for j in range(num_nodes - 1) if t[j] != d[j + 1]), num_nodes - 1), limit)
        for d, t, limit in zip(tokens.tolist(), targets.tolist(), limits.tolist(), strict=True)
    ]
    assert chain_verify_triton(tokens.to(device), targets.to(device), limits.to(device)).tolist() == expected
    assert chain_verify(tokens, targets, limits).tolist() == expected


def check_match_ngrams(device: str, count: int, window: int, length: int) -> None:
    """Texts of few tokens, so that some repeat, against a plain search."""
    draws = random.Random(count * window + length)
    sizes = NgramSizes(shortest=2, longest=4, num_drafts=5)
    rings, texts = torch.full((count + 1, window), -1, dtype=torch.int32), []
    for row in range(1, count + 1):
        texts.append([draws.randrange(2 + row % 3) for _ in range(max(1, length - row))])
        for position in range(max(0, len(texts[-1]) - window), len(texts[-1])):
            rings[row, position % window] = texts[-1][position]
    rows = torch.tensor([*range(1, count + 1), 0])
    lasts = torch.tensor([*(len(text) - 1 for text in texts), 3])
    expected = [_followed(text[-window:], sizes) for text in texts]
    tokens = [found or text[-1:] * 5 for found, text in zip(expected, texts, strict=True)]
    for drafts in (
        match_ngrams_triton(rings.to(device), rows.to(device), lasts.to(device), sizes),
        match_ngrams(rings, rows, lasts, sizes),
    ):
        assert drafts.found.tolist() == [*map(len, expected), 0]
        assert drafts.tokens[:-1].tolist() == tokens


def _followed(text: list[int], sizes: NgramSizes) -> list[int]:
    """The drafts behind `text`, found token by token; empty without an agreement."""
    best = (0, 0)
    for end in range(1, len(text)):
        length = 0
        while length < min(sizes.longest, end) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        best = max(best, (length, end))
    if best[0] < sizes.shortest:
        return []
    copy = list(text)
    for ahead in range(sizes.num_drafts):
        copy.append(copy[best[1] + ahead])
    return copy[len(text) :]


def choice_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for num_rows, vocab_size in ((0, 8), (1, 1), (5, 7), (7, 2048), (6, 5003)):
        yield check_choose_token, (num_rows, vocab_size, vocab_size % 2 == 1)
    yield check_choose_token, (12, 3000, True, 4)
    for count, page_size, num_places in ((0, 4, 3), (1, 1, 1), (7, 4, 5), (9, 16, 8)):
        yield check_step_places, (count, page_size, num_places)
    for count, num_nodes, num_path in ((0, 1, 1), (1, 1, 1), (6, 4, 4), (9, 11, 5)):
        yield check_step_outcome, (count, num_nodes, num_path)
    for count, num_nodes in ((0, 2), (1, 1), (9, 4), (20, 7)):
        yield check_chain_verify, (count, num_nodes)
    for count, window, length in ((1, 8, 1), (3, 16, 14), (5, 64, 90), (2, 2500, 2400)):
        yield check_match_ngrams, (count, window, length)
