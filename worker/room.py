"""The base of a room, shared by both roles."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from ..cluster.telemetry.trace_context import NOWHERE, TraceContext
from ..engine.request import Request


@dataclass(kw_only=True)
class WorkerRoom(ABC):
    """One attempt of a request on this worker. `arrived` and `deadline` are monotonic seconds.

    A role adds its `state` and its timestamps.
    """

    request: Request
    arrived: float
    deadline: float | None
    trace: TraceContext = NOWHERE  # of the router's span, where the request is traced
    gone_epoch: int = -1  # epoch of the Cancel that waits for this attempt's pages; -1: none
    is_tainted: bool = False  # its KV must not be reused

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
