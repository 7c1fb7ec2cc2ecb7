"""Numbers of window pages (`window_layout`), without torch: sizes are chosen where it is not loaded, too."""

CHUNK_SHARE = 2  # a chunk of a prefill worker takes at most 1/CHUNK_SHARE of the window pages


def first_read_page(row: int, window: int, page_size: int) -> int:
    """The first page of which a row at position `row`, or a later one, reads the windowed KV."""
    return max(0, row - window + 1) // page_size


def chunk_of(
    chunk: int, *, num_window_pages: int, window: int, page_size: int, share: int, lag: int = 1
) -> int:
    """`chunk` prompt rows of a forward, or fewer, so that a prompt takes 1/share of the window pages at most.

    `lag`: forwards that are launched before the window pages behind the first one are given up.
    """
    rows = num_window_pages // share * page_size - window
    return min(chunk, max(rows // lag, page_size))


def most_pages(num_tokens: int, page_size: int) -> int:
    """The most pages that `num_tokens` neighbouring tokens touch, wherever they begin; 0 for none."""
    return 0 if num_tokens <= 0 else (num_tokens - 2) // page_size + 2 if num_tokens > 1 else 1
