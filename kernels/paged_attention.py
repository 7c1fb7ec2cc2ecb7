"""Torch attention of new rows over their paged context: the reference of the kernels and the CPU path.

Legend: B requests, Q new rows of a request, S context rows, N query heads, K key/value heads, G = N/K queries
per key/value head, D head dimension. Pool and row numbers are those of `kv_store`.
"""

import torch
import torch.nn.functional as F

from .attention_form import PLAIN_FORM, AttentionForm, attend_by_form, capped
from .fp8_scales import raw

# Query rows per block of an extend: limits the mask and skips blocks above the causal diagonal.
QUERY_BLOCK = 512


def gather_kv(
    kv: torch.Tensor, layer: int, rows: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `layer` in `dtype`, each `[M, K, D]`, at `rows` int64 `[2*M]`: key rows, then value
    rows, of layer 0.
    """
    page_size, width = kv.shape[3], kv.shape[4] * kv.shape[5]
    picked = raw(kv.view(-1, width)).index_select(0, rows + layer * 2 * page_size)
    both = picked.view(kv.dtype).to(dtype).view(2, -1, kv.shape[4], kv.shape[5])
    return both[0], both[1]


def paged_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    pages: torch.Tensor,
    kv_len: int,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """The definition for one request, in float64: `q` `[Q, N, D]` are the last Q of `kv_len` rows in `pages`
    `[P]`.
    """
    num_rows, num_heads = q.shape[0], q.shape[1]
    group = num_heads // kv.shape[4]
    k, v = (
        plane.reshape(-1, kv.shape[4], kv.shape[5])[:kv_len].repeat_interleave(group, dim=1).to(torch.float64)
        for plane in kv[pages, layer].unbind(1)
    )
    scores = capped(torch.einsum("qnd,snd->nqs", q.to(torch.float64), k) * scale, form.softcap)
    columns, positions = torch.arange(kv_len)[None, :], torch.arange(kv_len - num_rows, kv_len)[:, None]
    visible = columns <= positions
    if form.window:
        visible &= columns > positions - form.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if form.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = form.sinks.to(torch.float64)[:, None, None].expand(-1, num_rows, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("nqs,snd->qnd", weights, v).to(q.dtype)


def batched_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Attention of equally many rows per request: `q` `[B, Q, N, D]`, `k`, `v` `[B, S, K, D]` ->
    `[B, Q, N, D]`.

    `mask` `[B, 1, Q, S]` is added to the scores; it hides what is outside of the window of `form`. The head
    group is folded into the query length, group-major, so keys and values are read once and never expanded.
    """
    batch, num_rows, num_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = num_heads // kv_heads
    if not form.is_plain:
        heads = q.view(batch, num_rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        keys, values = (x.transpose(1, 2)[:, :, None] for x in (k, v))
        found = attend_by_form(heads, keys, values, mask[:, None].to(torch.float32), scale, form)
        return found.permute(0, 3, 1, 2, 4).reshape(q.shape)
    folded = q.view(batch, num_rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, group * num_rows, head_dim)
    if num_rows > 1:  # a single row broadcasts
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(
        folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    out = out.view(batch, kv_heads, group, num_rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_rows, num_heads, head_dim)


def causal_band(
    context: int, block: int, dtype: torch.dtype, device: torch.device, window: int = 0
) -> torch.Tensor:
    """A causal mask `[block, context + block]`: -inf where column > row + context, else 0.

    With a `window`, also -inf where column <= row + context - window.

    The mask of n queries whose first stands at context position o is `band[:n, context - o : context + n]`:
    one buffer serves every block of every request.
    """
    columns = torch.arange(context + block, device=device)
    rows = torch.arange(block, device=device)[:, None]
    band = torch.zeros(block, context + block, dtype=dtype, device=device)
    if window:
        band.masked_fill_(columns <= rows + context - window, float("-inf"))
    return band.masked_fill_(columns > rows + context, float("-inf"))


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: torch.Tensor,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """Causal attention of one request's rows: `q` `[Q, N, D]`, the last Q of `k`, `v` `[S, K, D]` ->
    `[Q, N, D]`.

    `band`: from `causal_band` with context >= S - 1, block >= min(Q, QUERY_BLOCK), and the window of `form`.
    """
    num_rows, num_heads, head_dim = q.shape
    length, kv_heads, _ = k.shape
    group = num_heads // kv_heads
    context = band.shape[1] - band.shape[0]
    queries = q.view(num_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (t.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for t in (k, v))
    out = torch.empty_like(q)
    for start in range(0, num_rows, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_rows)
        first, end = length - num_rows + start, length - num_rows + stop
        low = max(0, first + 1 - form.window) if form.window else 0  # the first column that any row sees
        mask = band[: stop - start, context - first + low : context - first + end]
        parts = queries[:, :, start:stop], keys[:, :, low:end], values[:, :, low:end]
        if form.is_plain:
            block = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale)
        else:
            block = attend_by_form(*parts, mask.to(torch.float32), scale, form)
        out[start:stop] = block.permute(2, 0, 1, 3).reshape(stop - start, num_heads, head_dim)
    return out
