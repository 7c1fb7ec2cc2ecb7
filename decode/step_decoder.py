"""What a decode worker asks of the thing that runs its steps."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ..engine.request import Request
from ..engine.speculative.spec_decoder import StepResult


class StepDecoder(Protocol):
    """`SpecDecoder`, as the worker sees it."""

    def step(self, requests: Sequence[Request]) -> StepResult:
        """Advance every request by at least one token; commits them to the requests."""

    def draft_prefill_batch(self, items: Sequence[tuple[Request, torch.Tensor, int]]) -> None:
        """Write the draft rows that features stand for: (request, features `[rows, K*H]`, first row)."""

    def num_covered(self, request: Request) -> int:
        """Rows of the request whose draft KV is written."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of the request; no-op when there is nothing."""
