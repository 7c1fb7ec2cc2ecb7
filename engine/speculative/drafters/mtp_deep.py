"""The drafter of several MTP modules, each of which proposes one token in the pass that ends a step.

Rows written from guesses are written again by the window of `mtp_window`. Shape legend: B requests, R rows
that a step verifies, H hidden, K modules.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...host_copy import arrays_to_device, to_device
from ...kv.page_table import build_page_table, pages_for
from ...sampling.params import SamplingParams
from ...sampling.tensors import SamplingTensors
from ..drafting.choice import DraftSampling
from ..drafting.shape import DraftShape
from ..drafting.verify import AcceptResult
from .mtp_head import MtpHead
from .mtp_prefill import MtpDrafter, look_ahead
from .mtp_states import FrontStates
from .mtp_window import draft_window, front_window, newest_rows, plan_modules
from .protocol import DraftPrefill, DraftView, Proposal
from .states import PAD_ROW

GREEDY = SamplingParams(temperature=0.0)


class DeepMtpDrafter(MtpDrafter):
    """K modules with KV of their own; module k proposes draft k+1, all in the pass that ends a step.

    A prompt's rows near its end are written before their tokens are known. The host keeps, for each request,
    how many of its first rows are final in all modules, and computes the others again with the next rows.
    """

    states: FrontStates

    def __init__(
        self, head: MtpHead, *, num_pages: int, page_size: int, capacity: int = 64, row_multiple: int = 1
    ) -> None:
        assert head.num_modules > 1, head
        super().__init__(head, num_pages=num_pages, page_size=page_size, row_multiple=row_multiple)
        width = head.config.dims.target_feature_width
        self.states = FrontStates(capacity, head.num_modules, width, head.dtype, self.device)
        # (rows that are final in all modules, rows written), by state row, while a prompt is prefilled
        self._written: dict[int, tuple[int, int]] = {}

    @property
    def anchors(self) -> tuple[torch.Tensor, ...]:
        return self.states.tensors

    def open(self) -> int:
        row = super().open()
        self._written.pop(row, None)
        return row

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        """Implements `Drafter.propose` without a forward: the drafts are remembered."""
        return Proposal(self.states.drafts.index_select(0, view.states)[:, : shape.steps], None)

    def first_proposals(self, view: DraftView, topk: int) -> torch.Tensor:
        assert topk == 1, f"{topk} first proposals of modules that make one each"
        return self.states.drafts.index_select(0, view.states)[:, :1]

    def observe(
        self,
        view: DraftView,
        features: torch.Tensor,
        accepted: AcceptResult,
        emitted: torch.Tensor,
        shape: DraftShape,
    ) -> None:
        """Implements `Drafter.observe` in one forward of each module over K-1+R rows per request."""
        count, num_requests, states = shape.num_path, view.lens.shape[0], self.states
        self._check_features(features, num_requests * count)
        window = front_window(states, view.states, view.lens, view.page_table, self.pool).followed_by(
            features.view(num_requests, count, -1),
            accepted.tokens[:, :count],
            view.positions[:, :count],
            view.kv_rows[:, :count],
        )
        window = window._replace(select=window.select + emitted)
        attends = plan_modules(
            self.pool,
            window,
            view.page_table,
            view.extend_lens,
            self.head.num_modules,
            is_recorded=view.is_recorded,
        )
        drafts = draft_window(self.head, window, attends, view.sampling)
        # A request without a new token keeps its state, because its output rows are undefined.
        kept = torch.where(emitted > 0, view.states, PAD_ROW)
        counts = (states.counts.index_select(0, view.states) + emitted).clamp(max=states.num_front)
        states.write_front(
            kept,
            newest_rows(window.hidden, emitted, states.num_front),
            newest_rows(window.tokens, emitted, states.num_front),
            counts,
        )
        states.drafts.index_copy_(0, kept, drafts)

    def _with_dirty_rows(self, item: DraftPrefill) -> tuple[int, torch.Tensor]:
        features = item.features.to(self.device)
        final, end = self._written.get(item.state_row, (item.start, item.start))
        first = min(item.start, final)
        if not first < item.start <= end:
            return item.start, features
        offset = end - self.states.num_front  # of the first row that the state holds
        again = self.states.hidden[item.state_row, first - offset : item.start - offset]
        return first, torch.cat((again, features))

    def _remember(
        self,
        items: Sequence[DraftPrefill],
        widened: Sequence[tuple[int, torch.Tensor]],
        out: torch.Tensor,
    ) -> None:
        """Keeps the newest rows of all items, and drafts behind the final ones."""
        most, depth = self.states.num_front, self.head.num_modules
        hidden, tokens, counts = [], [], []
        for item, (first, features) in zip(items, widened, strict=True):
            count = min(most, item.end - first)
            held = features[features.shape[0] - count :]
            hidden.append(torch.nn.functional.pad(held, (0, 0, most - count, 0)))
            behind = look_ahead(item, item.end - count, 1)[:, 0]
            tokens.append(np.pad(behind, (most - count, 0)))
            counts.append(count)
            if item.state_row != PAD_ROW:
                num_known = len(item.known_ids) or item.end + 1
                final = max(first, min(item.end, num_known - depth))
                self._written[item.state_row] = final, item.end
        state_rows = [item.state_row for item in items]
        host = (np.array(state_rows, dtype=np.int64), np.stack(tokens), np.array(counts, dtype=np.int64))
        rows, newest, num_newest = arrays_to_device(host, self.device)
        self.states.write_front(rows, torch.stack(hidden), newest, num_newest)
        ended = [item for item in items if item.is_final]
        if ended:
            self._draft_first(ended)

    def _draft_first(self, items: Sequence[DraftPrefill]) -> None:
        """The proposals behind whole prompts: all modules once more over the front rows."""
        tables = [item.pages[: pages_for(item.end, self.page_size)] for item in items]
        page_table = build_page_table(tables, self.device)
        rows, lens = (
            to_device(torch.tensor(values), self.device)
            for values in ([item.state_row for item in items], [item.end for item in items])
        )
        window = front_window(self.states, rows, lens, page_table, self.pool)
        attends = plan_modules(self.pool, window, page_table, lens, self.head.num_modules, is_recorded=False)
        params = [item.params or GREEDY for item in items]
        chosen = SamplingTensors.of(params, self.head.config.layer.vocab_size, self.device)
        sampling = DraftSampling(seeds=chosen.seeds, temperature=chosen.temperature, is_drawn=chosen.is_drawn)
        self.states.drafts.index_copy_(0, rows, draft_window(self.head, window, attends, sampling))
