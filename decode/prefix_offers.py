"""Prefixes that decode offers to prefill workers: the KV of prompts and answers in its prefix cache.

    order     an OfferPrefix of the router names a transfer, and a room here or a prompt
    offer     the pages get another owner, and the transport may read them. They are final: nobody writes
              cached pages
    end       Released, Dropped or the end of the lease gives the pages back

The room of the order holds the pages of its prefix from its admission on, so what prefill learns of them
stays true for this attempt. Without a room, the pages are those of another worker's prompt, and only a part
of the pool is held for such ones. What is not here is declined at once: prefill computes it.

Engines with window pages offer nothing: most of the KV behind windows has been given up, or will be.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ..cluster.protocol.messages import OfferPrefix
from ..cluster.protocol.prompt_embeds import cache_salt
from ..engine.engine import Engine
from ..kvtransfer.transport import Offer
from ..worker.commands import Advance, Command, Drop
from .queues import DecodeQueues, DecodeRoom, DecodeState

EPOCH = 0  # of every transfer: a second try is another transfer
FOREIGN_SHARE = 4  # at most this part of the pool is held for prompts of other workers
MAX_KNOWN = 4096  # transfers that are remembered, so that a repeated order changes nothing
OFFER_COUNTERS = ("prefix_offers", "offered_tokens", "offers_declined", "offers_dropped")


class PrefixOffers:
    """The open offers of one decode engine. `send` takes commands for the transport.

    `is_on`: prefill workers can reach this one.
    """

    def __init__(
        self,
        engine: Engine,
        queues: DecodeQueues,
        send: Callable[[Command], None],
        counters: dict[str, float],
        *,
        is_on: bool,
    ) -> None:
        self.is_on = is_on
        self._engine = engine
        self._queues = queues
        self._send = send
        self._counters = counters
        counters.update(dict.fromkeys(OFFER_COUNTERS, 0))
        self._open: dict[str, list[int]] = {}  # pages by transfer
        self._known: OrderedDict[str, None] = OrderedDict()
        self._num_foreign = 0  # open pages of other workers' prompts
        self._foreign: set[str] = set()

    def __repr__(self) -> str:
        return f"<PrefixOffers {len(self._open)} open>"

    @property
    def held_pages(self) -> list[int]:
        """The pages of all open offers, with repetitions."""
        return [page for pages in self._open.values() for page in pages]

    def take(self, order: OfferPrefix, *, is_draining: bool = False) -> None:
        """Takes an order: offers at once, when the room has its prefix, or not at all. Ignores repeated
        ones.
        """
        if order.transfer in self._known or self._queues.is_known(order.transfer, EPOCH):
            return  # a repetition, or the name of a room, whose hand-off a decline would end
        self._known[order.transfer] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if not self.is_on or is_draining or order.tokens % self._engine.page_size:
            self._decline(order, "no prefix is offered here")
        elif self._engine.windows.is_on:
            self._decline(order, "the KV behind windows has been given up here")
        elif order.room is None:
            self._offer_foreign(order)
        else:
            room = self._queues.get(order.room, order.epoch)
            if room is None:
                self._decline(order, "the room is not here")
            elif room.state in (DecodeState.ADMITTING, DecodeState.RESTORING):
                room.offer = order
            else:
                self.offer_of(room, order)

    def offer_of(self, room: DecodeRoom, order: OfferPrefix) -> None:
        """Offers what `room` found of its prompt in the cache, if that is enough."""
        if room.is_over or room.have < order.tokens:
            self._decline(order, f"{room.have} tokens are cached here")
            return
        pages = room.request.pages[: order.tokens // self._engine.page_size]
        self._engine.cache.allocator.retain(pages)
        self._begin(order, pages)

    def ended(self, transfer: str, *, is_dropped: bool = False) -> bool:
        """The transport does not use the pages of `transfer` any more. False: this is none that was offered
        here.
        """
        pages = self._open.pop(transfer, None)
        if pages is None:
            return False
        if transfer in self._foreign:
            self._foreign.remove(transfer)
            self._num_foreign -= len(pages)
        self._engine.cache.allocator.release(pages, is_used=False)
        self._counters["offers_dropped"] += is_dropped
        return True

    def _offer_foreign(self, order: OfferPrefix) -> None:
        cache = self._engine.cache
        salt = cache_salt(order.salt, order.embeds)
        pages = cache.match(order.prompt_ids, order.tokens, salt)
        if len(pages) * cache.page_size < order.tokens:
            cache.allocator.release(pages, is_used=False)
            self._decline(order, f"{len(pages) * cache.page_size} tokens are cached here")
        elif self._num_foreign + len(pages) > cache.allocator.num_total // FOREIGN_SHARE:
            cache.allocator.release(pages, is_used=False)
            self._decline(order, "too many prefixes are being read")
        else:
            self._foreign.add(order.transfer)
            self._num_foreign += len(pages)
            self._begin(order, pages)

    def _begin(self, order: OfferPrefix, pages: Sequence[int]) -> None:
        """Offers `pages`, of which this object has become an owner."""
        self._open[order.transfer] = list(pages)
        self._engine.pool.order.stamp(pages)  # copies come behind all steps that wrote them
        self._counters["prefix_offers"] += 1
        self._counters["offered_tokens"] += order.tokens
        self._send(Offer(room=order.transfer, epoch=EPOCH, num_tokens=order.tokens, pages=tuple(pages)))
        self._send(Advance(room=order.transfer, epoch=EPOCH, tokens_ready=order.tokens, first_token=0))

    def _decline(self, order: OfferPrefix, reason: str) -> None:
        """Ends the transfer: prefill, which may be attached already, hears of it at once."""
        self._counters["offers_declined"] += 1
        self._send(Drop(room=order.transfer, epoch=EPOCH, reason=reason))
