"""Collective operations of the ranks of a worker, each of which a graph records as one.

An operation ends when its result may be read: a CPU waits for it, a GPU orders it on its stream, where a
CUDA graph captures it. A tape replays it like any other operation. All ranks must run the same operations
with the same shapes in the same order. `group` is the name by which torch.distributed knows the process
group.
Shape legend: T rows, C columns of a rank, W ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

torch.library.define("baton::sum_ranks", "(Tensor(a!) x, str group) -> ()")
torch.library.define("baton::share_rank_0", "(Tensor(a!) x, str group) -> ()")
torch.library.define("baton::gather_columns", "(Tensor x, int num_ranks, str group) -> Tensor")
torch.library.define("baton::gather_rows", "(Tensor x, int num_ranks, str group) -> Tensor")
torch.library.define("baton::scatter_sums", "(Tensor x, int num_ranks, str group) -> Tensor")


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def _sum_ranks(x: torch.Tensor, group: str) -> None:
    dist.all_reduce(x, group=group_of(group))


def _share_rank_0(x: torch.Tensor, group: str) -> None:
    dist.broadcast(x, group_src=0, group=group_of(group))


def _gather_columns(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    whole = _gather_rows(x, num_ranks, group).view(num_ranks, *x.shape)
    return whole.transpose(0, 1).reshape(x.shape[0], num_ranks * x.shape[1])


def _gather_rows(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    whole = x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))
    # torch.distributed names this call differently from version to version; the group's own is one
    group_of(group)._allgather_base(whole.view(-1), x.contiguous().view(-1)).wait()
    return whole


def _scatter_sums(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    own = x.new_empty((x.shape[0] // num_ranks, *x.shape[1:]))
    options = dist.ReduceScatterOptions()  # sums
    group_of(group)._reduce_scatter_base(own.view(-1), x.contiguous().view(-1), options).wait()
    return own


def _in_place_fake(x: torch.Tensor, group: str) -> None:
    return None


def _gather_fake(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], num_ranks * x.shape[1]))


def _gather_rows_fake(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))


def _scatter_sums_fake(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // num_ranks, *x.shape[1:]))


torch.library.impl("baton::sum_ranks", ("cpu", "cuda"), _sum_ranks)
torch.library.impl("baton::share_rank_0", ("cpu", "cuda"), _share_rank_0)
torch.library.impl("baton::gather_columns", ("cpu", "cuda"), _gather_columns)
torch.library.impl("baton::gather_rows", ("cpu", "cuda"), _gather_rows)
torch.library.impl("baton::scatter_sums", ("cpu", "cuda"), _scatter_sums)
torch.library.register_fake("baton::sum_ranks", _in_place_fake)
torch.library.register_fake("baton::share_rank_0", _in_place_fake)
torch.library.register_fake("baton::gather_columns", _gather_fake)
torch.library.register_fake("baton::gather_rows", _gather_rows_fake)
torch.library.register_fake("baton::scatter_sums", _scatter_sums_fake)


def sum_ranks(x: torch.Tensor, group: str) -> None:
    """Replaces the contiguous `x` by its sum over all ranks, which is equal on all of them."""
    torch.ops.baton.sum_ranks.default(x, group)


def share_rank_0(x: torch.Tensor, group: str) -> None:
    """Replaces the contiguous `x` by rank 0's."""
    torch.ops.baton.share_rank_0.default(x, group)


def gather_columns(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """`[T, C]` of each rank -> `[T, W*C]`, the columns of rank 0 first."""
    out: torch.Tensor = torch.ops.baton.gather_columns.default(x, num_ranks, group)
    return out


def gather_rows(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """`[T, C]` of each rank -> `[W*T, C]`, the rows of rank 0 first."""
    out: torch.Tensor = torch.ops.baton.gather_rows.default(x, num_ranks, group)
    return out


def scatter_sums(x: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """`[W*T, C]` of each rank -> `[T, C]`, the sums over ranks of the rows that are this rank's."""
    out: torch.Tensor = torch.ops.baton.scatter_sums.default(x, num_ranks, group)
    return out
