"""Noise that is a pure function of seed, position and token, and its distribution."""

import math

import pytest
import torch
from baton.kernels.noise import gumbel, seed_tensor, uniforms
from hypothesis import given
from hypothesis import strategies as st

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# Quantile of the normal law at 1 - 1e-6: how unlikely a statistic must be before a test fails.
Z = 4.75


def mix(bits):
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        bits = ((bits ^ (bits >> shift)) * multiplier) & MASK
    return bits ^ (bits >> 31)


def unmix(bits):
    bits ^= (bits >> 31) ^ (bits >> 62)
    for shift, multiplier in ((27, MULTIPLIERS[1]), (30, MULTIPLIERS[0])):
        bits = (bits * pow(multiplier, -1, 2**64)) & MASK
        bits ^= (bits >> shift) ^ (bits >> (2 * shift))
    return bits


def state_of(seed, position):
    return mix((mix((seed + GAMMA) & MASK) + position * GAMMA) & MASK)


def reference_uniform(seed, position, token):
    bits = mix((state_of(seed, position) + (token + 1) * GAMMA) & MASK)
    return (2 * (bits >> 12) + 1) / 2**53


def row(seed, position, tokens):
    return uniforms(seed_tensor([seed]), torch.tensor([position]), torch.tensor(tokens))[0]


def chi2_limit(df):
    """The chi-squared quantile at 1 - 1e-6 (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + Z * math.sqrt(2 / (9 * df))) ** 3


def test_mix_is_the_published_splitmix64():
    state = 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix((state + n * GAMMA) & MASK) for n in range(1, 5)] == expected


@given(
    st.integers(0, MASK),
    st.integers(0, 2**31),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=4, unique=True),
)
def test_uniforms_equal_big_integer_arithmetic_exactly(seed, position, tokens):
    assert row(seed, position, tokens).tolist() == [
        reference_uniform(seed, position, token) for token in tokens
    ]


@pytest.mark.parametrize(("bits", "u"), [(0, 2.0**-53), (MASK, 1 - 2.0**-53)])
def test_the_extreme_bits_stay_strictly_inside_the_unit_interval(bits, u):
    steps = ((unmix(bits) - state_of(7, 3)) * pow(GAMMA, -1, 2**64)) & MASK
    token = (steps - 1 + 2**63) % 2**64 - 2**63
    assert row(7, 3, [token]).item() == u
    noise = gumbel(seed_tensor([7]), torch.tensor([3]), torch.tensor([token])).item()
    assert noise == pytest.approx(-math.log(-math.log(u)), abs=1e-12)


def test_a_row_of_noise_is_independent_of_batch_and_token_order():
    seeds = seed_tensor([3, 2**64 - 1, 5])
    positions = torch.tensor([0, 17, 17])
    ids = torch.arange(1000)
    together = gumbel(seeds, positions, ids)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    for i in range(3):
        alone = gumbel(seeds[i : i + 1], positions[i : i + 1], ids[order])
        assert torch.equal(alone[0], together[i][order])
    per_row = torch.stack([ids, ids.flip(0), ids[order]])
    assert torch.equal(gumbel(seeds, positions, per_row), together.gather(1, per_row))


def test_seed_position_and_token_each_change_the_noise():
    base = reference_uniform(1, 1, 1)
    assert (
        len({base, reference_uniform(2, 1, 1), reference_uniform(1, 2, 1), reference_uniform(1, 1, 2)}) == 4
    )
    assert row(1, 2, [3]).item() != row(2, 1, [3]).item()


def test_the_arguments_are_left_as_they_are():
    seeds, positions, ids = seed_tensor([3]), torch.tensor([4]), torch.arange(5)
    gumbel(seeds, positions, ids)
    assert (seeds.tolist(), positions.tolist(), ids.tolist()) == ([3], [4], [0, 1, 2, 3, 4])


def samples(varied):
    """2**20 uniforms along one argument, small and consecutive as in service."""
    count = 1 << 20
    if varied == "token":
        return uniforms(seed_tensor([1]), torch.tensor([5]), torch.arange(count)).flatten()
    if varied == "position":
        return uniforms(torch.full((count,), 1), torch.arange(count), torch.tensor([5])).flatten()
    return uniforms(torch.arange(count), torch.full((count,), 5), torch.tensor([5])).flatten()


@pytest.mark.parametrize("varied", ["token", "position", "seed"])
def test_each_of_the_52_random_bits_is_fair_and_unlike_its_neighbour(varied):
    bits = (samples(varied) * 2.0**53).to(torch.int64) >> 1
    n = bits.shape[0]
    for k in range(52):
        ones = ((bits >> k) & 1).sum().item()
        assert (2 * ones - n) ** 2 / n < chi2_limit(1), f"bit {k}: {ones} of {n}"
        equal = (((bits[1:] ^ bits[:-1]) >> k) & 1).sum().item()
        assert (2 * equal - (n - 1)) ** 2 / (n - 1) < chi2_limit(1), f"bit {k} follows its predecessor"


@pytest.mark.parametrize("varied", ["token", "position", "seed"])
def test_uniforms_pass_kolmogorov_smirnov(varied):
    u = samples(varied).sort().values
    n = u.shape[0]
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max((steps[1:] - u).max().item(), (u - steps[:-1]).max().item())
    assert distance < math.sqrt(-math.log(0.5e-6) / 2 / n)


@pytest.mark.parametrize("varied", ["token", "position", "seed"])
def test_consecutive_uniforms_fill_the_square_evenly(varied):
    u = samples(varied)
    cells = (u[:-1] * 32).long() * 32 + (u[1:] * 32).long()
    counts = cells.bincount(minlength=1024).double()
    expected = counts.sum() / 1024
    assert ((counts - expected) ** 2 / expected).sum().item() < chi2_limit(1023)


def gumbel_max_counts(probabilities, n):
    noise = gumbel(torch.full((n,), 2024), torch.arange(n), torch.arange(probabilities.shape[0]))
    return (noise + probabilities.log()).argmax(dim=1).bincount(minlength=probabilities.shape[0]).double()


def test_gumbel_max_frequencies_are_the_softmax():
    """400 000 draws over 16 tokens: with the limit at a chance of 1e-6, a law that is a total variation of
    0.008 away has a noncentrality of at least 4 * 0.008**2 * 400 000 = 102 against a limit of 57, and is seen
    with 99 %."""
    n = 400_000
    probabilities = torch.softmax(torch.linspace(2.5, -2.5, 16, dtype=torch.float64), dim=0)
    counts = gumbel_max_counts(probabilities, n)
    statistic = ((counts - n * probabilities) ** 2 / (n * probabilities)).sum().item()
    assert statistic < chi2_limit(15)

    shifted = probabilities.clone()
    shifted[0] += 0.008
    shifted[1] -= 0.008
    statistic = ((counts - n * shifted) ** 2 / (n * shifted)).sum().item()
    assert statistic > chi2_limit(15)
