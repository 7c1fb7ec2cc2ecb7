"""What drafting by lookup finds, by a plain search over lists."""

from collections.abc import Sequence

from baton.engine.speculative.drafters.ngram import NgramConfig


def lookup(text: Sequence[int], config: NgramConfig, count: int) -> list[int]:
    """`count` drafts behind `text`, or none: what followed the longest agreement, the newest of these."""
    known = list(text[-config.window :])
    for length in range(config.longest, config.shortest - 1, -1):
        ends = range(len(known) - 1, length - 1, -1)
        end = next((e for e in ends if known[e - length : e] == known[len(known) - length :]), None)
        if end is not None:
            start = len(known)
            for ahead in range(count):
                known.append(known[end + ahead])
            return known[start:]
    return []
