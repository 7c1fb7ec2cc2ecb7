"""What a worker tells its routers about the prefixes that it holds, a bounded part with each heartbeat."""

from ..cluster.protocol.messages import HeldPrefixes
from ..engine.kv.prefix_journal import PrefixJournal

NEWS_PAGES = 2048  # pages in one message: 32 KiB
PAGES_PER_STEP = 64  # a heartbeat that had to name all pages would delay a step by as much as the step takes


class PrefixNews:
    """The messages of one worker, numbered from 0. All routers get the same ones.

    When a router joins, and when one has missed a message and asks, everything is told anew.
    """

    def __init__(self, journal: PrefixJournal, instance: str) -> None:
        self.journal = journal
        self.num_sent = 0
        self._instance = instance

    def __repr__(self) -> str:
        return f"<PrefixNews {self.num_sent} sent, {self.journal!r}>"

    def asked(self) -> None:
        """A router has joined, or has missed something."""
        self.journal.restart()

    def work(self) -> None:
        """A part of what the next message takes. Call it while the device computes."""
        self.journal.work(PAGES_PER_STEP)

    def take(self) -> HeldPrefixes | None:
        """The next message; None: there is nothing to tell."""
        part = self.journal.take(NEWS_PAGES)
        if part is None:
            return None
        seq, self.num_sent = self.num_sent, self.num_sent + 1
        return HeldPrefixes(
            instance=self._instance,
            seq=seq,
            root=part.scheme.root,
            lookahead=part.scheme.lookahead,
            is_first=part.is_first,
            is_last=part.is_last,
            added=b"".join(part.added),
            removed=b"".join(part.removed),
        )
