"""Finds every kernel variant that serving can launch, by a dry run of forwards on fake tensors.

A variant depends on dtypes, strides and tile sizes, never on values. Tiles grow by powers of two. So the dry
run takes one forward for each power of two. Nothing is computed or allocated.

Legend: Q new rows of a request, B requests.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.latent_store import is_latent
from ...kernels.triton_jit import ALIGNMENT, Launch, planned_launches
from ..attention.metadata import MAX_UNIFORM_ROWS
from ..batch.forward_batch import ForwardBatch
from ..graphs.breakable import Breaks
from ..graphs.token_graphs import AttendContext, read_nothing
from ..kv.page_table import pages_for
from ..models.interface import CausalLM
from ..models.layers import Attend
from ..runner.model_runner import ModelRunner
from ..runner.target_graphs import aux_ids_of, body_of, bridge_of
from ..sampling.choose import choose_tokens
from ..sampling.edits import LogitEdits, edit_logits
from ..sampling.logprobs import top_logprobs
from ..sampling.tensors import SamplingTensors
from ..speculative.drafters.protocol import MAX_PREFILL_ROWS, Drafter, DraftPrefill, reads_features
from ..speculative.drafters.states import PAD_ROW
from ..speculative.drafting.shape import DraftShape
from ..speculative.step.fused_step import FusedStep, StepContext, StepKind
from ..speculative.step.step_graphs import StepGraphs

SHORT_PREFIX = 100  # tokens: enough for a few splits of a context
NUM_LAYERS = 2  # the first layer has no residual to add; all further ones launch the same kernels


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The largest sizes that an engine's role can reach.

    `prompt_rows`: rows of one forward over prompts. `max_prompts`: prompts in it. `max_requests`: requests of
    a decode step. `max_context` and `page_size` in tokens. `eager_shapes`: draft shapes that run without a
    graph beside those of the steps' kinds.
    """

    prompt_rows: int
    max_prompts: int
    max_requests: int
    max_context: int
    page_size: int
    eager_shapes: tuple[DraftShape, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExtendShape:
    """New rows of each request, behind `prefix` tokens that are computed already."""

    q_lens: tuple[int, ...]
    prefix: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.q_lens)


def sizes(most: int) -> list[int]:
    """One size from 1 to `most` for each tile that fits it: the powers of two, and `most`."""
    found = {*(1 << bit for bit in range(max(most, 1).bit_length())), most}
    return sorted(size for size in found if 1 <= size <= most)


def row_counts(most: int) -> list[int]:
    """As `sizes`, for the rows of a forward: experts may be joined for three rows and not for four, or
    neither joined for five nor grouped.
    """
    return sorted({*sizes(most), min(3, most), min(5, most)})


def extend_shapes(rows: int, prompts: int, max_context: int) -> Iterator[ExtendShape]:
    """Batches of up to `rows` new rows of up to `prompts` requests, one for each variant of attention.

    A single prompt, equally short prompts and prompts of different lengths take different kernels, and so do
    short and long contexts.
    """
    for count in sizes(min(rows, max_context)):
        is_short, most = count <= MAX_UNIFORM_ROWS, max_context - count
        for prefix in sorted({0, min(SHORT_PREFIX, most), most} if is_short else {0, most}):
            yield ExtendShape(q_lens=(count,), prefix=prefix)
        for prefix in sorted({0, most}):
            if 1 < count < rows and prompts > 1:
                yield ExtendShape(q_lens=(count, 1), prefix=prefix)
            for requests in sorted({2, prompts} if is_short else {}):
                if 1 < requests <= prompts and count * requests <= rows:
                    yield ExtendShape(q_lens=(count,) * requests, prefix=prefix)
    for total in sizes(min(rows, prompts * max_context)):
        if total > max_context:  # only several prompts have so many rows together
            whole, rest = divmod(total, max_context)
            yield ExtendShape(q_lens=(max_context,) * whole + (rest,) * (rest > 0))


