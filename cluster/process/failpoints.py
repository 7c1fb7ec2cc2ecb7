"""Faults at exact points of a worker, for tests: `BATON_FAULT=site:nth[:action]`, several separated by
commas.

The action happens when the process reaches the site for the nth time, counted from 1. With the variable set,
a process refuses to start unless `BATON_ALLOW_FAULTS=1` is set too. Without the variable a site is a call
that returns at once.

Rank n of a tensor-parallel worker, counted from 1, reads `BATON_FAULT_RANK_n` instead.

    site               reached
    prefill:chunk      before a forward, once for each prompt in it
    prefill:retract    a prompt is about to give its pages up to a more urgent one
    prefill:first      token 1 was sampled and given to the router's link
    sender:block       before a block is put on the wire
    sender:gather      a run of blocks is on its way into a slot of device memory
    sender:release     a Release arrived and is not processed yet; decode has everything
    receiver:scatter   a run of blocks is on its way from device memory into its pages
    receiver:read      a block is about to be read through NIXL
    receiver:block     a block was checked and is in its pages
    receiver:release   before a Release is sent: every block is in place
    offer:block        decode: before a block of a prefix is put on the wire
    offer:release      decode: a Release of a prefix arrived and is not processed yet
    pull:block         prefill: a block of a prefix was checked and is in its pages
    pull:release       prefill: before a Release of a prefix is sent: every block is in place
    prefill:pull       before a prefix is asked for
    decode:offer       an OfferPrefix arrived
    decode:reserve     a Reserve arrived
    decode:retract     a room is about to give its pages up
    decode:chunk       before a forward over prompts that decode computes itself
    decode:step        before a step of a batch that is not empty
    decode:swap        before staged weights of a draft head are copied over those in use
    tier:save          before pages of the pool are copied to host memory
    tier:load          before pages of host memory are copied into the pool
    tier:clear         before a record in the index of the disk tier is cleared
    tier:write         the record is cleared, before its page is written
    tier:index         the page is written, before its record is
    tier:fetch         before a page is read from the disk

    action     what happens
    kill       SIGKILL to this process (the default)
    abort      SIGABRT
    raise      an exception where the site stands
    pause      this thread sleeps for PAUSE_S, then goes on
    hang       this thread never goes on; others do
    hang-gil   this thread never goes on and holds the interpreter's lock: no Python thread goes on
"""

import ctypes
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import ConfigError

VARIABLE = "BATON_FAULT"
PERMISSION = "BATON_ALLOW_FAULTS"
SITES = (
    "prefill:chunk", "prefill:retract", "prefill:first", "sender:block", "sender:gather", "sender:release",
    "receiver:scatter", "receiver:read", "receiver:block", "receiver:release", "offer:block", "offer:release",
    "pull:block", "pull:release", "prefill:pull", "decode:offer", "decode:reserve", "decode:retract",
    "decode:chunk", "decode:step", "decode:swap", "tier:save", "tier:load", "tier:clear", "tier:write",
    "tier:index", "tier:fetch",
)  # fmt: skip
ACTIONS = ("kill", "abort", "raise", "pause", "hang", "hang-gil")
PAUSE_S = 4.0  # shorter than the lease of a hand-off, longer than any timeout of a worker
FOREVER_S = 86400

Reach = Callable[[str], None]

_FAULT = re.compile(r"([a-z]+:[a-z]+):([1-9][0-9]{0,8})(?::([a-z-]+))?")


class FaultInjected(RuntimeError):
    """Raised by the action `raise`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: the `nth` time that `site` is reached, `action` happens."""

    site: str
    nth: int
    action: str


def unarmed(site: str) -> None:
    """Reach `site` in a process without faults."""


class Failpoints:
    """Counts how often each site was reached, by any thread."""

    def __init__(self, faults: tuple[Fault, ...], act: Callable[[Fault], None] | None = None) -> None:
        self._faults = {(fault.site, fault.nth): fault for fault in faults}
        self._act = act or perform
        self._reached: Counter[str] = Counter()
        self._counts = threading.Lock()

    def __repr__(self) -> str:
        return f"Failpoints({', '.join(f'{f.site}:{f.nth}:{f.action}' for f in self._faults.values())})"

    def reach(self, site: str) -> None:
        """The process is at `site`."""
        with self._counts:
            self._reached[site] += 1
            fault = self._faults.get((site, self._reached[site]))
        if fault is not None:
            self._act(fault)


def reach_of(env: Mapping[str, str], rank: int = 0) -> Reach:
    """Makes the function that the fault sites of this process call; the process is rank `rank` of its worker.

    Raises ConfigError for an invalid fault, or one not permitted.
    """
    faults = read_faults(env, f"{VARIABLE}_RANK_{rank}" if rank else VARIABLE)
    return Failpoints(faults).reach if faults else unarmed


def read_faults(env: Mapping[str, str], variable: str = VARIABLE) -> tuple[Fault, ...]:
    """The faults that `env` asks for in `variable`. Raises ConfigError."""
    text = env.get(variable, "")
    if not text:
        return ()
    if env.get(PERMISSION) != "1":
        raise ConfigError(
            f"{variable}={text} breaks this process on purpose; unset it, or set {PERMISSION}=1 in a test"
        )
    return tuple(_fault(part) for part in text.split(","))


def perform(fault: Fault) -> None:
    """Performs the fault's action."""
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "abort":
        os.abort()
    elif fault.action == "raise":
        raise FaultInjected(f"{VARIABLE} at {fault.site}, reached {fault.nth} times")
    elif fault.action == "pause":
        time.sleep(PAUSE_S)
    elif fault.action == "hang":
        time.sleep(FOREVER_S)
    else:
        ctypes.PyDLL(None).sleep(FOREVER_S)  # unlike CDLL, PyDLL keeps the interpreter's lock


def _fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{VARIABLE}: {text!r} is not site:nth[:action], such as decode:step:10:kill")
    site, nth, action = match[1], int(match[2]), match[3] or "kill"
    if site not in SITES:
        raise ConfigError(f"{VARIABLE}: unknown site {site!r}; sites: {', '.join(SITES)}")
    if action not in ACTIONS:
        raise ConfigError(f"{VARIABLE}: unknown action {action!r}; actions: {', '.join(ACTIONS)}")
    return Fault(site=site, nth=nth, action=action)
