"""Rolls a head out on the decode workers of a running cluster, one after the other.

    check    every worker reads the checkpoint on its host and says whether it fits; nothing changes
    swap     the next worker takes it between two steps; its requests go on
    canary   the accept length of requests that began since is compared with that of workers with the old
             head meanwhile, or of the worker itself before
    back     if it fell, or a worker was lost, every worker of this run takes its old head back
    restart  where the new head has another shape than the old one, workers are restarted in place of the
             swap, one at a time; their --draft names a link, and the link names the new head

The router passes orders on; the heartbeat of a worker tells what became of them. A run that was broken off is
given again: workers that have the head are passed over.
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from ..engine.errors import CheckpointError

LOOK_S = 0.25
REPEAT_S = 2.0  # until an order that no heartbeat names is sent again
AWAY_S = 30.0  # longest time without an answer of the router
REQUEST_S = 30.0
LEAST_SHARE = 0.25  # of the verifies asked for, in a measurement to compare with
REFUSALS = (400, 401, 403, 404, 405)  # answers that a repetition does not change


@dataclass(frozen=True, kw_only=True)
class SwapSettings:
    """`verifies` of requests that began with the new head decide; 0: no comparison. The accept length may be
    lower by the share `tolerance`. `verdict_s` and `order_s`: longest waits for a verdict and for an order.
    """

    path: Path
    link: Path | None = None  # the link that --draft of the workers names; in the end it names `path`
    may_restart: bool = False
    verifies: int = 500
    tolerance: float = 0.1
    verdict_s: float = 600.0
    order_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A decode worker as its last heartbeat told. `verifies` and `tokens` are of requests that began with
    the weights `fingerprint`; `recent` is the accept length of late.
    """

    instance: str
    name: str
    host: str
    fingerprint: str
    verifies: int
    tokens: int
    recent: float | None
    order: str
    state: str
    fault: str
    found: str
    found_ids: tuple[int, ...]
    link: str
    previous: str


class Decodes(Protocol):
    """The decode workers of a cluster."""

    def look(self) -> Mapping[str, Drafting]:
        """Those that serve, by instance. Raises CheckpointError if one cannot change its weights."""

    def order(self, instance: str, order: str, action: str, path: str) -> None:
        """Sends an order. Raises CheckpointError if the router refuses it."""

    def offered(self) -> Mapping[str, tuple[int, ...]]:
        """The layers that each serving prefill worker offers, by its name."""


class RolledBack(Exception):
    """The rollout ended and the old head is back; the message tells why."""


