"""Write new keys and values into the page-major pool.

The pool is `[num_pages, L, 2, page_size, N, D]`, contiguous, seen here as rows of N*D values. Slot = page * page_size +
offset; the K row of slot s in layer 0 is `kv_rows(s)`; a layer further is 2*page_size rows further, V is page_size
rows behind K. Slot 0 is the sink of padding rows and always reads as zeros.
"""

import torch


def kv_rows(slots: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Row numbers (int64, shape of `slots`) of the layer-0 keys at `slots` in `kv.view(-1, N*D)`."""
    num_layers, page_size = kv.shape[1], kv.shape[3]
    pages = torch.div(slots, page_size, rounding_mode="floor")
    return pages * (num_layers * 2 * page_size) + slots % page_size


def store_kv(kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store `k`, `v` `[T, N, D]` of `layer` at `rows` `[T]` (from `kv_rows`), then clear the sink.

    Clearing keeps a padding row's values, NaN included, from ever being read back.
    Raises ValueError when shapes or dtypes do not fit the pool.
    """
    if k.shape != v.shape or k.shape != (rows.shape[0], *kv.shape[4:]) or k.dtype != kv.dtype or v.dtype != kv.dtype:
        raise ValueError(
            f"store_kv: k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype} for {rows.shape[0]} rows do not fit "
            f"a pool of {kv.shape[4]} heads x {kv.shape[5]} {kv.dtype}"
        )
    page_size, width = kv.shape[3], kv.shape[4] * kv.shape[5]
    flat = kv.view(-1, width)
    key_rows = rows + layer * 2 * page_size
    flat.index_copy_(0, key_rows, k.reshape(-1, width))
    flat.index_copy_(0, key_rows + page_size, v.reshape(-1, width))
    kv[0, layer, :, 0].zero_()
