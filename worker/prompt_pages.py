"""Pages for a request: the cached prefix of its prompt, then what a lower tier has, fresh pages behind."""

from collections.abc import Sequence

from ..engine.kv.pool import PoolExhausted
from ..engine.kv.prefix_cache import PrefixCache
from ..engine.kv.tiers.cache_tiers import Restore
from ..engine.kv.tiers.restore_costs import ComputeTime
from ..engine.kv.tiers.running_tiers import RunningTiers
from ..engine.request import Request
from ..engine.request_windows import RequestWindows


def take_pages(
    cache: PrefixCache,
    windows: RequestWindows,
    request: Request,
    num_pages: int,
    *,
    is_computed: bool,
    num_windowed: int | None = None,
    bare_limit: int = 0,
) -> int:
    """Give `request` its `num_pages` pages. Returns the number of prompt tokens in cached pages.

    A prompt that is computed here takes `Request.num_cacheable` tokens from the cache at most, others all but
    the last one. Of the first `num_windowed` pages (None: of all), it gets the window pages of its tail.
    `bare_limit`: as in `PrefixCache.match`. Raises PoolExhausted; the request then holds nothing.
    """
    take_prefix(cache, windows, request, is_computed=is_computed, bare_limit=bare_limit)
    held = request.pages
    try:
        request.pages = held + cache.alloc(num_pages - len(held))
        windows.take_tail(request, len(held), num_pages if num_windowed is None else num_windowed)
    except PoolExhausted:
        give_back_pages(cache, windows, request, is_used=False)
        raise
    return len(held) * cache.page_size


def _match(
    cache: PrefixCache, windows: RequestWindows, request: Request, *, is_computed: bool, bare_limit: int
) -> tuple[list[int], int]:
    """Holds the cached pages that the request may take, and the window pages of those from the second result
    on.
    """
    held_from = windows.held_of_hit(request.num_prompt, is_computed=is_computed)
    limit = request.num_cacheable if is_computed else request.num_prompt - 1
    held = cache.match(request.prompt_ids, limit, request.salt, held_from, bare_limit=bare_limit)
    return held, held_from(len(held))


def take_prefix(
    cache: PrefixCache,
    windows: RequestWindows,
    request: Request,
    *,
    is_computed: bool,
    bare_limit: int = 0,
) -> None:
    """Give `request` the cached pages that `take_pages` would find now, with their window pages."""
    held, first = _match(cache, windows, request, is_computed=is_computed, bare_limit=bare_limit)
    request.pages, request.windows = held, list(range(first, len(held)))


def hold_prefix(
    cache: PrefixCache,
    windows: RequestWindows,
    request: Request,
    *,
    is_computed: bool,
    bare_limit: int = 0,
) -> list[int]:
    """Retains and returns the cached pages that `take_pages` would find now, without their window pages."""
    pages, first = _match(cache, windows, request, is_computed=is_computed, bare_limit=bare_limit)
    windows.drop_hit(pages[first:])
    return pages


def peek_pages(
    cache: PrefixCache, windows: RequestWindows, request: Request, *, bare_limit: int = 0
) -> list[int]:
    """The cached pages that `request`, whose prompt is computed here, would take now. Nothing is held."""
    pages = hold_prefix(cache, windows, request, is_computed=True, bare_limit=bare_limit)
    cache.allocator.release(pages, is_used=False)
    return pages


def num_whole(cache: PrefixCache, pages: Sequence[int]) -> int | None:
    """The number of cached `pages` before the first bare one; None: none is bare."""
    return next((place for place, page in enumerate(pages) if cache.is_bare(page)), None)


def take_shared_pages(
    cache: PrefixCache,
    windows: RequestWindows,
    request: Request,
    shared: Sequence[int],
    num_pages: int,
    *,
    num_windowed: int | None = None,
) -> None:
    """Give `request` its `num_pages` pages: `shared` ones of another request first, fresh pages behind them.

    `num_windowed` as in `take_pages`; the shared pages of the tail have window pages. Raises PoolExhausted;
    the request then holds nothing.
    """
    cache.allocator.retain(shared)
    request.pages = list(shared)
    try:
        windows.hold_tail(request, len(shared))
        request.pages = [*shared, *cache.alloc(num_pages - len(shared))]
        windows.take_tail(request, len(shared), num_pages if num_windowed is None else num_windowed)
    except PoolExhausted:
        give_back_pages(cache, windows, request, is_used=False)
        raise


def give_back_pages(
    cache: PrefixCache, windows: RequestWindows, request: Request, *, is_used: bool = True
) -> None:
    """The request holds no page any more. `is_used`: as in `PageAllocator.release`."""
    windows.release(request)
    cache.allocator.release(request.pages, is_used=is_used)
    request.pages = []


def take_longer_prefix(cache: PrefixCache, windows: RequestWindows, request: Request, have: int) -> int:
    """Replace the first pages of `request` by cached ones, where more than `have` tokens are cached by now.

    No later row of `request` may be computed yet. Returns the number of prompt tokens in cached pages.
    """
    before = request.pages[: have // cache.page_size]
    if not cache.goes_on(request.prompt_ids, before, request.num_cacheable, request.salt):
        return have
    held_from = windows.held_of_hit(request.num_prompt, is_computed=True)
    held = cache.match(request.prompt_ids, request.num_cacheable, request.salt, held_from)
    tokens, first = len(held) * cache.page_size, held_from(len(held))
    if tokens <= have:
        windows.drop_hit(held[first:])
        cache.allocator.release(held, is_used=False)
        return have
    windows.replace(request, len(held), first)
    cache.allocator.release(request.pages[: len(held)])
    request.pages[: len(held)] = held
    return tokens


def begin_restore(
    tiers: RunningTiers | None,
    request: Request,
    have: int,
    *,
    is_computed: bool,
    compute_time: ComputeTime | None = None,
) -> Restore | None:
    """Start to restore the prompt of `request` behind its first `have` tokens, which are in cached pages.

    None: no tier has more, or it is computed sooner. `is_computed`: the prompt is computed here, and takes
    the beginning that it may. `compute_time`: of its tokens, where it is known.
    """
    limit = request.num_cacheable if is_computed else request.num_prompt - 1
    if tiers is None or limit <= have:
        return None
    first = have // tiers.tiers.cache.page_size
    return tiers.begin(request.prompt_ids, limit, request.salt, request.pages, first, compute_time)


def take_restored(
    cache: PrefixCache, windows: RequestWindows, request: Request, restore: Restore, have: int
) -> int:
    """Offer the pages of an ended restore to the cache. Returns the number of prompt tokens in cached pages.

    They may be more than were restored, and other pages: those that another request has restored or computed.
    """
    tokens = have + restore.num_pages * cache.page_size
    if restore.num_pages:
        cache.insert(request.prompt_ids[: tokens + cache.lookahead], request.pages, request.salt)
    return take_longer_prefix(cache, windows, request, tokens)
