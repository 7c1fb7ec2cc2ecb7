"""Engines with graphs beside engines without, and what makes them differ where a graph is wrong."""

from collections.abc import Iterator

import torch
from baton.engine.attention.registry import attention_for
from baton.engine.capture.graph_set import GraphSet
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.breakable import Breaks
from baton.engine.graphs.bucketed_graphs import GraphFamily
from baton.engine.graphs.graph_pool import GraphKind
from baton.engine.graphs.tape.arena import ArenaMemory
from baton.engine.graphs.tape.tape import KeptMemory, TapeBackend, TapeMemory
from baton.engine.kv.page_table import slots_for
from baton.engine.request import Request
from baton.engine.runner.lifecycle import Lifecycle, Phase
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.speculative.drafters.dflash import DflashDrafter
from baton.engine.speculative.drafters.eagle3 import Eagle3Drafter
from baton.engine.speculative.drafters.mtp_prefill import MtpDrafter
from baton.engine.speculative.drafters.protocol import Drafter, draft_pools
from baton.engine.speculative.step.step_graphs import StepGraphs
from baton.tests.parity.eagle3_engine import PAGE_SIZE, Engine

MAX_BATCH, MAX_TOKENS = 4, 24
BREAKABLE = {GraphKind.TARGET_PREFILL, GraphKind.DRAFT_PREFILL}
WHOLE = {GraphKind.WHOLE_PREFILL}  # where attention can be recorded
FULL = set(GraphKind) - BREAKABLE - WHOLE


def arena() -> ArenaMemory:
    return ArenaMemory(1 << 16, poison=True)


def at(phase: Phase) -> Lifecycle:
    lifecycle = Lifecycle()
    for step in list(Phase)[1 : phase + 1]:
        lifecycle.advance(step)
    return lifecycle


def capture(
    runner: ModelRunner,
    drafter: Drafter | None = None,
    steps: StepGraphs | None = None,
    *,
    memory: TapeMemory | None = None,
    max_batch: int = MAX_BATCH,
    max_tokens: int = MAX_TOKENS,
    as_one_break: bool = False,
    backend: GraphBackend | None = None,
) -> GraphSet:
    """Every kind of graph at once, as no single role has them; a tape in `memory` stands for `backend`."""
    backend = backend or TapeBackend(memory or KeptMemory())
    graphs = GraphSet(backend, at(Phase.POOLS_ALLOCATED), as_one_break=as_one_break)
    graphs.capture_prefill(runner, max_tokens)
    if drafter is not None:
        graphs.capture_draft(drafter, max_tokens)
    if steps is not None:
        graphs.capture_steps(steps, max_batch)
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
    graphs = capture(
        engine.runner,
        engine.drafter,
        engine.decoder.steps,
        memory=memory,
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
    prefill = engine.runner.graphs
    found = [prefill.tokens.family, *engine.decoder.steps.families.values()]
    found += [] if prefill.whole is None else [prefill.whole.family]
    draft = None if engine.drafter is None else engine.drafter.prefill_family
    return found if draft is None else [*found, draft]


def statics(engine: Engine) -> Iterator[torch.Tensor]:
    """Every static input of every graph that is loaded before each replay."""
    tokens = [engine.runner.graphs.tokens]
    if isinstance(engine.drafter, Eagle3Drafter | MtpDrafter):
        tokens.append(engine.drafter.graphs.tokens)
    for graphs in tokens:
        yield from graphs.inputs.values()
        yield from (graphs.bridge.q, graphs.bridge.out)
    if (whole := engine.runner.graphs.whole) is not None:
        yield from (*whole.inputs.values(), whole.places.integers, whole.places.page_table)
    if isinstance(engine.drafter, DflashDrafter):
        yield from engine.drafter.graphs.inputs.values()


def poison(engine: Engine) -> None:
    """NaN and ids far outside of everything; and what free slots and places of requests hold means nothing
    either."""
    for static in statics(engine):
        static.fill_(float("nan") if static.is_floating_point() else 1 << 40)
    state = engine.decoder.steps.step.state
    state.integers[state._free, 1:3] = 0
    if engine.drafter is not None:
        for values in engine.drafter.anchors:
            values[engine.drafter.states._free] = float("nan") if values.is_floating_point() else 1 << 30


def kv_of(engine: Engine, request: Request) -> list[torch.Tensor]:
    """What the target's and the draft's KV hold of the committed tokens."""
    slots = slots_for(request.pages, 0, request.num_tokens - 1, PAGE_SIZE)
    pools = [engine.runner.pool, *draft_pools(engine.drafter)]
    return [pool.kv[slots // PAGE_SIZE, :, :, slots % PAGE_SIZE] for pool in pools]


class Recorded(Breaks):
    """Has the step planned as for a recording."""

    is_recorded = True


def uses_kernels(engine: Engine) -> None:
    """The eager path by the paged kernels' references, as on a device."""
    step = engine.decoder.steps.step
    run = step.run
    step.run = lambda slots, kind, breaks: run(slots, kind, Recorded(breaks.context))
    engine.runner.attention = attention_for(engine.runner.pool, "triton")
    if isinstance(engine.drafter, Eagle3Drafter):
        engine.drafter._attention = attention_for(engine.drafter.pool, "triton")
