"""The choice by estimated scores is the choice by exact ones, and seldom needs them."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from baton.kernels import choose_token as choosing
from baton.kernels.choose_token import (
    COLDEST,
    ERROR,
    EXACT,
    HOPELESS,
    HOTTEST,
    SPLIT,
    choose_token_reference,
    choose_token_triton,
)
from baton.kernels.noise import gumbel

INF = float("inf")
LOG2_E = math.log2(math.e)
TEMPERATURES = (1e-40, 1e-30, 1e-6, 0.01, 0.3, 1.0, 1.7, 100.0, 1e40)


def tensor_of(values: np.ndarray) -> object:
    """A block of values in the interpreter."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    dtype = {"int64": tl.int64, "float32": tl.float32, "float64": tl.float64}[str(values.dtype)]
    return tl.tensor(TensorHandle(values, dtype), tl.block_type(dtype, list(values.shape)))


def exact_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the first token of each split whose scores are all computed exactly, from now on."""
    calls: list[int] = []
    best_token = choosing._best_token

    def counted(p_logits: object, p_token_ids: object, i_first: object, *rest: object) -> object:
        calls.append(int(i_first.handle.data.item()))
        return best_token(p_logits, p_token_ids, i_first, *rest)

    monkeypatch.setattr(choosing, "_best_token", counted)
    return calls


def check_choice(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    first_seed: int = 0,
) -> torch.Tensor:
    """The tokens of drawn rows, which are those of the definition. Row `i` has seed `first_seed + i`."""
    rows = torch.arange(logits.shape[0])
    given = rows + first_seed, 7 * rows, temperature, min_p, torch.ones_like(rows).bool(), token_ids
    tokens, is_bad = choose_token_triton(logits, *given)
    expected, expected_bad = choose_token_reference(logits, *given)
    assert tokens.tolist() == expected.tolist()
    assert is_bad.tolist() == expected_bad.tolist()
    return tokens


def noise_of(rows: int, vocab_size: int) -> torch.Tensor:
    """The noise of the rows of `check_choice`."""
    seeds = torch.arange(rows)
    return gumbel(seeds, 7 * seeds, torch.arange(vocab_size))


def flat(rows: int, vocab_size: int) -> torch.Tensor:
    return torch.zeros(rows, vocab_size)


def rough(rows: int, vocab_size: int) -> torch.Tensor:
    return 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


def huge(rows: int, vocab_size: int) -> torch.Tensor:
    """Both signs, from 1e-38 to 3e38; differences overflow."""
    normal = rough(rows, vocab_size)
    return normal.sign() * torch.logspace(-38, 38.5, rows * vocab_size).view(vocab_size, rows).T


def equal(rows: int, vocab_size: int) -> torch.Tensor:
    """Few values, so that many tokens of a row have its highest logit."""
    return rough(rows, vocab_size).div(4).round()


def masked(rows: int, vocab_size: int) -> torch.Tensor:
    """As a grammar leaves them: mostly -inf, in whole splits, too."""
    logits = rough(rows, vocab_size)
    logits[:, 5:] = -INF
    logits[1::2, -1] = 1.0
    return logits


def tied(rows: int, vocab_size: int) -> torch.Tensor:
    """At temperature 1 all scores are equal up to the rounding of logits to float32."""
    return -noise_of(rows, vocab_size).float()


KINDS = (flat, rough, huge, equal, masked, tied)


@pytest.mark.parametrize(
    "vocab_size",
    [
        1,
        SPLIT + 1,
        *(pytest.param(size, marks=pytest.mark.slow) for size in (2, SPLIT - 1, SPLIT, 3 * SPLIT)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_is_that_of_the_definition(
    kind: Callable[[int, int], torch.Tensor], vocab_size: int, interpreter: None
):
    logits = kind(2 * len(TEMPERATURES), vocab_size)
    temperature = torch.tensor(TEMPERATURES, dtype=torch.float64).repeat(2)
    check_choice(logits, temperature)
    min_p = torch.tensor([0.0, 1e-30, 0.02, 0.9, 1.0], dtype=torch.float64).repeat(6)[: len(logits)]
    check_choice(logits, temperature, min_p, 5 * torch.arange(vocab_size).flip(0), first_seed=-5)


def test_a_min_p_at_the_border_cuts_exactly_where_the_definition_does(interpreter: None):
    """min_p is the relative probability of one token, or a float beside it, or as near as ERROR."""
    borders = (1.0, 1 - 2**-53, 1 + 2**-52, 1 - ERROR / 2, 1 + ERROR / 2, 1 - 2 * ERROR, 1 + 2 * ERROR)
    rows, vocab_size = 4 * len(borders), SPLIT + 9
    logits = rough(rows, vocab_size).div(4)
    temperature = torch.tensor([0.05, 0.7, 1.0, 30.0], dtype=torch.float64).repeat_interleave(len(borders))
    scaled = (logits.double() - logits.max(dim=1).values.double()[:, None]) / temperature[:, None]
    picked = choose_token_reference(
        logits, torch.arange(rows), 7 * torch.arange(rows), temperature, None,
        torch.ones(rows).bool(), None,
    )[0]  # fmt: skip
    factors = torch.tensor(borders, dtype=torch.float64).repeat(4)
    min_p = scaled[torch.arange(rows), picked].exp().mul(factors).clamp(max=1.0)
    kept = check_choice(logits, temperature, min_p) == picked
    assert kept.any(), "a token that would be chosen without min-p stays"
    assert not kept.all(), "or is cut"


def test_scores_within_the_error_are_compared_exactly(interpreter: None, monkeypatch: pytest.MonkeyPatch):
    rows, ones = 40, torch.ones(40, dtype=torch.float64)
    calls = exact_calls(monkeypatch)
    check_choice(tied(rows, 300), ones)
    assert len(calls) == rows, "every row has more than one candidate"
    monkeypatch.setattr(choosing, "ERROR", 0.0)
    with pytest.raises(AssertionError):
        check_choice(tied(rows, 300), ones)


def test_near_ties_of_equal_logits_are_compared_exactly(interpreter: None, monkeypatch: pytest.MonkeyPatch):
    """Of 50000 rows of noise, those whose best two scores are closer than the errors of their estimates."""
    seeds = torch.arange(50000)
    best = gumbel(seeds, seeds, torch.arange(60)).topk(2).values
    near = seeds[best[:, 0] - best[:, 1] < 1.9 * ERROR]
    assert len(near) > 0
    calls = exact_calls(monkeypatch)
    given = near, near, torch.ones(len(near)).double(), None, torch.ones(len(near)).bool(), None
    tokens, _ = choose_token_triton(torch.zeros(len(near), 60), *given)
    assert tokens.tolist() == choose_token_reference(torch.zeros(len(near), 60), *given)[0].tolist()
    assert len(calls) == len(near)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.7, 1.0, 100.0])
@pytest.mark.parametrize("kind", [flat, rough, huge, masked])
def test_few_splits_compute_exact_scores(
    kind: Callable[[int, int], torch.Tensor],
    temperature: float,
    interpreter: None,
    monkeypatch: pytest.MonkeyPatch,
):
    calls = exact_calls(monkeypatch)
    temperatures = torch.full((30,), temperature, dtype=torch.float64)
    check_choice(kind(30, SPLIT + 40), temperatures)
    check_choice(kind(30, SPLIT + 40), temperatures, torch.full_like(temperatures, 0.1))
    assert len(calls) <= 1, "of 120"


@pytest.mark.parametrize("temperature", [1e-40, 1e40])
def test_extreme_temperatures_have_no_estimates(
    temperature: float, interpreter: None, monkeypatch: pytest.MonkeyPatch
):
    calls = exact_calls(monkeypatch)
    check_choice(rough(2, SPLIT + 1), torch.full((2,), temperature, dtype=torch.float64))
    assert calls == [0, SPLIT, 0, SPLIT]


def test_estimated_exponentials_are_within_a_quarter_of_the_error(interpreter: None):
    rng, ends = np.random.default_rng(1), np.arange(4096)
    small = rng.integers(0, 2**52, 2**16) >> np.arange(2**16) % 52
    special = [small, 2**52 - 1 - small, ends, 2**52 - 1 - ends, 7 * 2**49 + ends - 2048]
    bits = np.concatenate([*special, rng.integers(0, 2**52, 2**20 - sum(map(len, special)))])
    odd = 2 * bits + 1
    exact = np.where(odd > 2**52, -np.log1p(-((2**53 - odd) * 2.0**-53)), -np.log(odd * 2.0**-53))
    estimate = choosing._exponential_estimate(tensor_of(bits)).handle.data
    assert estimate.dtype == np.float32
    errors = np.abs(estimate / exact - 1)
    assert errors.max() <= 16 * 2**-24, "as derived"
    assert 4 * LOG2_E * errors.max() <= ERROR


@pytest.mark.parametrize("temperature", [COLDEST, 1e-30, 1e-3, 0.3, 1.0, 7.7, 1e9, HOTTEST])
def test_estimated_logits_are_within_a_quarter_of_the_error(temperature: float, interpreter: None):
    """Of all tokens that are not hopeless."""
    rng = np.random.default_rng(3)
    highest = rng.standard_normal(2**18).astype(np.float32) * np.float32(temperature * 10)
    below = rng.choice([0.0, 1e-6, 0.1, 1.0, 30.0, 41.6], 2**18) * rng.random(2**18)
    logits = (highest - temperature * below).astype(np.float32)
    exact = (logits.astype(np.float64) - highest) / temperature * LOG2_E
    scaled = choosing._scaled_estimate(*map(tensor_of, (logits, highest, np.full(2**18, temperature))))
    is_possible = (scaled.handle.data >= HOPELESS) & (exact <= 0)
    assert is_possible.mean() > 0.9
    assert 4 * np.abs(scaled.handle.data - exact)[is_possible].max() <= ERROR


def test_a_hopeless_token_loses_to_the_rows_highest():
    lowest, highest = -math.log(53 * math.log(2)), -math.log(2.0**-53)
    assert (HOPELESS + ERROR) / LOG2_E + highest < lowest


@pytest.mark.parametrize("capability", ["compiled_for_h200", "compiled_for_a100"])
@pytest.mark.parametrize("min_p", [None, torch.ones(3, dtype=torch.float64)])
def test_scores_in_float64_are_in_branches_of_compiled_kernels(
    capability: str, min_p: torch.Tensor | None, request: pytest.FixtureRequest
):
    compiled = request.getfixturevalue(capability)
    rows, ones = torch.arange(3), torch.ones(3, dtype=torch.float64)
    choose_token_triton(torch.zeros(3, 4096), rows, rows, ones, min_p, rows.bool(), None)
    ptx = dict(compiled)["_scores_kernel"].asm["ptx"]
    arithmetic = r"(?:add|sub|mul|div\.rn|fma\.rn)\.f64"
    assert ptx.count("ex2.approx") == SPLIT // 256, "a thread of 256 estimates so many tokens"
    estimates, rest = ptx[: ptx.rindex("ex2.approx")], ptx[ptx.rindex("ex2.approx") :]
    assert not re.search(arithmetic, estimates)
    assert re.search(r"@%p\d+ bra", rest[: re.search(arithmetic, rest).start()]), "behind a branch"
    assert ptx.count("div.rn.f64") == EXACT // 256
