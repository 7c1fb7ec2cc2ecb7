"""The drafter of a decode engine: its own KV pool under the target's page ids, batched draft, prefill and extend.

Draft row i is written from the target's features of position i and the token at i+1. Chain rows are guesses and are
overwritten by `extend` with rows made from true features before anything can depend on them.
Shape legend: B requests, N rows each, T rows, H draft hidden, Ht target hidden, K features, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...attention import PagedAttention, plan
from ...errors import CheckpointError, LifecycleError, UnsupportedInput
from ...forward_batch import CaptureHidden, ForwardBatch, ForwardMode
from ...graphs.family import EAGER, PathDecision
from ...host_copy import to_device
from ...kv_pool import KVPool
from ...padding import pad_rows
from ...page_table import build_page_table, pages_for, slots_for
from ...sampling.params import SamplingParams
from ...sampling.sampler import propose
from ..chain import ChainPlan, chain_batch
from ..draft_graph_set import DraftGraphs
from ..drafting.choice import DraftSampling
from ..drafting.shape import DraftShape
from ..drafting.tree import DraftTree, grow_tree
from .eagle3_head import DraftPhase, Eagle3Head
from .idle import idle_draft_batch
from .states import DraftStates

MAX_PREFILL_ROWS = 512  # rows of one draft prefill that a graph is captured for


@dataclass(frozen=True, kw_only=True)
class DraftPrefill:
    """Rows [start, start + len(next_ids)) of one request.

    `next_ids[k]` is the token at start+k+1, `features` `[len(next_ids), K*Ht]`. `state_row` is written when `is_final`,
    that is when the last row is the newest one and so predicts the first draft token.
    """

    pages: Sequence[int]
    start: int
    next_ids: Sequence[int]
    features: torch.Tensor
    state_row: int
    is_final: bool

    @property
    def end(self) -> int:
        return self.start + len(self.next_ids)


class DraftWorker:
    """Runs an EAGLE3 head whose embedding and lm_head have been shared; owns draft KV and per-request draft states.

    Draft row i depends on the token at i+1: whoever shares pages between requests shares a page only where the token
    behind it is the same, too. Every forward has a multiple of `row_multiple` rows, the missing ones idle; a prefill of
    nothing runs only where that is more than 1.
    """

    def __init__(
        self,
        head: Eagle3Head,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int = 64,
        row_multiple: int = 1,
    ) -> None:
        config = head.config
        if not head.is_shared:
            raise LifecycleError(
                "a drafter needs the target's embedding and lm_head, which are shared before"
            )
        for name, given in (("head", head.dtype), ("draft KV", dtype)):
            if str(given) != f"torch.{config.dims.self_dtype}":
                raise CheckpointError(
                    f"{name} in {given}, but {config.path} was resolved for {config.dims.self_dtype}"
                )
        self.row_multiple = row_multiple
        self.head = head
        self.page_size = page_size
        self.device = torch.device(device)
        self.pool = KVPool(num_pages, page_size, 1, config.num_kv_heads, config.head_dim, dtype, device)
        self.states = DraftStates(capacity, config.hidden_size, config.draft_vocab_size, dtype, device)
        self.graphs: DraftGraphs | None = None
        self._attention = PagedAttention(self.pool)

    @property
    def feature_width(self) -> int:
        """K*Ht, the width of every feature row handed in."""
        return self.head.config.dims.target_feature_width

    @torch.no_grad()
    def prefill(self, items: Sequence[DraftPrefill]) -> None:
        """Write the draft KV of all rows of `items`, and the states of the final ones. Rows of 0 items are fine."""
        items = [item for item in items if item.next_ids]
        if not items:
            if self.row_multiple > 1:
                dims = self.head.config.dims
                self.prefill_rows(idle_draft_batch(dims, DraftPhase.FROM_TARGET_FEATURES, device=self.device))
            return
        batch = self._prefill_batch(items)
        out = self.prefill_rows(batch)
        ends = torch.tensor([len(item.next_ids) for item in items]).cumsum(0) - 1
        final = [i for i, item in enumerate(items) if item.is_final]
        if final:
            rows = torch.tensor([items[i].state_row for i in final])
            self._remember(to_device(rows, self.device), out[to_device(ends[final], self.device)])

    @torch.no_grad()
    def prefill_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """The layer's output `[T, H]` for rows made from target features, by graph or as `batch.decision` says."""
        graphs, padded = self.graphs, pad_rows(batch, self.row_multiple)
        if batch.decision is None:
            batch.decision = EAGER if graphs is None else graphs.prefill.decide(padded)
        if graphs is None or not batch.decision.is_graph:
            return self._forward(batch, DraftPhase.FROM_TARGET_FEATURES)
        attend = self._attention.bind(plan(padded, self.page_size))
        return graphs.prefill.run(padded, attend, batch.decision)[: batch.num_tokens]

    def _prefill_batch(self, items: Sequence[DraftPrefill]) -> ForwardBatch:
        for item in items:
            self._check_features(item.features, len(item.next_ids))
        tables = [item.pages[: pages_for(item.end, self.page_size)] for item in items]
        ids = [token for item in items for token in item.next_ids]
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=to_device(torch.tensor(ids, dtype=torch.int64), self.device),
            positions=to_device(
                torch.cat([torch.arange(item.start, item.end) for item in items]), self.device
            ),
            slots=to_device(
                torch.cat([slots_for(i.pages, i.start, i.end, self.page_size) for i in items]), self.device
            ),
            page_table=build_page_table(tables, self.device),
            q_lens=[len(item.next_ids) for item in items],
            kv_lens=[item.end for item in items],
            capture_hidden=CaptureHidden.LAST,
            features=torch.cat([item.features.to(self.device) for item in items]),
        )

    @torch.no_grad()
    def propose(
        self,
        chain: ChainPlan,
        state_rows: torch.Tensor,
        slots: torch.Tensor,
        params: Sequence[SamplingParams],
    ) -> torch.Tensor:
        """Draft N-1 tokens per request, target ids `[B, N-1]`; N-2 forwards, for the first proposal is remembered.

        `state_rows` `[B]` int64; `slots` `[B, N]` where draft KV may be written (slot 0: nowhere).
        """
        return self.draft_rows(
            chain, slots, (self.states.hidden[state_rows], self.states.logits[state_rows]), params
        )

    @torch.no_grad()
    def draft_rows(
        self,
        chain: ChainPlan,
        slots: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        params: Sequence[SamplingParams],
        decision: PathDecision | None = None,
    ) -> torch.Tensor:
        """`propose` from a `state` of hidden `[B, H]` and logits `[B, Vd]`, by graph or as `decision` says."""
        loop = None if self.graphs is None else self.graphs.loop_of(chain.num_rows)
        if decision is None:
            decision = EAGER if loop is None else loop.decide(chain)
        if loop is not None and decision.is_graph:
            return loop.run(chain, slots, state, params, decision)
        hidden, logits = state
        drafts = [self._choose(logits, params, chain.positions[:, 0] + 1)]
        for step in range(1, chain.num_rows - 1):
            batch = chain_batch(
                chain,
                drafts[-1][:, None],
                mode=ForwardMode.DECODE,
                first=step - 1,
                slots=slots[:, step - 1 : step],
                capture=CaptureHidden.LAST,
                features=hidden,
            )
            out = self._forward(batch, DraftPhase.SELF_CHAIN)
            hidden = self.head.feedback(out)
            drafts.append(self._choose(self.head.compute_logits(out), params, chain.positions[:, step] + 1))
        return torch.stack(drafts, dim=1)

    @torch.no_grad()
    def propose_tree(
        self,
        shape: DraftShape,
        plan: ChainPlan,
        state_rows: torch.Tensor,
        slots: torch.Tensor,
        params: Sequence[SamplingParams],
    ) -> DraftTree:
        """Draft a tree of `shape` per request; arguments as of `propose`, with `plan` and `slots` of all spare rows."""
        state = self.states.hidden[state_rows], self.states.logits[state_rows]
        return self.tree_rows(shape, plan, slots, state, params)

    @torch.no_grad()
    def tree_rows(
        self,
        shape: DraftShape,
        plan: ChainPlan,
        slots: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        params: Sequence[SamplingParams],
        decision: PathDecision | None = None,
    ) -> DraftTree:
        """`propose_tree` from a `state` of hidden `[B, H]` and logits `[B, Vd]`, by graph or as `decision` says."""
        loop = None if self.graphs is None else self.graphs.tree
        if decision is None:
            decision = EAGER if loop is None else loop.decide(plan)
        if loop is not None and decision.is_graph:
            return loop.run(plan, slots, state, params, decision)
        sampling = DraftSampling(plan.num_requests, self.device)
        sampling.load(params)

        def forward(
            level: int, hidden: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor
        ) -> torch.Tensor:
            first, shared = (level - 1) * shape.topk, (plan.num_requests, shape.topk)
            batch = chain_batch(
                plan,
                tokens.view(shared),
                mode=ForwardMode.DECODE,
                first=first,
                slots=slots[:, first : first + shape.topk],
                positions=plan.positions[:, level - 1 : level].expand(shared),
                tree_mask=mask,
                capture=CaptureHidden.LAST,
                features=hidden,
            )
            return self._forward(batch, DraftPhase.SELF_CHAIN)

        return grow_tree(shape, self.head, sampling, state, plan.positions[:, 0] + 1, forward)

    @torch.no_grad()
    def first_proposals(
        self,
        shape: DraftShape,
        positions: torch.Tensor,
        state_rows: torch.Tensor,
        params: Sequence[SamplingParams],
    ) -> torch.Tensor:
        """What `shape` would draft for `positions` `[B]`, one position behind the newest token; target ids `[B, topk]`."""
        sampling = DraftSampling(len(params), self.device)
        sampling.load(params)
        logits, target_ids = self.states.logits[state_rows], self.head.target_ids
        ids, _ = sampling.rank(logits, positions, target_ids, shape.topk, len(params))
        return target_ids[ids]

    def _choose(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: torch.Tensor
    ) -> torch.Tensor:
        """Target ids `[B]`, chosen with the noise that the target's sampler will use for `positions` `[B]`."""
        return self.head.target_ids[propose(logits, params, positions, self.head.target_ids)]

    @torch.no_grad()
    def extend(
        self,
        chain: ChainPlan,
        state_rows: torch.Tensor,
        slots: torch.Tensor,
        next_ids: torch.Tensor,
        features: torch.Tensor,
        accept_len: torch.Tensor,
    ) -> None:
        """Rewrite all N rows per request from true `features` `[B*N, K*Ht]` and the target's tokens `next_ids` `[B,
        N]`.

        The state of each request becomes that of its row `accept_len - 1`; rows behind it are junk until overwritten.
        """
        self._check_features(features, next_ids.numel())
        batch = chain_batch(
            chain,
            next_ids,
            mode=ForwardMode.DRAFT_EXTEND,
            slots=slots,
            capture=CaptureHidden.LAST,
            features=features,
        )
        self.states.write(state_rows, *self.extend_rows(batch, accept_len))

    @torch.no_grad()
    def extend_rows(self, batch: ForwardBatch, accept_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden `[B, H]` and logits `[B, Vd]` of row `accept_len - 1`, by graph or as `batch.decision` says."""
        count = batch.num_requests
        extend = None if self.graphs is None else self.graphs.extend_of(batch.q_lens[0] if count else 0)
        if batch.decision is None:
            batch.decision = EAGER if extend is None else extend.decide(batch)
        if extend is not None and batch.decision.is_graph:
            return extend.run(batch, accept_len, batch.decision)
        out = self._forward(batch, DraftPhase.FROM_TARGET_FEATURES)
        offsets = torch.arange(count, device=self.device) * (batch.num_tokens // max(count, 1))
        last = out[offsets + accept_len - 1]
        return self.head.feedback(last), self.head.compute_logits(last)

    def _forward(self, batch: ForwardBatch, phase: DraftPhase) -> torch.Tensor:
        padded = pad_rows(batch, self.row_multiple)
        if padded.input_embeds is not None:
            raise UnsupportedInput(
                "a draft head takes no input_embeds: its hidden input are the target's features"
            )
        assert padded.features is not None
        attend = self._attention.bind(plan(padded, self.page_size))
        out = self.head.forward(padded.features, padded.input_ids, padded.positions, attend, phase)
        return out[: batch.num_tokens]

    def _remember(self, state_rows: torch.Tensor, out_rows: torch.Tensor) -> None:
        self.states.write(state_rows, self.head.feedback(out_rows), self.head.compute_logits(out_rows))

    def _check_features(self, features: torch.Tensor, rows: int) -> None:
        if tuple(features.shape) != (rows, self.feature_width) or features.dtype != self.head.dtype:
            raise ValueError(
                f"features of shape {list(features.shape)} {features.dtype} for {rows} rows: the head at "
                f"{self.head.config.path} takes [{rows}, {self.feature_width}] {self.head.dtype}"
            )

    def __repr__(self) -> str:
        return f"<DraftWorker {self.states.num_open} requests, {self.pool!r}>"
