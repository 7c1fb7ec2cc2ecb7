"""How many pages come back is foretold exactly, whoever shares them."""

import random

import pytest
from baton.engine.kv.leaving_owners import LeavingOwners
from baton.engine.kv.pool import PageAllocator
from baton.engine.kv.prefix_cache import PrefixCache

PAGE = 2


@pytest.mark.parametrize("seed", range(30))
def test_as_many_pages_come_back_as_was_foretold(seed):
    rng = random.Random(seed)
    cache = PrefixCache(PageAllocator(200), PAGE)
    held = []
    for _ in range(12):
        tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]
        pages = cache.match(tokens, len(tokens) - 1) if rng.random() < 0.7 else []
        pages += cache.alloc(-(-len(tokens) // PAGE) - len(pages))
        if rng.random() < 0.7:
            cache.insert(tokens, pages)
        held.append(pages)
    for _ in range(3):  # a second owner of a part, as a transport is one
        part = rng.choice(held)[rng.randint(0, 3) :]
        cache.allocator.retain(part)
        held.append(part)
    rng.shuffle(held)
    before, leaving = cache.num_available, LeavingOwners(cache)
    foretold = []
    for pages in held:
        leaving.leave(pages)
        foretold.append(leaving.num_back)
    assert cache.num_available == before, "nothing has left"
    for pages, num_back in zip(held, foretold, strict=True):
        cache.allocator.release(pages)
        assert cache.num_available - before == num_back
    assert cache.num_available == 199
