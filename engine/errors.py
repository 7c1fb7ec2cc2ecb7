"""Errors of the engine."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served; one line that names the file, the key or tensor, its value and the remedy."""


class LifecycleError(RuntimeError):
    """A runner's method was called out of order, or with something prepared for another forward."""
