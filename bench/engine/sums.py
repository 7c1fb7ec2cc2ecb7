"""Sums over the ranks of a tensor-parallel engine: microseconds of the peers' kernel and of the library."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...engine.parallel.group import TensorGroup
from ...kernels.collectives import sum_ranks

SIZES_KIB = (8, 16, 64, 256, 512, 1024, 2048, 4096, 16384)
IN_GRAPH = 50  # sums of one graph, so that launches by the host do not count
REPEATS = 9


@dataclass(frozen=True, kw_only=True)
class SumTime:
    """Microseconds of one sum of `kib` KiB of bfloat16. `peers` is None where that kernel takes no such
    tensors.
    """

    kib: int
    peers: float | None
    library: float


def sum_times(group: TensorGroup, device: torch.device) -> Iterator[SumTime]:
    """The times on GPUs, in CUDA graphs as a decode step has them. All ranks call it together."""
    for kib in SIZES_KIB:
        x = torch.zeros(kib << 9, dtype=torch.bfloat16, device=device)
        small = group.small
        peers = None
        if small is not None and small.takes(x):
            peers = _microseconds(lambda x=x, small=small: small.sum(x))  # type: ignore[misc]
        yield SumTime(kib=kib, peers=peers, library=_microseconds(lambda x=x: sum_ranks(x, group.name)))  # type: ignore[misc]


def _microseconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / IN_GRAPH)
    return float(sorted(times)[REPEATS // 2])


def table(times: list[SumTime]) -> str:
    """The times as a markdown table; "" without any."""
    if not times:
        return ""
    rows = [
        f"| {time.kib} | {'' if time.peers is None else f'{time.peers:.1f}'} | {time.library:.1f} |"
        for time in times
    ]
    return "\n".join(["| sum, KiB | peers' memory, us | NCCL, us |", "|---|---|---|", *rows, ""]) + "\n"
