"""Bugs of padding in lockstep, by name: each is planted into the rank of this process.

A rank that enters the experts with other rows than the ranks agreed on must raise before the collective, in
which the others would wait for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from baton.engine.graphs.bucketed_graphs import GraphFamily
from baton.engine.parallel.lockstep import StepRows
from baton.engine.runner import model_runner
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.speculative.step.fused_step import FusedStep
from baton.engine.speculative.step.step_graphs import StepGraphs

Undo = Callable[[], None]


def plans_before_padding() -> Undo:
    """Attention of a prompt is planned for the rank's own rows, which are padded then."""
    forward = ModelRunner._forward_with_others

    def planned(self, rounds, found, batch, metadata):
        return forward(self, rounds, found, batch, self.attention.plan(batch))

    ModelRunner._forward_with_others = planned
    return lambda: setattr(ModelRunner, "_forward_with_others", forward)


def pads_no_prompts() -> Undo:
    """A forward over prompts runs with the rank's own rows."""
    pad_to = model_runner.pad_to
    model_runner.pad_to = lambda batch, end: batch
    return lambda: setattr(model_runner, "pad_to", pad_to)


def pads_no_steps() -> Undo:
    """A decode step runs with the rank's own requests."""
    run = StepGraphs._run

    def unpadded(self, slots, kind, context, num_rows):
        return run(self, slots, kind, context, len(slots) if self.rounds else num_rows)

    StepGraphs._run = unpadded
    return lambda: setattr(StepGraphs, "_run", run)


def takes_another_graph() -> Undo:
    """A graph of the next size is replayed."""
    peek = GraphFamily.peek

    def next_one(self, shape):
        decision = peek(self, shape)
        larger = [bucket for bucket in self.captured if bucket > decision.bucket]
        return replace(decision, bucket=larger[0]) if decision.is_graph and larger else decision

    GraphFamily.peek = next_one
    return lambda: setattr(GraphFamily, "peek", peek)


def drops_a_request_behind_the_plan() -> Undo:
    """A step loses its last request once all have agreed on its size."""
    run = FusedStep.run

    def shorter(self, slots, kind, breaks):
        return run(self, slots[:-1] if slots.shape[0] > 1 else slots, kind, breaks)

    FusedStep.run = shorter
    return lambda: setattr(FusedStep, "run", run)


def runs_no_idle_steps() -> Undo:
    """A rank without requests agrees to a step and does not run it. No check can raise: the others wait."""
    run_idle = StepGraphs.run_idle
    StepGraphs.run_idle = lambda self: self.rounds.step(StepRows()) and None
    return lambda: setattr(StepGraphs, "run_idle", run_idle)


PLANTS: Mapping[str, Callable[[], Undo]] = {
    "plans before padding": plans_before_padding,
    "pads no prompts": pads_no_prompts,
    "pads no steps": pads_no_steps,
    "takes another graph": takes_another_graph,
    "drops a request": drops_a_request_behind_the_plan,
    "runs no idle steps": runs_no_idle_steps,
}
