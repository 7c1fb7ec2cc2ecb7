"""What a decode worker asks of the thing that runs its steps."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from ..engine.request import Request
from ..engine.speculative.step.async_decoder import Flight
from ..engine.speculative.step.result import StepResult


class StepDecoder(Protocol):
    """What decodes the rooms of a worker, one step at a time."""

    def step(self, requests: Sequence[Request]) -> StepResult:
        """Advance every request by at least one token; commits them to the requests."""

    def draft_prefill_batch(self, items: Sequence[tuple[Request, torch.Tensor, int]]) -> None:
        """Write the draft rows that features stand for: (request, features `[rows, K*H]`, first row)."""

    def num_covered(self, request: Request) -> int:
        """Rows of the request whose draft KV is written."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of the request; no-op when there is nothing."""


@runtime_checkable
class LaunchingDecoder(StepDecoder, Protocol):
    """A decoder whose steps may be launched before the step before was read: `AsyncDecoder`."""

    @property
    def counters(self) -> Mapping[str, float]:
        """Steps launched ahead, and why others were not, since the start."""

    def can_launch(self, requests: Sequence[Request]) -> bool:
        """Whether they can be stepped ahead; if not, `step` does it, with no flight unread."""

    def launch(self, requests: Sequence[Request]) -> Flight:
        """Begin a step behind those launched before."""

    def read(self, flight: Flight, is_live: Sequence[bool]) -> StepResult:
        """Wait for the oldest flight; commits its tokens to its live requests, of whom alone the result is."""
