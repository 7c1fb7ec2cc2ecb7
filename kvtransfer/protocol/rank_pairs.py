"""Which rank of decode pulls from which rank of prefill, and the bytes that such a pair shares in a page.

Workers are tensor-parallel: KV heads are dealt to ranks in order, and with fewer heads than ranks each rank
holds a copy of one head. A pair of ranks exists where their heads overlap. Of several copies of a head,
decode's rank pulls one, and decode's ranks take different copies as far as there are several.

Features are the same on all ranks, and every rank of decode needs all of them, because each runs the whole
drafter. They travel once, between both ranks 0. With 3 layers of 8192 elements in bfloat16 they are 48 KiB
per token, beside 320 KiB of KV over 80 layers: pulled by each of four ranks they would make 512 KiB of 368. A
draft prefill gives its rows to the other ranks over their faster link; only rank 0 keeps features.
"""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Shard:
    """Rank `rank` of the `num_ranks` ranks of a worker. Raises ValueError for a rank that does not exist."""

    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} of {self.num_ranks} ranks")


WHOLE = Shard()


def heads_of(num_heads: int, shard: Shard) -> range:
    """The KV heads on a rank, of `num_heads`.

    Raises ValueError if neither the number of heads nor that of ranks divides the other.
    """
    most, least = max(num_heads, shard.num_ranks), min(num_heads, shard.num_ranks)
    if most % least:
        raise ValueError(
            f"{num_heads} KV heads cannot be dealt to {shard.num_ranks} ranks; one number must divide the "
            "other"
        )
    first = shard.rank * num_heads // shard.num_ranks
    return range(first, first + max(num_heads // shard.num_ranks, 1))


def sources_of(num_heads: int, receiver: Shard, num_senders: int) -> tuple[int, ...]:
    """The ranks of prefill from which rank `receiver` of decode pulls, in the order of their heads.

    Raises ValueError as `heads_of`.
    """
    heads_of(num_heads, Shard(0, num_senders))
    num_copies = max(1, num_senders // num_heads)
    copy = receiver.rank % num_copies
    firsts = {head * num_senders // num_heads for head in heads_of(num_heads, receiver)}
    return tuple(first + copy for first in sorted(firsts))


def receivers_of(num_heads: int, sender: Shard, num_receivers: int) -> tuple[int, ...]:
    """The ranks of decode that pull from rank `sender` of prefill. Raises ValueError as `heads_of`."""
    ranks = [Shard(rank, num_receivers) for rank in range(num_receivers)]
    return tuple(one.rank for one in ranks if sender.rank in sources_of(num_heads, one, sender.num_ranks))


def carries_features(sender: Shard, receiver: Shard) -> bool:
    """Whether this pair carries the features of a room. Decode's rank 0 always pulls from prefill's."""
    return sender.rank == receiver.rank == 0


def shared_heads(num_heads: int, one: Shard, other: Shard) -> range:
    """The KV heads that both ranks hold; empty if there are none. Raises ValueError as `heads_of`."""
    ours, theirs = heads_of(num_heads, one), heads_of(num_heads, other)
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
