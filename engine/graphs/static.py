"""Static inputs: the tensors at the addresses that graphs have bound, rewritten before each replay."""

import torch

from .errors import GraphError


def load_rows(static: torch.Tensor, values: torch.Tensor, end: int, *, name: str, padding: int = 0) -> None:
    """Copy `values` `[n, ...]` into the first rows of `static`, and `padding` into rows [n, end).

    Raises GraphError, showing both sides, if width or dtype differ or the rows do not fit. The graph would
    otherwise replay stale rows.
    """
    n = values.shape[0]
    if (
        values.shape[1:] != static.shape[1:]
        or values.dtype != static.dtype
        or not n <= end <= static.shape[0]
    ):
        raise GraphError(
            f"{name} {tuple(values.shape)} {values.dtype} for a bucket of {end} rows does not fit the static "
            "buffer "
            f"{tuple(static.shape)} {static.dtype}"
        )
    static[:n].copy_(values, non_blocking=True)
    if n < end:
        static[n:end].fill_(padding)
