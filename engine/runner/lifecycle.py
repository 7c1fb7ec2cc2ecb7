"""The start-up order of an engine: one list of phases, guarded.

A capture before aux capture is configured, or before the draft shares embedding and lm_head, binds the wrong
tensors into a graph and lowers acceptance without any error. A phase may therefore only follow its
predecessor.
"""

from enum import IntEnum

from ..errors import LifecycleError


class Phase(IntEnum):
    """The progress of an engine's start. Each phase needs the one before it."""

    CREATED = 0
    LOADED = 1  # target weights are in memory
    AUX_CONFIGURED = 2  # the layer outputs to capture are chosen (possibly none)
    WEIGHTS_SHARED = 3  # the draft uses the target's embedding and lm_head (or there is no draft)
    POOLS_ALLOCATED = 4  # KV, feature and draft pools exist
    CAPTURED = 5  # graphs are captured (or graphs are off)
    SERVING = 6


class Lifecycle:
    """The phase of one engine."""

    def __init__(self) -> None:
        self.phase = Phase.CREATED

    def __repr__(self) -> str:
        return f"<Lifecycle {self.phase.name}>"

    def advance(self, to: Phase) -> None:
        """Enter `to`. Raises LifecycleError, naming both phases, unless `to` is the next phase."""
        if to != self.phase + 1:
            raise LifecycleError(
                f"cannot enter {to.name} from {self.phase.name}: {Phase(to - 1).name} must come first"
            )
        self.phase = to

    def require(self, phase: Phase) -> None:
        """Raises LifecycleError, naming both phases, unless the engine is in `phase`."""
        if self.phase != phase:
            raise LifecycleError(f"this needs {phase.name}, but the engine is {self.phase.name}")
