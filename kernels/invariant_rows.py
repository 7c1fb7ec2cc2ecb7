"""Batch-invariant operations of a CPU: the bits of a row do not depend on the rows beside it.

Libraries choose the order of a sum by the shape of a product, and vector code differs from the scalar code at
the end of a range. Here a product always has ROWS rows, padded with zeros, and everything else is built of
single additions, multiplications, divisions and roots. Each of these is rounded once, by IEEE 754, in vector
and scalar code alike.

Legend: T rows, N outputs, H inputs; in attention Q rows, N query heads, K key/value heads, D head dimension,
S context rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .attention_form import PLAIN_FORM, AttentionForm

# Rows of every product and context columns of every tile of attention.
ROWS = 16
COLUMNS = 256

LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first one has few bits, so a product with a small integer is exact
LN_2_HIGH, LN_2_LOW = 0.693359375, -2.12194440e-4
# exp(x) for |x| <= ln(2)/2, highest power first (Cephes Math Library, expf)
EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    0.5,
    1.0,
    1.0,
)


def exp_rounded(x: torch.Tensor) -> torch.Tensor:
    """exp of float32 `x` to about one unit in the last place; below -87 it gives 0, above 88 it saturates."""
    power = (x.clamp(-88.0, 88.0) * LOG2_E).round_()
    rest = x.clamp(-88.0, 88.0).sub_(power * LN_2_HIGH).sub_(power * LN_2_LOW)
    value = torch.full_like(rest, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        value.mul_(rest).add_(term)
    scale = (power.to(torch.int32) + 127).clamp_(1, 254).bitwise_left_shift_(23).view(torch.float32)
    return value.mul_(scale).masked_fill_(x < -87.0, 0.0)


def sum_halves(x: torch.Tensor) -> torch.Tensor:
    """The sum of `x` `[..., n]` over its last dimension, by adding halves: `[..., 1]`."""
    width = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = F.pad(x, (0, width - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def _by_tiles(x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`product` of each ROWS rows of `x` `[T, H]`, in memory of their own."""
    num_rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -num_rows % ROWS))
    tiles = [padded[start : start + ROWS].clone() for start in range(0, padded.shape[0], ROWS)]
    return torch.cat([product(tile) for tile in tiles])[:num_rows] if num_rows else product(x)


def linear_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b: `x` `[T, H]`, `weight` `[N, H]`, `bias` None or `[N]` -> `[T, N]`."""
    return _by_tiles(x, lambda part: F.linear(part, weight, bias))


def silu_mul_rows(gate_up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """silu(gate) * up, or gelu: `gate_up` `[..., 2*I]` (gate first) -> `[..., I]`; silu is rounded to the
    dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.float32)
    scaled = (wide + wide * wide * wide * 0.044715) * 1.5957691216057308 if is_gelu else wide
    silu = wide / (exp_rounded(-scaled) + 1.0)
    return silu.to(gate_up.dtype) * up


def rms_norm_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float | None = None
) -> torch.Tensor:
    """As `rms_norm.rms_norm_reference`, with a fixed order of the sum."""
    wide = x.to(torch.float32)
    mean = sum_halves(wide * wide) / x.shape[-1]
    normed = wide / (mean + eps).sqrt()
    if offset is None:
        return weight * normed.to(x.dtype)
    return (normed * (offset + weight.to(torch.float32))).to(x.dtype)


def rope_rows(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """As `rope.apply_rope`, in float32 and rounded once."""
    width = cos.shape[-1]
    part = x[..., :width].to(torch.float32)
    turned = part * cos.unsqueeze(1) + part.roll(width // 2, dims=-1) * signed_sin.unsqueeze(1)
    return turned.to(x.dtype) if width == x.shape[-1] else torch.cat((turned.to(x.dtype), x[..., width:]), -1)


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Attention of one request: `q` `[Q, N, D]`, `keys`, `values` `[S, K, D]` -> `[Q, N, D]`.

    Row i sees the first `first` + i context rows, of these the last `form.window` ones if there is a window;
    `first` is at least 1. Computed in float32, rounded once.
    """
    num_rows, num_heads, head_dim = q.shape
    length, kv_heads, _ = keys.shape
    group = num_heads // kv_heads
    # (row, head of the group) pairs, cut into tiles of ROWS
    pairs = q.reshape(num_rows, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    pairs = F.pad(pairs.to(torch.float32), (0, 0, 0, -pairs.shape[1] % ROWS))
    ends = F.pad(first + torch.arange(num_rows).repeat_interleave(group), (0, -num_rows * group % ROWS))
    space = (0, 0, 0, 0, 0, -length % COLUMNS)
    wide_keys = F.pad(keys.to(torch.float32), space).permute(1, 2, 0)
    wide_values = F.pad(values.to(torch.float32), space).transpose(0, 1)
    out = torch.empty_like(pairs)
    sinks = torch.full((*pairs.shape[:2], 1), float("-inf"))
    if form.sinks is not None:
        heads = form.sinks.to(torch.float32).view(kv_heads, 1, group).expand(-1, num_rows, -1)
        sinks[:, : num_rows * group, 0] = heads.reshape(kv_heads, -1)
    for start in range(0, pairs.shape[1], ROWS):
        mine = slice(start, start + ROWS)
        tile, end, sink = pairs[:, mine].contiguous(), ends[mine], sinks[:, mine].contiguous()
        out[:, mine] = _fold_tiles(tile, wide_keys, wide_values, end, scale, form, sink)
    out = out[:, : num_rows * group].view(kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return out.reshape(q.shape).to(q.dtype)


def tanh_rounded(x: torch.Tensor) -> torch.Tensor:
    """tanh of float32 `x`, of single roundings: 1 - 2 / (exp(2x) + 1)."""
    return 1.0 - 2.0 / (exp_rounded(x + x) + 1.0)


def _fold_tiles(
    tile: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    form: AttentionForm,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Rows `tile` `[K, ROWS, D]` over `keys` `[K, D, S]` and `values` `[K, S, D]`, S a multiple of COLUMNS.

    Row r sees the columns before `ends[r]`, and none before its window. The tiles of columns that it does not
    see change no bit of it. `sinks` `[K, ROWS, 1]`: -inf for none.
    """
    top = sinks.clone()
    total, out = (top > float("-inf")).to(torch.float32), torch.zeros_like(tile)
    first = max(0, int(ends.min()) - form.window) // COLUMNS * COLUMNS if form.window else 0
    for start in range(first, int(ends.max()), COLUMNS):
        columns = slice(start, start + COLUMNS)
        places = torch.arange(start, start + COLUMNS)
        hidden = places >= ends[:, None]
        if form.window:
            hidden |= places < ends[:, None] - form.window
        scores = torch.bmm(tile, keys[:, :, columns].contiguous()).mul_(scale)
        if form.softcap:
            scores = tanh_rounded(scores / form.softcap) * form.softcap
        scores.masked_fill_(hidden, float("-inf"))
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        shift = new_top.masked_fill(new_top == float("-inf"), 0.0)
        weights, keep = exp_rounded(scores.sub_(shift)), exp_rounded(top - shift)
        total = total * keep + sum_halves(weights)
        out = (out * keep).add_(torch.bmm(weights, values[:, columns].contiguous()))
        top = new_top
    return out.div_(total.masked_fill_(total == 0.0, 1.0))
