"""Embedding tables and output projections whose rows, one per token of the vocabulary, are split over ranks.

Each rank holds the same number of rows; behind the last token of the vocabulary they are zeros. A look-up
sums over ranks, of which one has the row. Logits are gathered, so every rank has all of them.
Shape legend: T rows, V vocabulary, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from ...kernels.look_up_rows import Lookup, look_up_rows
from ...kernels.ops import recorded_logits
from .group import TensorGroup


@dataclass(frozen=True, eq=False)
class VocabShard:
    """The rows of one rank, `[ceil(V / ranks), H]`, of a table of `size` = V rows."""

    rows: torch.Tensor
    size: int
    group: TensorGroup

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H), as of the whole table."""
        return self.size, int(self.rows.shape[1])

    def numel(self) -> int:
        """Elements on this rank."""
        return self.rows.numel()

    def to(self, device: torch.device, dtype: torch.dtype) -> "VocabShard":
        """The shard on `device` in `dtype`; rows that are there already are shared."""
        return VocabShard(self.rows.to(device, dtype), self.size, self.group)


Table: TypeAlias = torch.Tensor | VocabShard


def num_rank_rows(vocab_size: int, num_ranks: int) -> int:
    """Rows of a table on each rank."""
    return -(-vocab_size // num_ranks)


def table_of(rows: torch.Tensor, vocab_size: int, group: TensorGroup) -> Table:
    """The table whose rows on this rank are `rows`."""
    return rows if group.is_solo else VocabShard(rows, vocab_size, group)


def rows_of(table: Table) -> torch.Tensor:
    """The rows of `table` in this process."""
    return table if isinstance(table, torch.Tensor) else table.rows


def look_up(ids: torch.Tensor, table: Table) -> torch.Tensor:
    """The rows of `ids` int64 `[T]`: `[T, H]`."""
    if isinstance(table, torch.Tensor):
        (found,) = look_up_rows(Lookup(table, ids))
        return found
    count = table.rows.shape[0]
    local = ids - table.group.rank * count
    is_elsewhere = (local < 0) | (local >= count)
    found = F.embedding(local.masked_fill(is_elsewhere, 0), table.rows)
    return table.group.sum(found.masked_fill(is_elsewhere[:, None], 0))


def look_up_beside(ids: torch.Tensor, table: Table, *others: Lookup) -> tuple[torch.Tensor, ...]:
    """Rows `[T, H]` of `ids` int64 `[T]`, and those of one or two `others`; one launch for a whole table."""
    if isinstance(table, torch.Tensor):
        return look_up_rows(Lookup(table, ids), *others)
    return look_up(ids, table), *look_up_rows(*others)


def table_logits(
    hidden: torch.Tensor,
    table: Table,
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = recorded_logits,
) -> torch.Tensor:
    """`hidden` `[T, H]` times the table: float32 `[T, V]`. `logits` computes the product."""
    if isinstance(table, torch.Tensor):
        return logits(hidden, table)
    found = table.group.gather(logits(hidden, table.rows))
    return found if found.shape[1] == table.size else found[:, : table.size].contiguous()
