"""The base of a room, shared by both roles."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from ..cluster.protocol.messages import is_canary
from ..cluster.telemetry.trace_context import NOWHERE, TraceContext
from ..engine.kv.tiers.cache_tiers import Restore
from ..engine.request import Request


@dataclass(kw_only=True)
class WorkerRoom(ABC):
    """One attempt of a request on this worker. `arrived` and `deadline` are monotonic seconds.

    A role adds its `state` and its timestamps.
    """

    request: Request
    arrived: float
    deadline: float | None
    priority: int = 0  # of the request's class; lower is more urgent
    waited: float = 0.0  # seconds from the request's arrival at the router to `arrived`
    trace: TraceContext = NOWHERE  # of the router's span, where the request is traced
    request_id: str = ""  # of the client's request; "": not known
    gone_epoch: int = -1  # epoch of the Cancel that waits for this attempt's pages; -1: none
    is_tainted: bool = False  # its KV must not be reused
    restore: Restore | None = None  # of a prefix from a lower tier, under way
    work_s: float = 0.0  # of the device, for its prompt: its rows' share of each forward

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields that name it in log lines."""
        named = {"room": self.request.room}
        return named | {"request": self.request_id} if self.request_id else named

    @property
    def log_level(self) -> int:
        """The level of its normal log lines: canaries run all the time."""
        return logging.DEBUG if is_canary(self.request.salt) else logging.INFO

    @property
    def key(self) -> tuple[str, int]:
        """(room, epoch)"""
        return self.request.room, self.request.epoch

    @property
    @abstractmethod
    def state(self) -> Enum:
        """A member of the role's enumeration of states."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the room has ended and only its pages wait for their last user."""

    @property
    @abstractmethod
    def can_expire(self) -> bool:
        """Whether its deadline, or a fault of its request, still ends it."""
