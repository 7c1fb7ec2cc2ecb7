"""Prefixes that prefill pulls from decode in a simulated cluster: conversations, faults of pulls, invariants.

`add_pulls` gives a part of the seeds conversations of some turns, ends for prefixes on their workers, and
deaths at the transitions of pulls. Its draws are its own, so a seed without pulls is what it would be without
this file. Half of them have features, which decode compares with those of the tokens (`ToyDecoder`).
"""

from dataclasses import replace
from random import Random

from baton.cluster.config.router_groups import ALWAYS, MEASURED
from baton.engine.kv.prefix_journal import PrefixJournal
from baton.kvtransfer.transports.two_way import TwoWayTransport
from baton.tests.sim.cluster_clients import Violation
from baton.tests.sim.cluster_toy import MAX_CONTEXT, PAGE_SIZE, STEPS, VOCAB
from baton.worker.prefix_news import PrefixNews
from baton.worker.tier_startup import page_keys_of

SHARE = 0.15  # of the seeds have conversations
OFF = "off"
# Where a process may die in a pull, beside the transitions of a hand-off, which have the same messages.
VERBS = {
    "R": {"recv": ("HeldPrefixes",), "send": ("OfferPrefix", "TellPrefixes")},
    "P": {
        "recv": ("TellPrefixes", "KVWelcome", "Announce", "Block"),
        "send": ("HeldPrefixes", "KVHello", "Attach", "Pull", "Release"),
        "event": ("Landed", "Complete", "Lost"),
    },
    "D": {
        "recv": ("OfferPrefix", "TellPrefixes", "KVHello", "Attach", "Pull", "Release"),
        "send": ("HeldPrefixes", "KVWelcome", "Announce", "Block"),
        "event": ("OfferPrefix", "Released", "Dropped"),
    },
}
PULL_TRANSITIONS = tuple(
    f"{role} {way} {verb}" for role, ways in VERBS.items() for way in ways for verb in ways[way]
)


def add_pulls(seed, faults, settings):
    """(faults, settings) of a seed: of most as they are, of the others with conversations and pulls."""
    rng = Random(f"{seed} pulls")
    if not settings.is_caching or settings.aggregated == "alone" or rng.random() >= SHARE:
        return faults, settings
    settings = replace(
        settings,
        pulls=rng.choice((ALWAYS, ALWAYS, ALWAYS, MEASURED)),
        turns=rng.choice((2, 3)),
        has_features=rng.random() < 0.5,
        step_s=min(settings.step_s, 0.03),
        prefill_pages=rng.choice((settings.prefill_pages, 28)),
    )
    if rng.random() < 0.35:
        faults = replace(faults, kill_at=rng.choice(PULL_TRANSITIONS), kill_nth=rng.choice((1, 1, 2, 4)))
    if rng.random() < 0.2:
        faults = replace(faults, flip=0.3 * rng.random(), kv_loss=0.2 * rng.random())
    if rng.random() < 0.2:
        faults = replace(faults, hang=rng.randint(1, 2))
    return faults, settings


def next_prompt(client, settings, rng):
    """The prompt of the next turn; None: the conversation is too long."""
    prompt = (*client.prompt, *client.tokens, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))))
    pools = PAGE_SIZE * min(settings.prefill_pages, settings.decode_pages) - STEPS.spare_slots
    return prompt if len(prompt) + client.sampling.max_new_tokens <= min(MAX_CONTEXT, pools) else None


class Arrivals:
    """What the network brings, for either end: messages of clients go to the sender."""

    def __init__(self, sender, receiver):
        self._sender, self._receiver = sender, receiver

    def append(self, item):
        line, _ = item
        is_for_sender = line != "broken" and line.server is self._sender.process
        (self._sender if is_for_sender else self._receiver).arrived.append(item)


class SimTwoWay(TwoWayTransport):
    """Both ends of a simulated worker."""

    def __init__(self, *, sender, receiver, main):
        super().__init__(sender=sender, receiver=receiver, main=main)
        self.sender, self.receiver = sender, receiver
        self.arrived = Arrivals(sender, receiver)


def ends_of(transport):
    """The senders and receivers behind a worker's transport."""
    return (transport.sender, transport.receiver) if isinstance(transport, SimTwoWay) else (transport,)


def news_of(process):
    """What a worker tells its routers of its prefixes."""
    engine, tiers = process.engine, process.worker.tiers
    keys = tiers.tiers.keys if tiers is not None else page_keys_of(engine)
    news = PrefixNews(PrefixJournal(engine.cache, keys), process.instance)
    if tiers is not None:
        tiers.tiers.keep_journal(news.journal)
    return news


# --- invariants ---------------------------------------------------------------------------------------------


def held_pages(process):
    """The pages that pulls or offers own."""
    return process.worker.pulls.held_pages if process.role == "P" else process.worker.offers.held_pages


def check_patience(process):
    """No prompt waits for a pull longer than it may: a turn of the worker has just ended."""
    if process.role != "P":
        return
    for pull in process.worker.pulls._running.values():
        if pull.room is not None and not pull.is_dropped and process.clock() > pull.until:
            raise Violation(f"{process.name}: {pull} keeps a request waiting")


def untold(process, router):
    """Pages of which the router believes another thing than the worker knows, once all was told."""
    news = process.worker.news
    if news is None or router is None:
        return 0
    journal, known = news.journal, router.dispatcher.registry.get(process.instance)
    waiting = len(journal._new) + len(journal._changed)
    if known is None:
        return 0
    return waiting + len(set(known.prefixes._told) ^ set(journal._places))
