"""Pages for a request: the cached prefix of its prompt first, fresh pages behind it."""

from collections.abc import Sequence

from ..engine.kv.pool import PoolExhausted
from ..engine.kv.prefix_cache import PrefixCache
from ..engine.request import Request


def take_pages(cache: PrefixCache, request: Request, num_pages: int, *, is_computed: bool) -> int:
    """Give `request` its `num_pages` pages. Returns the number of prompt tokens in cached pages.

    The last prompt token is never taken from the cache, since its logits are needed. A prompt computed here
    with log probabilities takes nothing from the cache. Raises PoolExhausted; the request then holds nothing.
    """
    is_scored = is_computed and request.sampling.prompt_logprobs >= 0  # every row must be computed
    held = cache.match(request.prompt_ids, 0 if is_scored else request.num_prompt - 1, request.salt)
    try:
        request.pages = held + cache.alloc(num_pages - len(held))
    except PoolExhausted:
        cache.allocator.release(held)
        raise
    return len(held) * cache.page_size


def take_shared_pages(cache: PrefixCache, request: Request, shared: Sequence[int], num_pages: int) -> None:
    """Give `request` its `num_pages` pages: `shared` ones of another request first, fresh pages behind them.

    Raises PoolExhausted; the request then holds nothing.
    """
    cache.allocator.retain(shared)
    try:
        request.pages = [*shared, *cache.alloc(num_pages - len(shared))]
    except PoolExhausted:
        cache.allocator.release(shared)
        raise


def take_longer_prefix(cache: PrefixCache, request: Request, have: int) -> int:
    """Replace the first pages of `request` by cached ones, where more than `have` tokens are cached by now.

    No later row of `request` may be computed yet. Returns the number of prompt tokens in cached pages.
    """
    if request.sampling.prompt_logprobs >= 0:  # every row must be computed
        return have
    held = cache.match(request.prompt_ids, request.num_prompt - 1, request.salt)
    tokens = len(held) * cache.page_size
    if tokens <= have:
        cache.allocator.release(held)
        return have
    cache.allocator.release(request.pages[: len(held)])
    request.pages[: len(held)] = held
    return tokens
