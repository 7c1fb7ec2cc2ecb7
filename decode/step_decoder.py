"""The decoder that a decode worker drives, as a protocol."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from ..engine.request import Request
from ..engine.speculative.step.async_decoder import Flight
from ..engine.speculative.step.result import StepResult


class StepDecoder(Protocol):
    """Runs one decode step at a time."""

    def step(self, requests: Sequence[Request]) -> StepResult:
        """Advance every request by at least one token and commit the tokens to the requests."""

    def draft_prefill_batch(self, items: Sequence[tuple[Request, torch.Tensor, int]]) -> None:
        """Write draft KV rows from features; an item is (request, features `[rows, K*H]`, first row)."""

    def num_covered(self, request: Request) -> int:
        """Number of leading rows of the request whose draft KV is written."""

    def grow(self, grown: Sequence[tuple[Request, int]]) -> None:
        """Takes note of pages that requests got behind their first ones; an item is (request, pages before).

        Steps launched from now on may use them.
        """

    def forget(self, request: Request) -> None:
        """Drop the state kept for the request; no-op when there is none."""


@runtime_checkable
class LaunchingDecoder(StepDecoder, Protocol):
    """Launches a step before the previous one is read: `AsyncDecoder`."""

    @property
    def counters(self) -> Mapping[str, float]:
        """Steps launched ahead since the start, and steps that were not, by reason."""

    def can_launch(self, requests: Sequence[Request]) -> bool:
        """Whether a step of these requests can be launched ahead. If not, `step` runs it once no flight is
        unread."""

    def launch(self, requests: Sequence[Request]) -> Flight:
        """Launch a step behind those launched before."""

    def read(self, flight: Flight, is_live: Sequence[bool]) -> StepResult:
        """Wait for the oldest flight and commit its tokens to its live requests. The result has rows for
        these only."""
