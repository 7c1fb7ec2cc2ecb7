"""The order in which an engine starts: one ordered list of phases, guarded.

Capturing before aux capture is configured, or before embedding and lm_head are shared with the draft, freezes the wrong
thing into a graph and costs acceptance without any error; so a phase can only follow the one before it.
"""

from enum import IntEnum

from ..errors import LifecycleError


class Phase(IntEnum):
    """How far the engine is; each phase needs the one before it."""

    CREATED = 0
    LOADED = 1  # target weights are in memory
    AUX_CONFIGURED = 2  # the target knows which layer outputs to capture (possibly none)
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
        """Enter `to`; LifecycleError names both phases unless `to` is the very next one."""
        if to != self.phase + 1:
            raise LifecycleError(
                f"cannot enter {to.name} from {self.phase.name}: {Phase(to - 1).name} must come first"
            )
        self.phase = to

    def require(self, phase: Phase) -> None:
        """LifecycleError naming both phases unless the engine is exactly in `phase`."""
        if self.phase != phase:
            raise LifecycleError(f"this needs {phase.name}, but the engine is {self.phase.name}")
