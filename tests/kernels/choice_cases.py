"""Kernels around the forwards of a step and the choice of tokens: bitwise equal to their definitions."""

import math
import random
from collections.abc import Callable, Iterator

import torch
from baton.kernels.chain_verify import chain_verify, chain_verify_triton
from baton.kernels.choose_ranked import (
    FEW,
    Ranking,
    choose_ranked,
    choose_ranked_reference,
    choose_ranked_triton,
)
from baton.kernels.choose_token import choose_token, choose_token_reference, choose_token_triton
from baton.kernels.match_ngrams import NgramSizes, match_ngrams, match_ngrams_triton
from baton.kernels.penalise_logits import (
    IN_PROMPT,
    RowEdits,
    penalise_logits,
    penalise_logits_reference,
    penalise_logits_triton,
)
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
from baton.kernels.top_logprobs import top_logprobs, top_logprobs_reference, top_logprobs_triton
from baton.kernels.triton_jit import next_power_of_2
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


def check_choose_ranked(
    device: str, num_rows: int, vocab_size: int, width: int, kind: str = "rough", each: int = 1
) -> None:
    """Rows with every mix of limits, some of them not ranked or broken, `each` of a request. Logits of `kind`
    rough are normal with some ties, those of flat need many candidates, those of masked are mostly -inf.
    """
    rng, count = random.Random(num_rows * vocab_size + width), num_rows // each
    logits = (0.05 if kind == "flat" else 4.0) * randn(num_rows, vocab_size)
    if kind == "rough":
        logits[::3] = logits[::3].round()
    if kind == "masked":
        logits.masked_fill_(randn(num_rows, vocab_size) < 2.5, -INF)
        logits[:, rng.randrange(vocab_size)] = 0.0
    logits[1 % max(num_rows, 1) :: 7] = 0.0  # either zero, in ties
    logits[1 % max(num_rows, 1) :: 7, ::2] = -0.0
    top_k = [rng.choice([vocab_size, vocab_size, 1, 2, 7, width, width + 1]) for _ in range(count)]
    ranking = Ranking(
        seeds=_apart(torch.tensor([rng.randrange(2**60) for _ in range(count)], dtype=torch.int64)),
        temperature=_apart(_reals(rng, [1e-30, 0.6, 1.0, 3.0], count)),
        top_k=_apart(torch.tensor([min(k, vocab_size) for k in top_k], dtype=torch.int64)),
        top_p=_apart(_reals(rng, [0.0, 1e-9, 0.5, 0.95, 0.999999, 1.0], count)),
        min_p=_apart(_reals(rng, [0.0, 0.0, 0.02, 1.0], count)),
        is_ranked=torch.tensor([row % 5 != 3 for row in range(count)], dtype=torch.bool),
    )
    ranking.is_ranked.logical_and_((ranking.top_p < 1) | (ranking.top_k < vocab_size))
    positions = _apart(torch.tensor([rng.randrange(10**6) for _ in range(num_rows)], dtype=torch.int64))
    before, is_bad = torch.arange(num_rows), torch.tensor([row % 6 == 4 for row in range(num_rows)]).bool()
    given = logits, positions, ranking
    expected, is_wide = choose_ranked_reference(*given, before, is_bad, width)
    on_device = (logits.to(device), positions.to(device), Ranking(*(x.to(device) for x in ranking)))
    rest = before.clone().to(device), is_bad.to(device), width
    tokens, is_unseen = (x.cpu() for x in choose_ranked_triton(*on_device, *rest))
    capacity = 4 * next_power_of_2(min(width, vocab_size))
    for row in range(num_rows):
        is_equal, is_idle = row % 7 == 1 % num_rows, row % 6 == 4 or not ranking.is_ranked[row // each]
        assert not (is_idle and is_unseen[row])
        if (is_equal and vocab_size > capacity) or width < ranking.top_k[row // each] < vocab_size:
            assert is_idle or is_unseen[row], "more tokens than have places, or than are promised"
        is_tied = is_equal or (kind == "rough" and row % 3 == 0)
        assert not is_unseen[row] or is_wide[row] or (is_tied and vocab_size > capacity)
        assert is_unseen[row] or tokens[row] == whole_choice(row, logits, positions, ranking, each)
    assert torch.equal(choose_ranked(*given, before, is_bad, width)[0], expected)


def check_nucleus_of_all(device: str, vocab_size: int, width: int) -> None:
    """A nucleus is a share of the mass of all tokens, many of which are no candidates."""
    num_rows = 48
    logits = 1.5 * randn(num_rows, vocab_size)
    logits[::2] *= 0.1
    logits[::2, :width] += math.log(vocab_size / width / 4)  # all candidates side by side
    count = torch.arange(num_rows)
    ranking = Ranking(
        seeds=count + 2**40,
        temperature=torch.ones(num_rows, dtype=torch.float64),
        top_k=torch.full_like(count, vocab_size),
        top_p=0.1 + 0.002 * (count % 30).double(),
        min_p=torch.zeros(num_rows, dtype=torch.float64),
        is_ranked=torch.ones_like(count, dtype=torch.bool),
    )
    is_fine = torch.zeros_like(count, dtype=torch.bool)
    given = logits, count, ranking, torch.full_like(count, -1), is_fine
    expected, is_unseen = choose_ranked_reference(*given, width)
    on_device = Ranking(*(x.to(device) for x in ranking))
    rest = (x.to(device) for x in given[3:])
    found = choose_ranked_triton(logits.to(device), count.to(device), on_device, *rest, width)
    assert not is_unseen.any()
    assert not found[1].any()
    assert found[0].tolist() == expected.tolist()


def check_equal_candidates(device: str) -> None:
    """Rows whose candidates are many equal tokens: around the number that one program of few registers takes,
    and around the number of places.
    """
    width, vocab_size = FEW // 2, 3 * FEW
    capacity = 4 * next_power_of_2(width)
    counts = [1, 2, FEW - 1, FEW, FEW + 1, FEW + 2, capacity - 1, capacity, capacity + 1]
    logits = torch.full((len(counts), vocab_size), -INF)
    for row, count in enumerate(counts):
        logits[row, torch.randperm(vocab_size, generator=torch.Generator().manual_seed(row))[:count]] = 1.5
    rows = torch.arange(len(counts))
    real, no_token = torch.ones(len(counts), dtype=torch.float64), torch.full_like(rows, -1)
    ranking = Ranking(rows, real, torch.full_like(rows, vocab_size), 0.75 * real, 0 * real, rows >= 0)
    given = logits, rows, ranking, no_token, rows < 0
    expected, _ = choose_ranked_reference(*given, vocab_size)
    on_device = Ranking(*(x.to(device) for x in ranking))
    tokens, is_unseen = choose_ranked_triton(
        logits.to(device), rows.to(device), on_device, no_token.to(device), given[4].to(device), width
    )
    assert is_unseen.tolist() == [count > capacity for count in counts]
    assert tokens.tolist()[:-1] == expected.tolist()[:-1]


def whole_choice(
    row: int, logits: torch.Tensor, positions: torch.Tensor, ranking: Ranking, each: int
) -> int:
    """The token of `row` with all tokens as candidates."""
    one = Ranking(*(x[row // each : row // each + 1] for x in ranking))
    place = slice(row, row + 1)
    if not one.is_ranked or row % 6 == 4:
        return row
    no_token, is_fine = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    found, _ = choose_ranked_reference(
        logits[place], positions[place], one, no_token, is_fine, logits.shape[1]
    )
    return int(found)


def _reals(rng: random.Random, values: list[float], count: int) -> torch.Tensor:
    return torch.tensor([rng.choice(values) for _ in range(count)], dtype=torch.float64)


def check_penalise_logits(device: str, count: int, num_nodes: int, vocab_size: int) -> None:
    """Chains and trees, with and without counts and masks; some requests have no penalties, or ban most."""
    generator = torch.Generator().manual_seed(count * num_nodes + vocab_size)

    def random(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    num_rows, num_words = count * num_nodes, -(-vocab_size // 32)
    logits = 4 * randn(num_rows, vocab_size + 5)[:, :vocab_size]
    logits[::2, random(vocab_size, 3)] = -INF
    one_each = [1.3, 0.0, 0.0], [1.0, 0.7, 0.0], [1.0, 0.0, -0.4]
    penalties = torch.tensor([[1.0, 0.0, 0.0], *one_each, [0.9, -0.3, 1.1]])
    slots = 1 + random(4, count)
    slots[::4] = 0
    is_rare, in_prompt = random(2, 5, vocab_size) == 0, IN_PROMPT * random(2, 5, vocab_size)
    seen = (random(3, 5, vocab_size) * is_rare + in_prompt).int()
    tokens = random(vocab_size, count, num_nodes)
    drafts = torch.where(random(3, *tokens.shape) == 0, tokens[:, -1:], tokens)[:, 1:]  # some again
    tree = random(2, count, num_nodes, num_nodes) == 0
    masks = random(1 << 31, num_rows, num_words).int() - random(1 << 31, num_rows, num_words).int()
    for counts, family, bits in (
        (seen, None, None), (seen, tree, masks), (None, None, masks), (None, None, None),
    ):  # fmt: skip
        given = RowEdits(slots, penalties, counts, drafts, family, bits)
        expected = penalise_logits_reference(logits, given)
        on_device = RowEdits(*(None if x is None else x.to(device) for x in given))
        wide = torch.nn.functional.pad(logits, (0, 5)).to(device)[:, :vocab_size]
        assert torch.equal(penalise_logits_triton(wide, on_device).cpu(), expected)
        assert torch.equal(penalise_logits(logits, given), expected)
    if count and num_nodes > 1:
        both = [RowEdits(slots, penalties, each, drafts) for each in (seen, seen * 0)]
        alone = [penalise_logits_reference(logits, each) for each in both]
        assert not torch.equal(*alone)


def check_top_logprobs(device: str, num_rows: int, vocab_size: int, num_top: int) -> None:
    """Rows that ask and rows that do not; equal logits come by their ids."""
    generator = torch.Generator().manual_seed(num_rows + vocab_size)
    logits = 4 * randn(num_rows, vocab_size + 3)[:, :vocab_size]
    logits[1::3] = logits[1::3].round()
    logits[2::3, ::2] = -INF
    logits[5::7, 2:] = -INF
    logits[6::7] = 0.0
    logits[6::7, -1] = 1.0
    chosen = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    wanted = torch.arange(num_rows) % 4 - 1
    given = logits, _apart(chosen), _apart(wanted), num_top
    values, ids = top_logprobs_reference(*given)
    on_device = logits.to(device), _apart(chosen).to(device), _apart(wanted).to(device)
    found_values, found_ids = (x.cpu() for x in top_logprobs_triton(*on_device, num_top))
    asks = wanted >= 0
    assert torch.equal(found_ids, ids)
    assert (ids[~asks] == -1).all()
    assert torch.allclose(found_values[asks], values[asks], atol=2e-5, rtol=1e-6)
    assert found_values[~asks].isnan().all()
    for ours, theirs in zip(top_logprobs(*given), (values, ids), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


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
    for sizes in ((0, 8, 4), (1, 1, 1), (24, 40, 8), (24, 90, 90), (24, 5003, 16), (8, 3000, 1024)):
        yield check_choose_ranked, sizes
    for kind in ("flat", "masked"):
        yield check_choose_ranked, (24, 4100, 32, kind)
    for kind in ("flat", "rough"):
        yield check_choose_ranked, (24, 3000, 70, kind)
    yield check_choose_ranked, (7, 40000, 16)
    for vocab_size in (1500, 17000):
        yield check_nucleus_of_all, (vocab_size, 128)
    yield check_equal_candidates, ()
    yield check_choose_ranked, (24, 700, 8, "rough", 4)
    for count, num_nodes, vocab_size in ((0, 1, 9), (1, 1, 1), (5, 1, 2050), (9, 4, 333), (3, 7, 64)):
        yield check_penalise_logits, (count, num_nodes, vocab_size)
    for num_rows, vocab_size, num_top in ((0, 9, 2), (1, 1, 0), (8, 9, 3), (16, 4500, 20), (4, 300, 40)):
        yield check_top_logprobs, (num_rows, vocab_size, num_top)
    for count, page_size, num_places in ((0, 4, 3), (1, 1, 1), (7, 4, 5), (9, 16, 8)):
        yield check_step_places, (count, page_size, num_places)
    for count, num_nodes, num_path in ((0, 1, 1), (1, 1, 1), (6, 4, 4), (9, 11, 5)):
        yield check_step_outcome, (count, num_nodes, num_path)
    for count, num_nodes in ((0, 2), (1, 1), (9, 4), (20, 7)):
        yield check_chain_verify, (count, num_nodes)
    for count, window, length in ((1, 8, 1), (3, 16, 14), (5, 64, 90), (2, 2500, 2400)):
        yield check_match_ngrams, (count, window, length)
