"""The ranks of a tensor-parallel engine under measurement: every rank runs the whole benchmark in step.

Equal seeds give equal prompts, and rank 0's drafts and tokens are shared inside of a step, so all ranks make
the same calls in the same order. Only rank 0 prints; the others are processes of `rank`.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...cluster.process.log import PACKAGE
from ...engine.parallel.group import LIBRARY_SETTINGS, TensorGroup, join_group, leave_group
from ...engine.parallel.peer_sum import peer_sum

MODULE = f"{PACKAGE}.bench.engine.rank"
LOOK_EVERY_S = 0.2


@contextlib.contextmanager
def rank_0(size: int, argv: Sequence[str], device: torch.device) -> Iterator[TensorGroup]:
    """Starts ranks 1 to `size` - 1 with the command line `argv` and joins their group as rank 0.

    A rank that fails ends this process with its exit code, since a collective would wait for it.
    """
    meeting = os.memfd_create("baton-bench-ranks")  # stays open: the group's store opens it again at exit
    os.environ.update({name: os.environ.get(name, value) for name, value in LIBRARY_SETTINGS.items()})
    children = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, str(meeting), str(rank), str(size), *argv],
            pass_fds=(meeting,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, size)
    ]
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(children, is_over), name="ranks", daemon=True).start()
    try:
        group = joined(meeting, 0, size, device)
        yield group
        leave_group(group)
        for child in children:
            child.wait()
    finally:
        is_over.set()
        for child in children:
            child.kill()
            child.wait()


def _watch(children: Sequence["subprocess.Popen[bytes]"], is_over: threading.Event) -> None:
    while not is_over.wait(LOOK_EVERY_S):
        for rank, child in enumerate(children, start=1):
            if code := child.poll():
                sys.stderr.write(f"rank {rank} ended with exit code {code}; its own line tells why\n")
                sys.stderr.flush()
                for other in children:
                    other.kill()
                os._exit(code if code > 0 else 1)


def joined(meeting: int, rank: int, size: int, device: torch.device) -> TensorGroup:
    """The group of all ranks; on GPUs rank N takes the visible GPU N."""
    own = rank_device(device, rank)
    group = join_group(Path(f"/proc/self/fd/{meeting}"), rank, size, own)
    return replace(group, small=peer_sum(group, own)) if own.type == "cuda" else group


def rank_device(device: torch.device, rank: int) -> torch.device:
    """The device of `rank`: the visible GPU of its number, or the CPU."""
    return torch.device("cuda", rank) if device.type == "cuda" else device
