"""Errors of the graph runtime.

GraphError
    CaptureRefused    the code under capture does something that a graph cannot replay
    StaleGraph        tensors that a graph has bound by address were exchanged
"""

from ..errors import LifecycleError


class GraphError(LifecycleError):
    """A graph was captured, replayed or broken at a moment when it cannot be."""


class CaptureRefused(GraphError):
    """An operation that a graph cannot hold (host read, data-dependent shape, ...); the message names it."""


class StaleGraph(GraphError):
    """A parameter no longer lies where it lay at capture; the message names the parameters."""
