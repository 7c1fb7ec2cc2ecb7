"""Requests of made-up tokens, for steps that are tried or measured before an engine serves.

They stand in the first pages of the KV pools, which are zeroed when they leave. Their newest tokens and their
lengths differ, as those of real requests do: rows that are alike would choose the same experts.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...kernels.fp8_scales import fill_normal
from ...kernels.step_glue import LATE
from ..kv.page_table import pages_for
from ..sampling.edits import SamplingRow
from ..sampling.params import SamplingParams
from ..speculative.drafters.protocol import draft_pools
from ..speculative.drafters.states import PAD_ROW
from ..speculative.step.device_state import RequestInit
from ..speculative.step.fused_step import FusedStep, StepKind
from ..speculative.step.late_rows import LateRows
from .graph_self_test import SEED

NUM_TOKENS = 8  # of random histories; a vocabulary has at least as many
# By kind: the first two are free draws, the next two are ranked, the rest need edited logits.
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, min_p=0.01),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(
        temperature=0.0,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={7: 99.0, 9: 50.0},
        logprobs=3,
    ),
    SamplingParams(temperature=1.0, presence_penalty=0.5, logit_bias={1: 2.0, 5: -3.0}, min_new_tokens=3),
)


class TrialRequests:
    """Up to `count` requests of steps of `kind`, or as many as the pool can hold; one always fits.

    `slots` are theirs in the state of `step`. They can take `num_steps` steps. With `late`, requests have up
    to `late.num_rows` late rows, of random features and tokens.
    """

    def __init__(
        self, step: FusedStep, kind: StepKind, count: int, late: LateRows | None = None, *, num_steps: int = 1
    ) -> None:
        self.kind = kind
        self._num_steps = num_steps
        self._step = step
        self._late = late
        self._joining = self._made(count)
        self._num_lent_before = step.runner.pool.num_lent
        step.runner.pool.lend(self._joining[-1].pages[-1])
        self.slots = tuple(step.state.open() for _ in self._joining)
        step.state.write(self.slots, self._joining)
        if late is not None:
            for i, (slot, each) in enumerate(zip(self.slots, self._joining, strict=True)):
                step.state.integers[slot, LATE] = min(each.length, late.num_rows - i % (late.num_rows + 1))
            self._randomize(late.anchors)
        edits = step.state.edit_anchors if kind.is_edited else ()
        self._states = (*step.state.anchors, *edits)
        self._initial = tuple(values.clone() for values in self._states)

    def rewind(self) -> None:
        """Writes the initial states of all requests, those of the drafter included. KV stays as it is."""
        for values, initial in zip(self._states, self._initial, strict=True):
            values.copy_(initial)
        if self._step.drafter is not None:
            self._randomize(self._step.drafter.anchors)

    def fill(self, count: int) -> None:
        """Writes the KV of the first `count` requests, equally at each call."""
        generator = torch.Generator(self._step.state.device)
        for kv in self.pages(count):
            fill_normal(kv, generator.manual_seed(SEED))

    def pages(self, count: int) -> list[torch.Tensor]:
        """The KV of all pages of the first `count` requests in each pool."""
        end = max(each.pages[-1] for each in self._joining[:count]) + 1
        pools = [self._step.runner.pool, *draft_pools(self._step.drafter)]
        return [part for pool in pools for part in pool.memory_of(end)]

    def draft_states(self, count: int) -> list[torch.Tensor]:
        """The rows of the first `count` requests in each tensor of the drafter's states."""
        drafter, rows = self._step.drafter, [each.draft_row for each in self._joining[:count]]
        return [] if drafter is None else [values[rows] for values in drafter.anchors]

    def close(self) -> None:
        """Lets all requests leave, and zeroes what they wrote."""
        drafter = self._step.drafter
        for slot, each in zip(self.slots, self._joining, strict=True):
            self._step.state.close(slot)
            if drafter is not None:
                drafter.close(each.draft_row)
        for kv in self.pages(len(self.slots)):
            kv.zero_()
        self._step.runner.pool.lend(self._num_lent_before)
        for values in (*(() if drafter is None else drafter.anchors), *self._late_anchors()):
            values.zero_()

    def _late_anchors(self) -> Sequence[torch.Tensor]:
        return () if self._late is None else self._late.anchors

    def _made(self, count: int) -> list[RequestInit]:
        """`count` requests with several context lengths, or as many as the pool can hold."""
        pool, found, next_page, kind = self._step.runner.pool, list[RequestInit](), 1, self.kind
        drafter, spare = self._step.drafter, kind.shape.spare_slots * self._num_steps
        spread = max(min(2 * pool.page_size, self._step.max_context - spare), 1)
        for i in range(count):
            length = 1 + i * 5 % spread
            # One request always fits.
            num_pages = min(pages_for(length + spare, pool.page_size), pool.num_lendable)
            if next_page + num_pages > pool.num_lendable + 1:
                break
            params = PARAMS[(i + 4) % 6 if kind.is_edited else i % (4 if kind.is_ranked else 2)]
            found.append(
                RequestInit(
                    newest=i,
                    length=length,
                    remaining=spare,
                    capacity=min(num_pages * pool.page_size, self._step.max_context),
                    draft_row=PAD_ROW if drafter is None else drafter.open(),
                    pages=range(next_page, next_page + num_pages),
                    row=SamplingRow(
                        params=replace(params, seed=i),
                        position=length + 1,
                        prompt_ids=range(0, 32, 3),
                        output_ids=range(0, 32, 5),
                        ends=[2, 3],
                        first_end=length + 2,
                    ),
                )
            )
            next_page += num_pages
        return found

    def _randomize(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills states of a drafter, equally at each call."""
        generator = torch.Generator(self._step.state.device)
        for values in tensors:
            generator.manual_seed(SEED)
            if values.is_floating_point():
                values.normal_(generator=generator)
            else:  # tokens, few of them so that some repeat, or numbers of rows
                values.random_(0, NUM_TOKENS, generator=generator)

    def __repr__(self) -> str:
        return f"<TrialRequests {len(self.slots)} of {self.kind}>"
