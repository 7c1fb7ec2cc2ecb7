"""The splits of a context in batch-invariant attention, and the memory of their parts. Without torch."""

# Columns of each of the first LEVEL_SPLITS splits. Those of the next LEVEL_SPLITS are twice as long, and so
# on: a context of 128 Ki tokens has 81 splits.
BASE_SPLIT = 256
LEVEL_SPLITS = 16
# Where the parts of parallel splits would take more memory, each program computes all of its splits.
MAX_PARTIAL_BYTES = 512 << 20


def num_splits(length: int, base_split: int = BASE_SPLIT) -> int:
    """The number of splits of `length` columns, the first of which have `base_split`."""
    level_end, size, count = base_split * LEVEL_SPLITS, base_split, 0
    while length > level_end:
        count, size = count + LEVEL_SPLITS, 2 * size
        level_end += LEVEL_SPLITS * size
    return count + -(-(length - (level_end - LEVEL_SPLITS * size)) // size)


def partial_bytes(splits: int, num_heads: int, head_dim: int) -> int:
    """Bytes of the float32 parts of `splits` splits, their maxima and their sums. `num_heads`: query heads of
    all rows.
    """
    return splits * num_heads * (head_dim + 2) * 4
