"""Engines with graphs beside engines without, and what makes them differ where a graph is wrong."""

from collections.abc import Iterator, Sequence

import torch
from baton.engine.attention.registry import attention_for
from baton.engine.batch.fixed_rows import FixedRows
from baton.engine.graph_set import GraphSet
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.bucketed_graphs import GraphFamily
from baton.engine.graphs.graph_pool import GraphKind
from baton.engine.graphs.tape.arena import ArenaMemory
from baton.engine.graphs.tape.tape import KeptMemory, TapeBackend, TapeMemory
from baton.engine.kv.page_table import slots_for
from baton.engine.request import Request
from baton.engine.runner.lifecycle import Lifecycle, Phase
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.speculative.draft_graphs import DraftLoopGraphs
from baton.engine.speculative.draft_shape import PLAIN, DraftShape
from baton.engine.speculative.draft_worker import DraftWorker
from baton.engine.speculative.tree_graphs import TreeLoopGraphs
from baton.tests.parity.eagle3_engine import PAGE_SIZE, Engine

MAX_BATCH, MAX_TOKENS = 4, 24
BREAKABLE = {GraphKind.TARGET_PREFILL, GraphKind.DRAFT_PREFILL}
FULL = set(GraphKind) - BREAKABLE


def arena() -> ArenaMemory:
    return ArenaMemory(1 << 16, poison=True)


def at(phase: Phase) -> Lifecycle:
    lifecycle = Lifecycle()
    for step in list(Phase)[1 : phase + 1]:
        lifecycle.advance(step)
    return lifecycle


def capture(
    runner: ModelRunner,
    drafter: DraftWorker | None = None,
    *,
    memory: TapeMemory | None = None,
    num_rows: int = 1,
    shapes: Sequence[DraftShape] = (),
    max_context: int = 256,
    max_batch: int = MAX_BATCH,
    max_tokens: int = MAX_TOKENS,
    as_one_break: bool = False,
    backend: GraphBackend | None = None,
) -> GraphSet:
    """Every kind of graph at once, as no role has; `num_rows` replaces `shapes`, `memory` `backend`."""
    shapes = shapes or [DraftShape.of(num_rows - 1)]
    backend = backend or TapeBackend(memory or KeptMemory())
    graphs = GraphSet(backend, at(Phase.POOLS_ALLOCATED), as_one_break=as_one_break)
    graphs.capture_prefill(runner, max_tokens)
    graphs.capture_decode(runner, max_batch, shapes, max_context)
    if drafter is not None:
        graphs.capture_draft(drafter, max_batch, shapes, max_context, max_tokens)
    return graphs


def with_graphs(
    engine: Engine,
    memory: TapeMemory | None = None,
    kinds: set[GraphKind] | None = None,
    *,
    as_one_break: bool = False,
    backend: GraphBackend | None = None,
    max_batch: int = MAX_BATCH,
    max_tokens: int = MAX_TOKENS,
) -> GraphSet:
    """Graphs for `engine`, of which `kinds` run; every static buffer is poisoned before each step."""
    policy, shape = engine.decoder.policy, engine.decoder.shape if engine.drafter is not None else PLAIN
    graphs = capture(
        engine.runner,
        engine.drafter,
        memory=memory,
        shapes=[shape] if policy is None else policy.shapes[::-1],
        max_context=engine.max_context,
        max_batch=max_batch,
        max_tokens=max_tokens,
        as_one_break=as_one_break,
        backend=backend,
    )
    enable(engine, kinds)
    step = engine.decoder.step

    def poisoned_step(requests: list[Request]) -> object:
        poison(engine)
        return step(requests)

    engine.decoder.step = poisoned_step
    return graphs


def enable(engine: Engine, kinds: set[GraphKind] | None) -> None:
    """Let the graphs of `kinds` run, or all."""
    for family in families(engine):
        family.is_enabled = kinds is None or family.kind in kinds


def families(engine: Engine) -> list[GraphFamily]:
    target = engine.runner.graphs
    found = [target.prefill.tokens.family, *(verify.family for verify in target.verifies)]
    if engine.drafter is not None:
        draft = engine.drafter.graphs
        found += [
            draft.prefill.tokens.family,
            *(graphs.family for graphs in (*draft.extends, *loops_of(engine))),
        ]
    return found


def loops_of(engine: Engine) -> list[DraftLoopGraphs | TreeLoopGraphs]:
    draft = engine.drafter.graphs
    return [*draft.loops, *([] if draft.tree is None else [draft.tree])]


def statics(engine: Engine) -> Iterator[torch.Tensor]:
    """Every static input of every graph."""
    target = engine.runner.graphs
    tokens, rows = [target.prefill.tokens], [verify.rows for verify in target.verifies]
    if engine.drafter is not None:
        draft = engine.drafter.graphs
        tokens.append(draft.prefill.tokens)
        for extend in draft.extends:
            rows.append(extend.rows)
            yield from (extend.features, extend.accept_len)
        for loop in loops_of(engine):
            rows.append(loop.rows)
            yield from (loop.hidden, loop.logits)
    for graphs in tokens:
        yield from graphs.inputs.values()
        yield from (graphs.bridge.q, graphs.bridge.k, graphs.bridge.v, graphs.bridge.out)
    for fixed in rows:
        yield from statics_of(fixed)


def statics_of(fixed: FixedRows) -> tuple[torch.Tensor, ...]:
    tree = () if fixed.tree_mask is None else (fixed.tree_mask,)
    return fixed.input_ids, fixed.positions, fixed.slots, fixed.page_table, fixed.kv_lens, *tree


def poison(engine: Engine) -> None:
    """NaN, and ids, positions, slots and pages far outside of everything."""
    for static in statics(engine):
        static.fill_(float("nan") if static.is_floating_point() else 1 << 40)


def kv_of(engine: Engine, request: Request) -> list[torch.Tensor]:
    """What the target's and the draft's KV hold of the committed tokens."""
    slots = slots_for(request.pages, 0, request.num_tokens - 1, PAGE_SIZE)
    pools = [engine.runner.pool] + ([] if engine.drafter is None else [engine.drafter.pool])
    return [pool.kv[slots // PAGE_SIZE, :, :, slots % PAGE_SIZE] for pool in pools]


def uses_kernels(engine: Engine) -> None:
    """The eager path by the paged kernels' references, as on a device."""
    engine.runner.attention = attention_for(engine.runner.pool, "triton")
    if engine.drafter is not None:
        engine.drafter._attention = attention_for(engine.drafter.pool, "triton")