@dataclass
class Rollout:
    """One rollout over `decodes`. `say` gets a line per event; `clock` and `sleep` are of monotonic
    seconds.
    """

    settings: SwapSettings
    decodes: Decodes
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _fingerprint: str = ""
    _checked: set[str] = field(default_factory=set)
    _difference: str = ""  # why workers must restart for the head; "": they need not
    _old_target: Path | None = None  # of the link, once it was changed
    _swapped: list[Drafting] = field(default_factory=list)  # as they were before, in their order

    def run(self) -> None:
        """Swaps every worker. Raises CheckpointError if the head does not fit, with nothing changed, and
        RolledBack if it was taken back.
        """
        if self.settings.link is not None:
            must_be_link(self.settings.link)
        self._check_all()
        if not self._pending():
            self.say(f"every decode worker has {self.settings.path} already")
        try:
            while pending := self._pending():
                self._check_all()
                if self._difference:
                    self._restart(pending[0])
                else:
                    self._swap(pending[0])
            if self.settings.link is not None and self._old_target is None:
                self._point(self.settings.path)
        except (RolledBack, CheckpointError) as error:
            self._back()
            raise RolledBack(f"{error}; {self._tail()}") from None

    def _tail(self) -> str:
        return "the old head is back" if self._swapped else "no worker was changed"

    def _pending(self) -> list[Drafting]:
        return [one for one in self.decodes.look().values() if one.fingerprint != self._fingerprint]

    def _check_all(self) -> None:
        """Has every worker that did not read the checkpoint yet do so, all at once."""
        names = {one.instance: one.name for one in self.decodes.look().values()}
        orders = {instance: secrets.token_hex(16) for instance in names if instance not in self._checked}
        for instance, order in orders.items():
            found = self._obeyed(instance, names[instance], order, "check")
            if self._fingerprint and found.found != self._fingerprint:
                raise CheckpointError(
                    f"{self.settings.path}: is another checkpoint on the host of {names[instance]} than on "
                    "that of the others; copy the same files to every host"
                )
            self._fingerprint = found.found
            self._checked.add(instance)
            if found.state == "other":
                self._may_restart(found)

    def _may_restart(self, found: Drafting) -> None:
        """Notes that workers must restart for the head. Raises CheckpointError if they cannot, or may not."""
        settings, link = self.settings, self.settings.link
        if not settings.may_restart or link is None:
            raise CheckpointError(f"{found.name}: {found.fault} --link LINK")
        if found.link != str(link):
            raise CheckpointError(
                f"{found.name}: its --draft is not the link {link}; restart it once with --draft {link}"
            )
        if len(self.decodes.look()) < 2:
            raise CheckpointError(
                f"{found.name} is the only decode worker that drafts, and its streams would have nowhere to "
                "go; start another one"
            )
        for name, ids in self.decodes.offered().items():
            if missing := sorted(set(found.found_ids) - set(ids)):
                layers = ",".join(map(str, found.found_ids))
                raise CheckpointError(
                    f"{name} does not offer the features of layers {','.join(map(str, missing))}; restart it "
                    f"with --feature-layers {layers}"
                )
        self._difference = found.fault

    def _point(self, target: Path) -> None:
        link = self.settings.link
        assert link is not None
        self._old_target = point_link(link, target) or self._old_target
        self.say(f"{link} names {target}")

    def _obeyed(self, instance: str, name: str, order: str, action: str) -> Drafting:
        """Gives an order until the worker has done it. Raises CheckpointError if it refuses, and RolledBack
        if it is lost.
        """
        path = "" if action == "back" else str(self.settings.path)
        began, sent = self.clock(), float("-inf")
        while self.clock() - began < self.settings.order_s:
            one = self.decodes.look().get(instance)
            if one is None:
                raise RolledBack(f"{name} was lost")
            if one.order == order and one.state == "refused":
                raise CheckpointError(f"{name}: {one.fault}")
            if one.order == order and one.state in ("checked", "other", "done"):
                return one
            if one.order != order and self.clock() - sent >= REPEAT_S:
                self.decodes.order(instance, order, action, path)
                sent = self.clock()
            self.sleep(LOOK_S)
        raise CheckpointError(f"{name}: the order {action} was not done within {self.settings.order_s:g} s")

    def _swap(self, before: Drafting) -> None:
        others = self._others()
        self._swapped.append(before)  # an order whose end is not known is taken back, too
        self._obeyed(before.instance, before.name, secrets.token_hex(16), "swap")
        self.say(f"{before.name}: drafts with {self.settings.path}")
        if self.settings.verifies:
            self._judge(before, others)

    def _restart(self, before: Drafting) -> None:
        others = self._others()
        if self._old_target is None:
            self._point(self.settings.path)
        self._swapped.append(before)
        new = self._started_again(before, self.settings.path, self._fingerprint)
        self.say(f"{new.name}: drafts with {self.settings.path}")
        if self.settings.verifies:
            self._judge(before, others, new)

    def _started_again(self, one: Drafting, path: Path, fingerprint: str) -> Drafting:
        """Has a worker restart, and waits for the one in its place. Raises CheckpointError if it refuses, and
        RolledBack if none comes, or one with another head.
        """
        began, sent, order = self.clock(), float("-inf"), secrets.token_hex(16)
        known = set(self.decodes.look())
        while self.clock() - began < self.settings.order_s:
            seen = self.decodes.look()
            old = seen.get(one.instance)
            if old is not None and old.order == order and old.state == "refused":
                raise CheckpointError(f"{old.name}: {old.fault}")
            if old is not None and old.order != order and self.clock() - sent >= REPEAT_S:
                self.decodes.order(one.instance, order, "restart", str(path))
                sent = self.clock()
            for new in seen.values():
                if old is None and new.instance not in known and new.host == one.host:
                    if new.fingerprint != fingerprint:
                        raise RolledBack(f"{new.name} came back with another head, {new.fingerprint[:8]}")
                    self._checked.add(new.instance)
                    return new
            self.sleep(LOOK_S)
        raise RolledBack(f"{one.name} did not come back within {self.settings.order_s:g} s")

    def _others(self) -> Mapping[str, Drafting]:
        """The workers with another head than the new one."""
        found = self.decodes.look().items()
        return {instance: one for instance, one in found if one.fingerprint != self._fingerprint}

    def _judge(self, before: Drafting, others: Mapping[str, Drafting], new: Drafting | None = None) -> None:
        """Compares a worker with what it was `before`, and with `others`. `new`: the worker in its place.

        Raises RolledBack if the accept length fell, or if there is no verdict in time.
        """
        settings, began = self.settings, self.clock()
        instance = before.instance if new is None else new.instance
        measured = 0
        while self.clock() - began < settings.verdict_s:
            seen = self.decodes.look()
            one = seen.get(instance)
            if one is None:
                raise RolledBack(f"{before.name} was lost")
            if one.fingerprint != self._fingerprint:
                raise RolledBack(f"{before.name} has the head {one.fingerprint[:8]}: another run changed it")
            measured = one.verifies
            usual = self._usual(before, others, seen)
            if measured >= settings.verifies and usual is not None:
                length, (old, where) = one.tokens / one.verifies, usual
                text = f"accept length {length:.2f} over {measured} verifies, {old:.2f} {where}"
                if length < old * (1 - settings.tolerance):
                    raise RolledBack(f"{before.name}: {text}")
                return self.say(f"{before.name}: {text}")
            self.sleep(LOOK_S)
        raise RolledBack(
            f"{before.name}: no verdict within {settings.verdict_s:g} s, {measured} of {settings.verifies} "
            "verifies; lower --verifies, or set it to 0 to swap without a comparison"
        )

    def _usual(
        self, before: Drafting, others: Mapping[str, Drafting], seen: Mapping[str, Drafting]
    ) -> tuple[float, str] | None:
        """The accept length of the old head, and its origin; None if too little was measured."""
        least = max(1, int(self.settings.verifies * LEAST_SHARE))
        verifies = tokens = 0
        for instance, then in others.items():
            now = seen.get(instance)
            if instance != before.instance and now is not None and now.fingerprint == then.fingerprint:
                verifies += now.verifies - then.verifies
                tokens += now.tokens - then.tokens
        if verifies >= least:
            return tokens / verifies, "on the others meanwhile"
        if before.verifies >= least:
            recent = before.recent if before.recent is not None else before.tokens / before.verifies
            return recent, "before"
        return None

    def _back(self) -> None:
        """Takes the new head back from the workers of this run, the last one first."""
        if self._difference:
            return self._back_by_restarts()
        for before in reversed(self._swapped):
            try:
                one = self._settled(before.instance)
                if one is None:
                    self.say(f"{before.name}: lost; after a restart it has the head of its --draft")
                elif one.fingerprint == self._fingerprint and one.previous:
                    self._obeyed(before.instance, before.name, secrets.token_hex(16), "back")
                    self.say(f"{before.name}: drafts with its old head")
            except (RolledBack, CheckpointError) as error:
                self.say(f"{before.name}: could not be taken back: {error}")

    def _back_by_restarts(self) -> None:
        """Lets the link name the old head again, and restarts the workers that have the new one."""
        old = self._old_target
        if old is None:
            return
        self._point(old)
        for before in reversed(self._swapped):
            for one in list(self.decodes.look().values()):
                if one.host != before.host or one.fingerprint != self._fingerprint:
                    continue
                try:
                    new = self._started_again(one, old, before.fingerprint)
                    self.say(f"{new.name}: drafts with its old head")
                except (RolledBack, CheckpointError) as error:
                    self.say(f"{before.name}: could not be taken back: {error}")

    def _settled(self, instance: str) -> Drafting | None:
        """The worker once no order is under way there; None if it is lost."""
        began = self.clock()
        while True:
            one = self.decodes.look().get(instance)
            if one is None or one.state != "busy" or self.clock() - began >= self.settings.order_s:
                return one
            self.sleep(LOOK_S)


