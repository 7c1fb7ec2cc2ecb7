"""Decides whether workers can serve a request: pure functions over the registry's workers."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec import Struct

from .registry import Registry, Worker, are_other_weights


class Need(Struct, frozen=True, gc=False):
    """The requirements of a request on its workers. Sizes are tokens."""

    prompt: int
    max_new: int
    fingerprint: str = (
        ""  # fingerprint of the workers that gave output already, which others cannot continue; "": any
    )
    asks: tuple[str, ...] = ()  # the YOUNG_FIELDS that workers must obey
    weights_hash: str = ""  # weights of the workers that gave output already; "": unknown, or any
    expected: int = 0  # of `max_new`, what to count on where decode takes pages as tokens come; 0: all

    @property
    def total(self) -> int:
        return self.prompt + self.max_new

    def held_on(self, decode: Worker) -> int:
        """Tokens whose pages `decode` holds for the request, or counts on.

        A request begins with the pages of its next steps, also where less is expected of it.
        """
        if not (self.expected and decode.hello.grows):
            return self.total
        first = decode.hello.ahead_tokens + decode.hello.spec_tokens  # a step gives at most `spec_tokens`
        return self.prompt + min(self.max_new, max(self.expected, first))


class Space(Struct, frozen=True, gc=False):
    """What less urgent requests hold on a decode worker, and would give up."""

    places: int = 0
    pages: int = 0


NO_SPACE = Space()
NOWHERE: Mapping[str, Space] = {}


@dataclass(frozen=True)
class Limits:
    """The largest values over all pairs that serve, or that requests wait for."""

    context: int  # tokens of prompt and output together
    decode_tokens: int  # tokens of prompt and output that fit the pages of the roomiest decode worker
    prefill_tokens: int  # prompt tokens that fit the pages of the roomiest prefill worker
    vocab_size: int  # 0: unknown
    grows: bool = False  # every decode worker takes pages as tokens come

    @property
    def fitting(self) -> int:
        """Tokens of prompt and output together that a request can have: a pool may hold less than the
        model's context."""
        return min(self.context, self.decode_tokens)


def pairs(
    workers: Iterable[Worker], avoid: Collection[str] = (), *, with_stalled: bool = False
) -> Iterator[tuple[Worker, Worker]]:
    """Every (prefill, decode) pair that serves and fits together; see `prefillers` and `why_not_pair`.

    `with_stalled`: also those that serve when a stalled worker goes on.
    """
    serving = [worker for worker in workers if (worker.would_serve if with_stalled else worker.is_serving)]
    for decode in serving:
        if decode.role == "decode":
            for prefill in prefillers(decode, serving, avoid):
                yield prefill, decode


def why_not_pair(prefill: Worker, decode: Worker) -> str:
    """Why decode cannot use prefill's KV; "" when it can.

    Both must have equal fingerprints, and equal hashes of their weights as far as these are known. Prefill
    must offer every layer whose features decode's head reads; a decode worker without a head takes none.
    """
    ours, theirs = prefill.hello, decode.hello
    if ours.fingerprint != theirs.fingerprint:
        return f"fingerprints differ: {ours.fingerprint[:8]} and {theirs.fingerprint[:8]}"
    if are_other_weights(prefill, decode):
        return f"weights differ: their hashes are {prefill.weights_hash[:8]} and {decode.weights_hash[:8]}"
    if theirs.feature_ids and not set(theirs.feature_ids) <= set(ours.feature_ids):
        return (
            f"prefill offers features of layers {list(ours.feature_ids)}, decode's head reads "
            f"{list(theirs.feature_ids)}"
        )
    return ""


def prefillers(decode: Worker, serving: Iterable[Worker], avoid: Collection[str]) -> list[Worker]:
    """The workers that may compute a prompt for `decode`: prefill workers, and `decode` itself if it is
    aggregated, or if `avoid` has all the others.

    Where both can, `placement` decides which is cheaper.
    """
    found = [w for w in serving if w.role == "prefill" and not why_not_pair(w, decode)]
    if decode.is_aggregated or (decode.takes_prompts and all(worker.instance in avoid for worker in found)):
        found.append(decode)
    return found


def is_ready(workers: Iterable[Worker]) -> bool:
    """Whether some pair can serve."""
    return next(pairs(workers), None) is not None


def limits(workers: Iterable[Worker], *, with_stalled: bool = False) -> Limits | None:
    """The limits over all pairs, as `pairs` finds them; None without any."""
    live = list(pairs(workers, with_stalled=with_stalled))
    if not live:
        return None
    return Limits(
        context=max(min(p.hello.max_context, d.hello.max_context) for p, d in live),
        decode_tokens=max(d.hello.pages_total * d.hello.page_size - d.hello.spec_tokens for _, d in live),
        prefill_tokens=max(p.hello.pages_total * p.hello.page_size for p, _ in live),
        vocab_size=max(d.hello.vocab_size for _, d in live),
        grows=all(d.hello.grows for _, d in live),
    )


