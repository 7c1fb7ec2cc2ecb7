"""Pages for a request: the cached prefix of its prompt, then what a lower tier has, fresh pages behind."""

from collections.abc import Sequence

from ..engine.kv.pool import PoolExhausted
from ..engine.kv.prefix_cache import PrefixCache
from ..engine.kv.tiers.cache_tiers import Restore
from ..engine.kv.tiers.running_tiers import RunningTiers
from ..engine.request import Request


def take_pages(
    cache: PrefixCache, request: Request, num_pages: int, *, is_computed: bool, bare_limit: int = 0
) -> int:
    """Give `request` its `num_pages` pages. Returns the number of prompt tokens in cached pages.

    The last prompt token is never taken from the cache, since its logits are needed. A prompt computed here
    with log probabilities takes nothing from the cache. `bare_limit`: as in `PrefixCache.match`. Raises
    PoolExhausted; the request then holds nothing.
    """
    held = match_prefix(cache, request, is_computed=is_computed, bare_limit=bare_limit)
    try:
        request.pages = held + cache.alloc(num_pages - len(held))
    except PoolExhausted:
        cache.allocator.release(held)
        raise
    return len(held) * cache.page_size


def match_prefix(
    cache: PrefixCache, request: Request, *, is_computed: bool, bare_limit: int = 0
) -> list[int]:
    """Retains and returns the cached pages that `take_pages` would find."""
    is_scored = is_computed and request.sampling.prompt_logprobs >= 0  # every row must be computed
    limit = 0 if is_scored else request.num_prompt - 1
    return cache.match(request.prompt_ids, limit, request.salt, bare_limit=bare_limit)


def num_whole(cache: PrefixCache, pages: Sequence[int]) -> int | None:
    """The number of cached `pages` before the first bare one; None: none is bare."""
    return next((place for place, page in enumerate(pages) if cache.is_bare(page)), None)


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


def begin_restore(
    tiers: RunningTiers | None, request: Request, have: int, *, is_computed: bool
) -> Restore | None:
    """Start to restore the prompt of `request` behind its first `have` tokens, which are in cached pages.

    None: no tier has more. `is_computed`: the prompt is computed here; with log probabilities every row is.
    """
    if tiers is None or (is_computed and request.sampling.prompt_logprobs >= 0):
        return None
    first = have // tiers.tiers.cache.page_size
    return tiers.begin(request.prompt_ids, request.num_prompt - 1, request.salt, request.pages, first)


def take_restored(cache: PrefixCache, request: Request, restore: Restore, have: int) -> int:
    """Offer the pages of an ended restore to the cache. Returns the number of prompt tokens in cached pages.

    They may be more than were restored, and other pages: those that another request has restored or computed.
    """
    tokens = have + restore.num_pages * cache.page_size
    if restore.num_pages:
        cache.insert(request.prompt_ids[: tokens + cache.lookahead], request.pages, request.salt)
    return take_longer_prefix(cache, request, tokens)
