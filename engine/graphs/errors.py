"""Errors of the graph runtime.

GraphError
    CaptureRefused    the code under capture does something that a graph cannot replay
    VotedDown         another rank has no such graph
    StaleGraph        tensors that a graph has bound by address were exchanged
"""

from ..errors import LifecycleError


class GraphError(LifecycleError):
    """A graph was captured, replayed or broken at a moment that does not allow it."""


class CaptureRefused(GraphError):
    """Code under capture uses an operation that a graph cannot hold (host read, data-dependent shape).

    The message names it.
    """


class VotedDown(GraphError):
    """Another rank could not capture the graph, so that no rank has it."""


class StaleGraph(GraphError):
    """A parameter has moved to another address since the capture. The message names the parameters."""