def live_pairs(registry: Registry, avoid: Collection[str] = ()) -> list[tuple[Worker, Worker]]:
    """The pairs of a registry, cached until it changes."""
    return list(pairs(registry, avoid)) if avoid else registry.memo("pairs", lambda: list(pairs(registry)))


def known_pairs(registry: Registry) -> list[tuple[Worker, Worker]]:
    """The pairs of a registry that serve, or that requests wait for, cached until it changes."""
    return registry.memo("known pairs", lambda: list(pairs(registry, with_stalled=True)))


def known_limits(registry: Registry) -> Limits | None:
    """The limits over `known_pairs`, cached until the registry changes."""
    return registry.memo("limits", lambda: limits(registry, with_stalled=True))


def can_ever(live: Iterable[tuple[Worker, Worker]], need: Need) -> bool:
    """Whether some pair could hold the request if it were idle."""
    total = need.total
    for prefill, decode in live:
        has_room = total <= decode.hello.max_context and decode.pages_for(total) <= decode.hello.pages_total
        if has_room and _suits(prefill, decode, need) and _can_prefill(prefill, need):
            return True
    return False


def able_pairs(
    live: Iterable[tuple[Worker, Worker]],
    need: Need,
    avoid: Collection[str] = (),
    taken: Collection[str] = (),
    space: Mapping[str, Space] = NOWHERE,
) -> list[tuple[Worker, Worker]]:
    """The pairs that can hold the request now, with the fewest workers in `avoid`, then in `taken`. Empty:
    all are full. `space`: what it may take from others, by decode worker.

    Workers in `avoid` (where an earlier attempt failed) are used only when no other pair can serve. Workers
    in `taken` are worth waiting for, so they come before those in `avoid`, and decode does not prefill in
    their place.
    """
    able = [
        (p, d)
        for p, d in live
        if _suits(p, d, need)
        and _can_prefill(p, need)
        and _can_decode(d, need, space=space.get(d.instance, NO_SPACE))
    ]
    if len(able) < 2 or not (avoid or taken):
        return able
    both = [{p.instance, d.instance} for p, d in able]
    counts = [(len(pair.intersection(avoid)), len(pair.intersection(taken))) for pair in both]
    return [pair for pair, count in zip(able, counts, strict=True) if count == min(counts)]


def emptiest_pairs(live: Iterable[tuple[Worker, Worker]]) -> list[tuple[Worker, Worker]]:
    """The pairs whose workers have the fewest rooms."""
    counted = [(prefill.num_taken + decode.num_taken, prefill, decode) for prefill, decode in live]
    fewest = min((count for count, _, _ in counted), default=0)
    return [(prefill, decode) for count, prefill, decode in counted if count == fewest]


def obeyed(prefill: Worker, decode: Worker, fields: Collection[str]) -> bool:
    """Whether both workers know these fields. A worker of an older version would ignore them."""
    by_prefill, by_decode = prefill.hello.takes, decode.hello.takes
    for name in fields:  # noqa: SIM110 - called several times per request; a generator would cost more
        if name not in by_decode or name not in by_prefill:
            return False
    return True


def _suits(prefill: Worker, decode: Worker, need: Need) -> bool:
    """Whether the pair knows the request's fields and continues output of the same fingerprint and
    weights."""
    if need.fingerprint and decode.hello.fingerprint != need.fingerprint:
        return False
    if need.weights_hash and decode.weights_hash and decode.weights_hash != need.weights_hash:
        return False
    return not need.asks or obeyed(prefill, decode, need.asks)


def _can_prefill(worker: Worker, need: Need) -> bool:
    hello = worker.hello
    return need.total <= hello.max_context and need.prompt <= hello.pages_total * hello.page_size


def can_share(decode: Worker, need: Need, num_shared: int) -> bool:
    """Whether decode can hold a request now, of whose pages it has `num_shared` already."""
    return decode.is_serving and decode.hello.shares_prompts and _can_decode(decode, need, num_shared)


def _can_decode(worker: Worker, need: Need, num_shared: int = 0, *, space: Space = NO_SPACE) -> bool:
    hello = worker.hello
    has_slot = hello.max_running == 0 or worker.num_taken < hello.max_running + space.places
    has_pages = worker.pages_for(need.held_on(worker)) - num_shared <= worker.spare_pages + space.pages
    return has_slot and need.total <= hello.max_context and has_pages