class VariantPlanner:
    """Dry runs of one engine's forwards. `runner`, `drafter` and `steps` are the engine's own."""

    def __init__(
        self, runner: ModelRunner, drafter: Drafter | None, steps: StepGraphs | None, reach: Reach
    ) -> None:
        self.runner = copy.copy(runner)
        self.runner.model = first_layers(runner.model)
        self.runner.graphs = None
        self.drafter = drafter
        self.steps = steps
        self.reach = reach

    @torch.no_grad()
    def launches(self) -> list[Launch]:
        """One launch of each variant that serving can reach, in the order of their first use."""
        reach = self.reach
        shapes = extend_shapes(reach.prompt_rows, reach.max_prompts, reach.max_context)
        batches = [self.batch(shape) for shape in shapes]  # reads host tensors, which fake ones do not allow
        with FakeTensorMode(allow_non_fake_inputs=True), planned_launches() as found:
            self.prompts(batches)
            if self.drafter is not None and reads_features(self.drafter):
                context = min(reach.max_context, self.drafter.max_context)
                self.draft_prompts(extend_shapes(MAX_PREFILL_ROWS, reach.max_requests, context))
            if self.steps is not None:
                for kind, count in product(self._kinds(self.steps), sizes(reach.max_requests)):
                    self.step(kind, count)
            self.choice()
        return list({launch.variant: launch for launch in found}.values())

    def prompts(self, batches: Sequence[ForwardBatch]) -> None:
        """Forwards of the target over prompts: each number of rows once, attention for each batch."""
        most = max(batch.num_tokens for batch in batches)
        inputs = [self._body(count) for count in row_counts(most)][-1]
        self._recorded_body(most)
        seen_forms = one_of_each(inputs.forms)
        for number, batch in enumerate(batches):
            attention = self.runner.attention
            attend = attention.bind(attention.plan(batch))
            for form in seen_forms:
                layers = self.runner.pool.layers_of(is_windowed=form.window > 0)
                for layer in layers[: NUM_LAYERS if number == 0 else 1]:
                    for q, k, v in inputs.strides(batch.num_tokens):
                        attend(layer, q, k, v, form)

    def draft_prompts(self, shapes: Iterator[ExtendShape]) -> None:
        """Forwards of the drafter over prompts, and the states of the requests that end in them."""
        assert self.drafter is not None
        width, device = self.drafter.feature_width, self.runner.pool.device
        for shape in shapes:
            self.drafter.prefill(
                [
                    DraftPrefill(
                        pages=[0] * pages_for(shape.prefix + count, self.reach.page_size),
                        start=shape.prefix,
                        next_ids=[0] * count,
                        features=torch.zeros((count, width), dtype=self.runner.model.dtype, device=device),
                        state_row=PAD_ROW,
                        is_final=True,
                    )
                    for count in shape.q_lens
                ]
            )

    def step(self, kind: StepKind, count: int) -> None:
        """One decode step of `count` requests."""
        assert self.steps is not None
        whole = self.steps.step
        step = FusedStep(self.runner, whole.drafter, whole.state, whole.max_context, whole.late)
        slots = torch.zeros(count, dtype=torch.int64, device=whole.state.device)
        step.run(slots, kind, Breaks(StepContext(num_rows=count)))
        if step.is_late(kind):
            step.catch_up(slots, Breaks(StepContext(num_rows=count)))

    def choice(self) -> None:
        """All that can be done with logits. Its kernels are the same for any number of rows."""
        vocab_size, device = self.runner.model.config.vocab_size, self.runner.pool.device
        logits = torch.zeros((1, vocab_size), device=device)
        one = torch.zeros(1, dtype=torch.int64, device=device)
        edits = LogitEdits(
            ids=one[:, None],
            values=logits[:, :1],
            until=one[:, None],
            penalties=torch.ones((1, 3), device=device),
            seen=torch.zeros((1, vocab_size), dtype=torch.int32, device=device),
        )
        edit_logits(logits, one, one, edits)
        real, flag = one.double(), one.bool()
        tensors = SamplingTensors(
            seeds=one, temperature=real, top_k=one, top_p=real, min_p=real, is_drawn=flag
        )
        choose_tokens(logits, one, tensors, is_ranked=True)
        top_logprobs(logits, one, one, 1)

    def batch(self, shape: ExtendShape) -> ForwardBatch:
        """A batch of `shape` as `extend_batch` builds it, with zeros for all values on the device."""
        ends = [shape.prefix + count for count in shape.q_lens]
        width = pages_for(max(ends), self.reach.page_size)
        device = self.runner.pool.device
        ids, positions, slots = (
            torch.zeros(shape.num_rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        return ForwardBatch(
            input_ids=ids,
            positions=positions,
            slots=slots,
            page_table=torch.zeros((len(ends), width), dtype=torch.int64, device=device),
            q_lens=list(shape.q_lens),
            kv_lens=ends,
            logit_rows=torch.zeros(len(ends), dtype=torch.int64, device=device),
        )

    def _body(self, count: int) -> "_Inputs":
        """A forward of `count` rows with the logits of its last row; returns the inputs of its attention."""
        model, device = self.runner.model, self.runner.pool.device
        seen: list[_Inputs] = []
        forms: list[AttentionForm] = []

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            form: AttentionForm = PLAIN_FORM,
        ) -> torch.Tensor:
            forms.append(form)
            seen.append(_Inputs(q, k, v, forms, is_latent(self.runner.pool.kv)))
            return torch.empty(*q.shape[:2], model.config.value_dim, dtype=q.dtype, device=q.device)

        ids, positions = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
        takes: Attend = attend
        hidden, _ = model.body(model.embed(ids), positions, takes, aux_ids_of(model))
        for rows in sizes(min(count, self.reach.max_prompts)):
            model.compute_logits(hidden[:rows].clone())
        return seen[-1]

    def _recorded_body(self, count: int) -> None:
        """A forward of `count` rows as a graph with breaks records it, whose attention rotates."""
        model, pool = self.runner.model, self.runner.pool
        ids, positions, slots = (torch.zeros(count, dtype=torch.int64, device=pool.device) for _ in range(3))
        breaks = Breaks(AttendContext(num_rows=count, read=read_nothing))
        attend = bridge_of(model, count, pool.device).attend(breaks, pool, slots)
        body_of(model, ids, positions, attend)

    def _kinds(self, steps: StepGraphs) -> list[StepKind]:
        """One kind of step per shape, which takes the likeliest tokens."""
        shapes = {kind.shape: StepKind(shape=kind.shape, watched=kind.watched) for kind in steps.kinds}
        eager = [StepKind(shape=shape) for shape in self.reach.eager_shapes if shape not in shapes]
        return [*shapes.values(), *eager]


def first_layers(model: CausalLM) -> CausalLM:
    """`model` with its first layers, NUM_LAYERS or more, up to the last one that is unlike those before it,
    and with its last layer, which begins no other.

    It shares the weights. Layers are alike by their class, the form of their attention, and the classes of
    their projections and of those of the layer before.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list) or len({type(layer) for layer in layers}) != 1:
        return model
    forms = [_projections(layer) for layer in layers]
    kinds = list(zip(map(_kind, layers), forms, [(), *forms], strict=False))
    count = max(NUM_LAYERS, *(1 + kinds.index(kind) for kind in kinds))
    short = copy.copy(model)
    vars(short)["layers"] = [*layers[:count], *layers[max(count, len(layers) - 1) :]]
    return short


def _kind(layer: object) -> tuple[int, float, bool, bool, type]:
    """What decides about the kernels of a layer."""
    attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
    form: AttentionForm = getattr(attention, "form", PLAIN_FORM)
    return form.window, form.softcap, form.sinks is None, bool(getattr(attention, "turns", True)), type(mlp)


def _projections(layer: object) -> tuple[type, ...]:
    """The classes of the projections and experts of a layer, which have kernels of their own where weights
    are stored in another form.
    """
    attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
    parts = (attention, mlp, getattr(mlp, "shared", None))
    names = ("qkv", "query_up", "output", "gate_up", "down", "stored")
    return tuple(type(getattr(part, name, None)) for part in parts for name in names)


def one_of_each(forms: Sequence[AttentionForm]) -> list[AttentionForm]:
    """One of all forms that lead to the same kernels: sinks differ by layer, and only their dtype counts."""
    found = {(form.window, form.softcap, form.sinks is None): form for form in forms}
    return list(found.values())


@dataclass(frozen=True)
class _Inputs:
    """The inputs of one attention: q `[T, N, D]`, k and v `[T, K, D]`, and the forms of all layers; over
    latents v is a weight.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    forms: Sequence[AttentionForm]
    is_latent: bool

    def strides(self, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The first `rows` rows: as the model makes them, and contiguous, as they cross the break of a graph.

        The second form is left out where its strides lead to the same kernels.
        """
        q, k, v = self.q[:rows], self.k[:rows], self.v if self.is_latent else self.v[:rows]
        yield q, k, v
        if self.q.shape[2] % ALIGNMENT:
            q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
            yield q, k, v
