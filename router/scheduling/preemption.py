"""What less urgent requests hold on decode workers, and would give up for a more urgent one. Pure.

A decode worker retracts the newest requests of the least urgent classes for one that finds no place or no
pages (`preempts` of its Hello). The router counts on that where no pair has room. It places a request so only
in its turn, and never counts on a request that is within its grant (`output_estimates.claim_of`).
"""

from collections.abc import Mapping

from ..workers.eligibility import Space
from ..workers.registry import Registry, Worker
from .request_state import Entry


def space_for(entry: Entry, registry: Registry, entries: Mapping[str, Entry]) -> dict[str, Space]:
    """What `entry` may take from others, by decode worker; only workers at which it may take something.

    `entries`: all rooms of the router, by id.
    """
    found: dict[str, Space] = {}
    for worker in registry:
        if not (worker.hello.preempts and worker.hello.grows and worker.is_serving):
            continue
        places = pages = 0
        for attempt in worker.ledger.less_urgent(entry.request.priority):
            other = entries.get(attempt[0])
            if other is not None and other.room.epoch == attempt[1] and _would_yield(other, worker):
                places += 1
                pages += worker.ledger.pages_of(attempt)
        if places:
            found[worker.instance] = Space(places, pages)
    return found


def _would_yield(entry: Entry, worker: Worker) -> bool:
    """Whether the request takes pages as its tokens come, and has more than its grant."""
    if not (entry.expected_output and entry.room.is_at_workers):
        return False
    margin = worker.hello.page_size + 2 * worker.hello.spec_tokens if entry.granted else 0
    return entry.room.num_output >= entry.placed_output + entry.granted + margin
