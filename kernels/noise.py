"""Counter-based noise: a pure function of (request seed, position, token id).

A sampled token therefore depends neither on the batch, nor on a retry, nor on a drafter.

    state(seed, position) = mix(mix(seed + G) + position * G)        64 bits per row
    bits(state, token)    = mix(state + (token + 1) * G)             splitmix64, `token` steps after `state`
    u                     = (2 * (bits >>> 12) + 1) * 2**-53         odd multiples of 2**-53: never 0 or 1
    gumbel                = -log(-log(u))                            float64, in [-3.61, 36.74]

G is the golden gamma of splitmix64 and mix its finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", 2014). All values up to u are exact: integer arithmetic modulo 2**64 in int64 tensors,
then powers of two.
"""

from collections.abc import Sequence

import torch


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


GAMMA = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def seed_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Integer seeds as int64 `[R]`, reduced modulo 2**64."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform noise in (0, 1), float64 `[R, N]`.

    `seeds` and `positions`: int64 `[R]`. `token_ids`: int64 `[N]`, the same for every row, or `[R, N]`.
    """
    state = _mix_(_mix_(seeds + GAMMA) + positions * GAMMA)
    steps = (token_ids + 1) * GAMMA
    bits = _mix_(state[:, None] + (steps if steps.dim() == 2 else steps[None, :]))
    return _shift_right_(bits, 12).mul_(2).add_(1).to(torch.float64).mul_(2.0**-53)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 `[R, N]`; arguments as in `uniforms`."""
    return uniforms(seeds, positions, token_ids).log_().neg_().log_().neg_()


def _mix_(bits: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, in place: every output bit depends on every input bit."""
    bits ^= (bits >> 30) & ((1 << 34) - 1)
    bits *= MIX_1
    bits ^= (bits >> 27) & ((1 << 37) - 1)
    bits *= MIX_2
    bits ^= (bits >> 31) & ((1 << 33) - 1)
    return bits


def _shift_right_(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift in place; `>>` on int64 copies the sign down."""
    bits >>= count
    bits &= (1 << (64 - count)) - 1
    return bits
