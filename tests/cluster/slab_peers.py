"""Processes of shm_peer, as tests start, kill and ask them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

DEADLINE_S = 60.0


def wait_for(condition: Callable[[], object], seconds: float = DEADLINE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


class Peer:
    """One process of shm_peer."""

    def __init__(self, context: multiprocessing.context.BaseContext, role: Callable, *args: object) -> None:
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=role, args=(theirs, *args))
        self.process.start()
        theirs.close()
        self.hello = self.hear()

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> object:
        assert self.pipe.poll(DEADLINE_S), "the peer says nothing"
        return self.pipe.recv()

    def counters(self) -> dict[str, float]:
        """Of a prefill worker."""
        self.pipe.send("counters")
        return self.hear()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait_dead()

    def wait_dead(self) -> None:
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == -signal.SIGKILL

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join(DEADLINE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


@contextmanager
def started_peers() -> Iterator[Callable[..., Peer]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["baton.tests.cluster.shm_peer"])
    peers: list[Peer] = []

    def start(role: Callable, *args: object) -> Peer:
        peers.append(Peer(context, role, *args))
        return peers[-1]

    yield start
    for peer in peers:
        peer.stop()


def hand_over(prefill: Peer, decode: Peer, first: int, last: int) -> list[object]:
    decode.pipe.send((prefill.hello, first, last))
    return [decode.hear() for _ in range(first, last)]
