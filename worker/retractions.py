"""Requests whose pages or places went to others, counted by the reason and by their class."""

from collections.abc import MutableMapping
from enum import Enum

from ..cluster.telemetry.metrics import PRIORITIES, priority_class

RETRACTED = "Retracted"  # kind of a Failed: the router places the request again, and nothing has failed


class Reason(Enum):
    """Why a request gave up what it held. The value is the name of its counter."""

    FULL_POOL = "retractions_full_pool"  # running requests outgrew the pool
    URGENT_PAGES = "retractions_urgent_pages"  # a more urgent request found no pages
    URGENT_PLACE = "retractions_urgent_place"  # a more urgent request found no place

    @property
    def is_preempted(self) -> bool:
        """Whether a more urgent request is the reason."""
        return self is not Reason.FULL_POOL

    @property
    def message(self) -> str:
        """The reason in words."""
        if self is Reason.FULL_POOL:
            return "its pages went to an older request"
        what = "pages" if self is Reason.URGENT_PAGES else "place"
        return f"its {what} went to a more urgent request"


RETRACTION_COUNTERS = (
    "retractions",
    "retracted_tokens",
    *(reason.value for reason in Reason),
    *(f"retractions_{name}" for name in PRIORITIES),
)


def count_retraction(
    counters: MutableMapping[str, float], reason: Reason, *, priority: int, num_tokens: int
) -> None:
    """Counts a request of class `priority`, of which `num_tokens` tokens had KV."""
    counters["retractions"] += 1
    counters["retracted_tokens"] += num_tokens
    counters[reason.value] += 1
    counters[f"retractions_{priority_class(priority)}"] += 1
