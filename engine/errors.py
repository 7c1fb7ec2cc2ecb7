"""Errors of the engine."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served.

    The message is one line with the file, the key or tensor, its value and the remedy.
    """


class UnknownCheckpoint(CheckpointError):
    """A setting names a checkpoint that is neither a directory nor a hub id."""


class UnsupportedInput(ValueError):
    """The model does not accept an input of a forward, or not in this form.

    The message names the accepted form.
    """


class RanksApart(Exception):
    """The ranks of a worker wait for each other in different places, or one has ended: none can go on.

    It is no RuntimeError, which one rank alone may recover from.
    """


class LifecycleError(RuntimeError):
    """A runner's method was called out of order, or with data prepared for another forward."""
