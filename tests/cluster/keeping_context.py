"""A ZeroMQ context for tests."""

import weakref

import zmq


class KeepingContext(zmq.Context):
    """Keeps its sockets alive until it is destroyed, so that none is closed by the garbage collector."""

    def socket(self, *args, **kwargs):
        socket = super().socket(*args, **kwargs)
        _KEPT.setdefault(self, []).append(socket)
        return socket


_KEPT: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