class HttpDecodes:
    """The decode workers behind the router at `url`. An operator's key is needed where the router asks for
    keys.
    """

    def __init__(self, client: httpx.Client, url: str, api_key: str = "") -> None:
        self._client, self._url = client, url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def look(self) -> Mapping[str, Drafting]:
        workers = self._json("GET", "/status", None)["workers"]
        return {one["instance"]: _drafting(one) for one in workers if _is_ours(one)}

    def order(self, instance: str, order: str, action: str, path: str) -> None:
        self._json("POST", "/drafts", {"instance": instance, "order": order, "action": action, "path": path})

    def offered(self) -> Mapping[str, tuple[int, ...]]:
        workers = self._json("GET", "/status", None)["workers"]
        return {
            f"prefill {one['instance'][:8]}": tuple(one["feature_ids"])
            for one in workers
            if one["role"] == "prefill" and one["state"] == "serving"
        }

    def _json(self, method: str, path: str, body: dict[str, str] | None) -> dict[str, Any]:
        """The answer. A router that is away is asked again for a while. Raises CheckpointError."""
        began = time.monotonic()
        while True:
            try:
                reply = self._client.request(method, self._url + path, json=body, headers=self._headers)
                if reply.status_code == 200:
                    return dict(reply.json())
                fault = f"{self._url}{path} answered {reply.status_code}: {reply.text[:300]}"
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                reply, fault = None, f"{self._url}: no answer ({type(error).__name__}: {error})"
            is_final = reply is not None and reply.status_code in REFUSALS
            if is_final or time.monotonic() - began > AWAY_S:
                raise CheckpointError(fault)
            time.sleep(LOOK_S)


