"""A pair whose prefill worker pulls prefixes from its decode workers; the test is the router that says so."""

from baton.cluster.protocol.messages import PrefixPull
from baton.kvtransfer.transports.fake import FakeReceiver, FakeSender
from baton.kvtransfer.transports.two_way import TwoWayTransport
from baton.tests.sim.worker_pair import D, P, Pair, layout, name
from baton.worker.hand_off import prefix_layout
from baton.worker.identity import planes_of


class FakeTwoWay(TwoWayTransport):
    """Two fakes, which move when the test says so."""

    def turn(self):
        return [*self._other.turn(), *self._main.turn()]

    @property
    def session(self):
        return self._main.session

    @property
    def prefix_session(self):
        return self._other.session


class PullPair(Pair):
    """`Pair` with ends for prefixes on all workers."""

    def __init__(self, *models, **settings):
        self.num_transfers = 0
        super().__init__(*models, **settings)
        engine = self.prefill.engine
        main = self.links[P].transport
        receiver = FakeReceiver(
            self.network,
            P,
            prefix_layout(layout(engine)),
            planes_of(engine.pool, None),
            clock=self.clock,
        )
        self.links[P].transport = FakeTwoWay(sender=main, receiver=receiver, main=main)
        self.prefill.pulls._clock = lambda: self.clock.now

    def add_decode(self, instance, **settings):
        worker = super().add_decode(instance, **settings)
        engine, main = worker.engine, self.links[instance].transport
        sender = FakeSender(
            self.network,
            f"fake://{instance[:4]}",
            instance,
            prefix_layout(layout(engine)),
            planes_of(engine.pool, None),
            clock=self.clock,
        )
        self.links[instance].transport = FakeTwoWay(sender=sender, receiver=main, main=main)
        worker.offers.is_on = True
        return worker

    def held(self, prompt, instance=D):
        """Tokens of the prompt that a decode worker has cached, as a router would know."""
        cache = self.decodes[instance].engine.cache
        pages = cache.match(prompt, len(prompt) - 1)
        cache.allocator.release(pages)
        return len(pages) * cache.page_size

    def pull(self, prompt, *, source=D, to=D, tokens=None, patience_ms=2000):
        """The order to pull what `source` holds of the prompt, for decode worker `to`; None: nothing."""
        tokens = self.held(prompt, source) if tokens is None else tokens
        self.num_transfers += 1
        if not tokens:
            return None
        return PrefixPull(
            transfer=f"{self.num_transfers:030x}ff",
            instance=source,
            endpoint=f"fake://{source[:4]}",
            tokens=tokens,
            patience_ms=patience_ms,
            is_reader=source == to,
        )

    def end_leases(self):
        """A long time passes."""
        self.clock.now += 60
        for _ in range(4):
            self.turn()

    def counter(self, key, instance=P):
        worker = self.prefill if instance == P else self.decodes[instance]
        return worker.stats().counters[key]

    def assert_nothing_is_held(self):
        assert not self.prefill.pulls._running
        assert not any(decode.offers._open for decode in self.decodes.values())
        super().assert_nothing_is_held()


__all__ = ["D", "P", "PullPair", "name"]
