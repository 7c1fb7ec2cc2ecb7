"""Runs a target model over batches of rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch

from ..attention.backend import AttentionBackend
from ..attention.metadata import AttentionMetadata
from ..attention.registry import INVARIANT, attention_for
from ..batch.forward_batch import CaptureHidden, ForwardBatch, ForwardOutput, StepCounters
from ..batch.padding import idle_batch, pad_rows, pad_to
from ..errors import CheckpointError, LifecycleError, UnsupportedInput
from ..graphs.bucketed_graphs import EAGER, PathDecision
from ..graphs.graph_pool import GraphKind
from ..kv.pool import KVPool
from ..models.interface import AuxCapture, CausalLM, InputEmbeds
from ..parallel.lockstep import PromptRows, Rounds
from .expert_counts import ExpertCounts
from .routed_experts import RoutedExperts
from .target_graphs import Hidden, PrefillGraphs, captured_mode, finished_rows, hidden_of, is_short

LayerP = ParamSpec("LayerP")
LayerT = TypeVar("LayerT")


class ModelRunner:
    """A target model over its KV pool. Every result is a ForwardOutput that owns its tensors.

    `on_layer` is called before each attention that runs as Python, so that a long forward can report
    progress. Captured `graphs` run the batches that fit them. Every batch is padded with idle rows to a
    multiple of `row_multiple`; results hold the batch's own rows only. `max_context` as in `PagedAttention`.
    `is_invariant`: attention is batch-invariant, as the operations of `model` then should be. With `rounds`
    each forward is one of all ranks, and batches are padded to the rows that these agree on.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        on_layer: Callable[[], None] | None = None,
        *,
        row_multiple: int = 1,
        max_context: int = 0,
        is_invariant: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self.is_invariant = is_invariant
        self.attention: AttentionBackend = attention_for(
            pool, INVARIANT if is_invariant else "", max_context=max_context
        )
        self.counters = StepCounters()
        self.on_layer = on_layer
        self.row_multiple = row_multiple
        self.graphs: PrefillGraphs | None = None
        self.expert_counts: ExpertCounts | None = None
        self.routed_experts: RoutedExperts | None = None
        self.rounds: Rounds | None = None

    def set_aux_layer_ids(self, ids: Sequence[int]) -> None:
        """Configure the layer outputs that the model captures.

        Raises CheckpointError for a model class without that hook.
        """
        configure_aux_capture(self.model, ids)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, metadata: AttentionMetadata | None = None) -> ForwardOutput:
        """Store the batch's KV and return the logits of `batch.logit_rows` (None: of every row).

        Unless `batch.capture_hidden` is NULL, `hidden` `[T, K*H]` holds the captured layer outputs of every
        row. `metadata` is planned here unless given.

        Raises LifecycleError if `metadata` belongs to another version of the batch, if hidden rows are
        requested and no layers are configured, if the model returns other layers, or if experts are wanted
        and not kept. Raises UnsupportedInput for `input_embeds` that the model does not accept.
        """
        aux_ids = self._aux_ids(batch.capture_hidden)
        self._check_embeds(batch)
        if self.expert_counts is not None:
            self.expert_counts.begin(sum(batch.q_lens))
        if self.rounds is not None:
            count = batch.num_tokens if batch.logit_rows is None else len(batch.logit_rows)
            num_rows = batch.num_tokens
            if self.graphs is not None:
                num_rows = self.graphs.common_rows(num_rows)
            found = self.rounds.prompts(PromptRows(num_rows, count))
            return self._forward_with_others(self.rounds, found, batch, metadata)
        decision, real_rows = self.decide(batch), batch.num_tokens
        padded = pad_rows(batch, self.row_multiple)
        if self.routed_experts is not None:
            self.routed_experts.begin(padded.num_tokens)
        if metadata is not None:
            metadata.check(padded.num_tokens)
        path, computed = self._run(padded, metadata, decision, aux_ids)
        attended, hidden, features = (None if x is None else x[:real_rows] for x in computed)
        assert hidden is not None, "every model has a residual stream"
        rows = finished_rows(self.model, (attended, hidden, features), batch.logit_rows)
        return self._output(batch, path, rows, features)

    def run_idle(self) -> None:
        """This rank's part of a forward for which it has no rows, if others run one."""
        assert self.rounds is not None, "a rank alone has no idle forwards"
        found = self.rounds.prompts(PromptRows())
        if found.rows:
            batch = idle_batch(self.pool.device, captured_mode(self.model))
            if self.expert_counts is not None:
                self.expert_counts.begin(0)
            with torch.no_grad():
                self._forward_with_others(self.rounds, found, batch, None)

    def _forward_with_others(
        self, rounds: Rounds, found: PromptRows, batch: ForwardBatch, metadata: AttentionMetadata | None
    ) -> ForwardOutput:
        """As `forward`, with as many rows in each layer as all ranks have agreed on.

        A rank may run eagerly what another replays: layers have the same rows, and collectives the same
        order.
        """
        rounds.agreed(found.rows)
        padded = pad_to(batch, found.rows)
        if self.routed_experts is not None:
            self.routed_experts.begin(padded.num_tokens)
        decision = batch.decision = EAGER if self.graphs is None else self.graphs.decide(padded)
        if decision.is_graph:
            rounds.rows.check(decision.bucket)
        if metadata is not None:
            metadata.check(padded.num_tokens)
        path, computed = self._run(padded, metadata, decision, self._aux_ids(batch.capture_hidden))
        own, device = batch.logit_rows, self.pool.device
        own = torch.arange(batch.num_tokens, device=device) if own is None else own
        if self.expert_counts is not None:
            self.expert_counts.begin(len(own))
        rounds.agreed(found.selected)
        selected = torch.nn.functional.pad(own, (0, found.selected - len(own)))
        rows = finished_rows(self.model, computed, selected)[: len(own)]
        return self._output(batch, path, rows, computed[2])

    def _output(
        self, batch: ForwardBatch, path: str, rows: torch.Tensor, features: torch.Tensor | None
    ) -> ForwardOutput:
        """The result for the rows of `batch`, of which `rows` `[R, H]` get logits."""
        features = None if features is None else features[: batch.num_tokens]
        if batch.capture_hidden:
            self._check_features(features, batch.num_tokens)
        self.counters.count(path)
        if self.pool.order.is_checked:
            self.pool.note_use(
                batch.page_table.flatten().tolist(), (batch.slots // self.pool.page_size).tolist()
            )
        return ForwardOutput(
            path=path,
            logits=self.model.compute_logits(rows),
            hidden=features if batch.capture_hidden else None,
            experts=self._experts(batch.num_tokens) if batch.wants_experts else None,
        )

    def _experts(self, num_rows: int) -> torch.Tensor:
        if self.routed_experts is None:
            raise LifecycleError("experts of rows are asked for, but keep_experts was not called")
        return self.routed_experts.rows(num_rows)

    def decide(self, batch: ForwardBatch) -> PathDecision:
        """The path of `batch` as it is now. The decision is made once and stays with the batch."""
        if batch.decision is None:
            batch.decision = (
                EAGER if self.graphs is None else self.graphs.decide(pad_rows(batch, self.row_multiple))
            )
        return batch.decision

    def _run(
        self,
        batch: ForwardBatch,
        metadata: AttentionMetadata | None,
        decision: PathDecision,
        aux_ids: tuple[int, ...],
    ) -> tuple[str, Hidden]:
        """The path that ran, and what it gave."""
        graphs = self.graphs if decision.is_graph else None
        if graphs is not None and graphs.whole is not None and decision.kind is GraphKind.WHOLE_PREFILL:
            return "graph", graphs.whole.run(batch, decision)
        metadata = self._planned(batch, aux_ids) if metadata is None else metadata
        if graphs is not None:
            read = self._telling(self.attention.bind_reads(metadata))
            return "breakable", graphs.run(batch, read, decision)
        embeds = self.model.embed(batch.input_ids) if batch.input_embeds is None else batch.input_embeds
        attend = self._telling(self.attention.bind(metadata))
        return "eager", hidden_of(self.model, embeds, batch.positions, attend, aux_ids)

    def _planned(self, batch: ForwardBatch, aux_ids: tuple[int, ...]) -> AttentionMetadata:
        """The attention plan of `batch`, whose last layer attends to nothing if no row is read behind it."""
        metadata, last = self.attention.plan(batch), self.model.config.num_layers - 1
        is_read = batch.logit_rows is None or len(batch.logit_rows)
        return metadata if is_read or not is_short(self.model, aux_ids) else replace(metadata, unread=last)

    def _check_embeds(self, batch: ForwardBatch) -> None:
        embeds = batch.input_embeds
        if embeds is None:
            return
        name = type(self.model).__name__
        if not (isinstance(self.model, InputEmbeds) and self.model.takes_input_embeds):
            raise UnsupportedInput(f"{name} takes no input_embeds; send token ids")
        wanted = (batch.num_tokens, self.model.config.hidden_size)
        if tuple(embeds.shape) != wanted or embeds.dtype != self.model.dtype:
            raise UnsupportedInput(
                f"input_embeds {list(embeds.shape)} {embeds.dtype}: {name} takes {list(wanted)} "
                f"{self.model.dtype} here"
            )

    def _check_features(self, features: torch.Tensor | None, rows: int) -> None:
        """Raises LifecycleError unless the model returned all configured layers; fewer would be misread as
        all of them.
        """
        ids = self._aux_ids(CaptureHidden.FULL)
        wanted = (rows, len(ids) * self.model.config.hidden_size)
        if features is None or tuple(features.shape) != wanted:
            got = "none" if features is None else list(features.shape)
            raise LifecycleError(
                f"features of layers {list(ids)} are {list(wanted)}, but the forward captured {got}"
            )

    def _telling(self, attention: Callable[LayerP, LayerT]) -> Callable[LayerP, LayerT]:
        """`attention` of a layer, behind a call of `on_layer`."""
        on_layer = self.on_layer
        if on_layer is None:
            return attention

        def tell_and_attend(*args: LayerP.args, **kwargs: LayerP.kwargs) -> LayerT:
            on_layer()
            return attention(*args, **kwargs)

        return tell_and_attend

    def _aux_ids(self, capture: CaptureHidden) -> tuple[int, ...]:
        if capture == CaptureHidden.NULL:
            return ()
        if not isinstance(self.model, AuxCapture) or not self.model.aux_layer_ids:
            raise LifecycleError(
                f"{type(self.model).__name__}: hidden rows are asked for, but no aux layer ids are "
                "configured; "
                "call set_aux_layer_ids first"
            )
        return self.model.aux_layer_ids

    def __repr__(self) -> str:
        return f"<ModelRunner {self.model!r}, {self.pool!r}, forwards {self.counters.forwards}>"


def configure_aux_capture(model: CausalLM, ids: Sequence[int]) -> None:
    """Choose the layer outputs that `model` captures for a drafter.

    Raises CheckpointError for a class that cannot capture.
    """
    if not isinstance(model, AuxCapture):
        raise CheckpointError(
            f"{type(model).__name__} cannot capture layer outputs (it has no set_aux_layer_ids), so aux "
            "layer ids "
            f"{list(ids)} cannot be served; start without a draft"
        )
    model.set_aux_layer_ids(ids)
