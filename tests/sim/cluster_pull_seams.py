"""Switches for each defence of pulled prefixes in a simulated cluster; `cluster_seams` has the rules."""

from dataclasses import replace
from unittest.mock import patch

from baton.decode.prefix_offers import PrefixOffers
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.kv.prefix_journal import PrefixJournal
from baton.kvtransfer.transports import prepared_blocks, receiver_endpoint
from baton.prefill.prefix_pulls import PrefixPulls
from baton.prefill.queues import PrefillRoom
from baton.router.workers.prefix_view import PrefixView
from baton.tests.sim.cluster_faults import Faults
from baton.tests.sim.cluster_tier_seams import all_of
from baton.tests.sim.cluster_world import Options, Settings

PULLED = Settings(pulls="always", turns=3, chunk_size=8)
FEATURED = replace(PULLED, has_features=True)


def options(settings=PULLED, num_clients=10, **faults):
    return Options(faults=Faults(**faults), settings=settings, num_clients=num_clients)


def no_digest():
    """Blocks of prefixes are taken as they come."""
    return all_of(
        *(
            patch.object(module, "block_digest", lambda *_: 0)
            for module in (receiver_endpoint, prepared_blocks)
        )
    ), options(flip=0.4)


def no_patience():
    """A prompt waits for its pull for as long as it takes."""
    return patch.object(PrefixPulls, "turn", lambda *_: None), options(hang=6, num_clients=16)


def no_owner_of_pulled_pages():
    """Pages that blocks land in have no owner but their room, which may go away."""
    begin, end = PrefixPulls.begin, PrefixPulls._end

    def begin_unowned(self, room):
        is_begun = begin(self, room)
        if is_begun:
            self._engine.cache.allocator.release(room.running_pull.pages)
        return is_begun

    def end_unowned(self, pull, **how):
        refs = self._engine.cache.allocator.refs
        self._engine.cache.allocator.retain(page for page in pull.pages if refs(page))
        pull.pages = [page for page in pull.pages if refs(page)]
        end(self, pull, **how)

    return all_of(
        patch.object(PrefixPulls, "begin", begin_unowned), patch.object(PrefixPulls, "_end", end_unowned)
    ), options(leave=0.9, num_clients=30, burst=True)


def no_owner_of_offered_pages():
    """Offered pages may be evicted and written while prefill reads them."""
    begin = PrefixOffers._begin

    def begin_unowned(self, order, pages):
        begin(self, order, pages)
        self._engine.cache.allocator.release(pages)
        self._open[order.transfer] = []

    settings = replace(PULLED, decode_pages=32, max_running=8, decode_policy="round-robin", step_s=0.004)
    return patch.object(PrefixOffers, "_begin", begin_unowned), options(settings, delay=0.4, num_clients=40)


def kept_pages_of_offers():
    """What was offered is held for ever."""
    return patch.object(PrefixOffers, "ended", lambda *_, **__: False), options()


def kept_pages_of_pulls():
    """The pages of a pull are held for ever."""

    def forget(self, pull, **how):
        del self._running[pull.order.transfer]
        if pull.room is not None:
            pull.room.running_pull = pull.room.pull = None

    return patch.object(PrefixPulls, "_end", forget), options()


def unlanded_pages():
    """A pull that ends early counts as whole."""
    end = PrefixPulls._end

    def end_whole(self, pull, **how):
        pull.landed = pull.order.tokens
        end(self, pull, **how)

    return patch.object(PrefixPulls, "_end", end_whole), options(kv_loss=0.5, kill=2, hang=2)


def whole_bare_pages():
    """Pulled pages count as whole: they are handed over with features that nobody made."""
    return patch.object(PrefixPulls, "_keep", _keep_as_whole), options(FEATURED, kill=2, num_clients=16)


def _keep_as_whole(self, room, first, landed):
    request, engine = room.request, self._engine
    request.num_computed = room.cached_tokens = landed
    room.pulled_tokens += landed - first
    engine.cache.insert(request.prompt_ids[:landed], request.pages, request.salt)


def bare_for_all():
    """Bare pages are given to every room, and handed over to every reader."""
    match = PrefixCache.match

    def match_any(self, token_ids, limit, salt="", *, bare_limit=0):
        return match(self, token_ids, limit, salt, bare_limit=limit)

    return all_of(
        patch.object(PrefixCache, "match", match_any),
        patch.object(PrefillRoom, "bare_tokens", 0),
    ), options(replace(FEATURED, decode_policy="round-robin"), kill=1, num_clients=16)


def no_word_of_decode():
    """Bare pages of earlier turns are used without the word of decode that it holds them."""
    settings = replace(FEATURED, decode_pages=18, prefill_pages=80, max_running=4)
    return patch.object(PrefixPulls, "_start_over", lambda *_: None), options(settings, num_clients=24)


def no_question():
    """A router that has missed what a worker told does not ask."""
    return patch.object(PrefixView, "must_ask", lambda *_: False), options(
        control_loss=0.15, control_reorder=0.3, num_clients=16
    )


def forgotten_departures():
    """Workers do not tell of pages that are gone."""
    return patch.object(PrefixJournal, "_count", _count_up), options(
        replace(PULLED, decode_pages=24, prefill_pages=24), num_clients=16
    )


def _count_up(self, name, change, count=PrefixJournal._count):
    count(self, name, change)
    if change < 0:
        self._changed.pop(name, None)


PULL_SEAMS = {
    "digest of a pulled page": no_digest,
    "patience with a pull": no_patience,
    "owner of pulled pages": no_owner_of_pulled_pages,
    "owner of offered pages": no_owner_of_offered_pages,
    "end of an offer": kept_pages_of_offers,
    "end of a pull": kept_pages_of_pulls,
    "landed part of a pull": unlanded_pages,
    "pulled pages are bare": whole_bare_pages,
    "bare pages for those who take them": bare_for_all,
    "word of decode for bare pages": no_word_of_decode,
    "question after a missed message": no_question,
    "pages that are gone are told": forgotten_departures,
}