def _is_ours(worker: Mapping[str, Any]) -> bool:
    """Whether a worker of /status drafts and serves. Raises CheckpointError if its head cannot change."""
    if worker["role"] != "decode" or worker["state"] != "serving" or worker["draft_widths"] is None:
        return False
    if worker.get("draft") is None:
        raise CheckpointError(
            f"{_name_of(worker)} drafts by lookup, or is of an older release: its head cannot be changed "
            "while it runs; restart it with --draft"
        )
    return True


def _name_of(worker: Mapping[str, Any]) -> str:
    return f"decode {worker['instance'][:8]} (pid {worker['pid']} on {worker['host']})"


def _drafting(worker: Mapping[str, Any]) -> Drafting:
    draft = worker["draft"]
    return Drafting(
        instance=worker["instance"],
        name=_name_of(worker),
        host=worker["host"],
        fingerprint=draft["fingerprint"],
        verifies=draft["verifies"],
        tokens=draft["tokens"],
        recent=worker["accept_length"],
        order=draft["order"],
        state=draft["state"],
        fault=draft["fault"],
        found=draft["found"],
        found_ids=tuple(draft["found_ids"]),
        link=draft["link"],
        previous=draft["previous"],
    )


def swap_heads(settings: SwapSettings, url: str, api_key: str, say: Callable[[str], None]) -> None:
    """Rolls the head at `settings.path` out. Raises as `Rollout.run`, and CheckpointError without workers."""
    with httpx.Client(timeout=REQUEST_S, trust_env=False) as client:
        decodes = HttpDecodes(client, url, api_key)
        if not decodes.look():
            raise CheckpointError(
                f"{url}: no decode worker with a draft head serves there; start them with --draft"
            )
        Rollout(settings, decodes, say).run()


def must_be_link(link: Path) -> None:
    """Raises CheckpointError if `link` exists and is not a symbolic link."""
    if link.exists() and not link.is_symlink():
        raise CheckpointError(f"--link {link}: is no symbolic link; name the link that --draft names")


def point_link(link: Path, target: Path) -> Path | None:
    """Makes the symbolic link `link` name `target`, in one step. Returns what it named before, if anything.

    Raises CheckpointError if it is no link, or cannot be changed.
    """
    must_be_link(link)
    old = Path(os.path.realpath(link)) if link.is_symlink() else None
    new = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        os.replace(new, link)
    except OSError as error:
        raise CheckpointError(f"--link {link}: cannot be changed ({error.strerror or error})") from None
    return old
