"""Errors of the engine."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served; one line that names the file, the key or tensor, its value and the remedy."""


class UnsupportedInput(ValueError):
    """A forward was given an input that its model does not take, or not in this form; the message says what it takes."""


class LifecycleError(RuntimeError):
    """A runner's method was called out of order, or with something prepared for another forward."""
