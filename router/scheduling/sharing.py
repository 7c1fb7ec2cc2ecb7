"""Further choices of a request share the prompt's pages of the first one on decode. Pure.

A choice goes to the decode worker at which another choice of its request has the same prompt, or gets it just
now: one prefill and one hand-off serve them all. Where that worker has no place left, the choice is placed
like any other request.
"""

from collections.abc import Set as AbstractSet

from ..rooms.effects import Pair
from ..workers.eligibility import can_share
from ..workers.registry import Registry
from .request_state import Entry

MAX_UNSHARED = 3  # a choice whose siblings lose their prompt so often is placed alone


def shared_pages(num_prompt: int, page_size: int) -> int:
    """Pages of a prompt that its choices share: those before its last token."""
    return max(0, num_prompt - 1) // page_size


def sharing_pair(registry: Registry, entry: Entry, avoid: AbstractSet[str]) -> Pair | None:
    """The pair for `entry` at the decode worker of a sibling with the same prompt; None without one.

    Workers in `avoid`, and those where the room failed, are left out.
    """
    siblings = entry.request.entries
    if len(siblings) < 2 or not _may_share(entry) or entry.room.num_unshared >= MAX_UNSHARED:
        return None
    for other in siblings:
        pair = other.room.pair
        if other is entry or pair is None or pair.shares or not other.room.has_whole_prompt:
            continue
        if not _may_share(other) or not _are_alike(entry, other):
            continue
        decode = registry.get(pair.decode)
        if decode is None or decode.instance in avoid or decode.instance in entry.room.failed_on:
            continue
        if can_share(decode, entry.need, shared_pages(entry.need.prompt, decode.hello.page_size)):
            return Pair(
                prefill=decode.instance, decode=decode.instance, prefill_endpoint="", shares=other.room.room
            )
    return None


def _may_share(entry: Entry) -> bool:
    """Whether decode computes the last token of the prompt like any other, and no worker died with it.

    Nothing is told of the other tokens.
    """
    room, job = entry.room, entry.job
    told = job.sampling.prompt_logprobs >= 0 or job.sampling.routed_experts >= 0
    return not room.deaths and job.embeds is None and not told


def _are_alike(one: Entry, other: Entry) -> bool:
    is_same = one.job.salt == other.job.salt and one.job.prompt_ids == other.job.prompt_ids
    return is_same and not one.room.num_output
