"""The batch sizes and token counts that get graphs.

A size gets a graph only if padding would cost more than its memory.
"""

from collections.abc import Sequence


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Token counts up to `max_tokens`, ascending.

    They are powers of two, and from 16 on also the middles between them, so at most a third of a large bucket
    is padding.
    """
    assert max_tokens >= 1, max_tokens
    sizes, size = {max_tokens}, 1
    while size < max_tokens:
        sizes |= {size, size * 3 // 2} if size >= 16 else {size}
        size *= 2
    return tuple(sorted(size for size in sizes if size <= max_tokens))


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes up to `max_batch`, ascending.

    They are powers of two up to 8, then steps of 8, of 16 from 32 on, and of 32 from 128 on. A decode step
    reads all weights for every batch size, so padding costs little.
    """
    assert max_batch >= 1, max_batch
    sizes, size = {max_batch}, 1
    while size < max_batch:
        sizes.add(size)
        size = size * 2 if size < 8 else size + (8 if size < 32 else 16 if size < 128 else 32)
    return tuple(sorted(sizes))


def sparse(buckets: Sequence[int]) -> tuple[int, ...]:
    """The powers of two of `buckets` and the largest, ascending: enough for graphs that few batches need."""
    return tuple(size for size in buckets if size & (size - 1) == 0 or size == buckets[-1])


def with_middles(buckets: Sequence[int]) -> tuple[int, ...]:
    """`sparse(buckets)`, and from 16 on the middles between powers of two, ascending.

    At most a third of a large batch is padding.
    """
    middles = (size for size in buckets if size >= 24 and size % 3 == 0 and not (size // 3) & (size // 3 - 1))
    return tuple(sorted({*sparse(buckets), *middles}))


def bucket_for(buckets: Sequence[int], size: int) -> int:
    """The smallest of `buckets` (ascending) that holds `size`; 0 if none does."""
    return next((bucket for bucket in buckets if bucket >= size), 0)
