"""Counts what an engine must not do after it is ready: compile kernels, capture graphs, allocate device
memory.

Each of the three delays the requests of that moment by milliseconds to seconds.
"""

import logging
import weakref

import torch

from ...kernels.triton_jit import Compiled, watch_compilations
from ..graphs.graph_pool import GraphPool

logger = logging.getLogger(__name__)

# Names of the counters in heartbeats.
COMPILATIONS, CAPTURES, ALLOCATIONS = (
    "compilations_after_ready",
    "captures_after_ready",
    "allocations_after_ready",
)


class ReadyWatch:
    """The counts of one engine, from construction to `close`.

    A compilation is logged with the kernel's name and the variant. An allocation is one call of the device's
    allocator for memory beyond what the process has reserved.
    """

    def __init__(self, device: torch.device, graphs: GraphPool | None) -> None:
        self.device = device
        self.num_compilations = 0
        self._graphs = graphs
        self._captures_before = self._num_captures()
        self._allocations_before = num_device_allocations(device)
        self._logged_allocations = 0
        mine = weakref.ref(self)  # Triton's hook must not keep an engine's graphs alive

        def tell(compiled: Compiled) -> None:
            watch = mine()
            if watch is not None:
                watch._on_compiled(compiled)

        self._end = weakref.finalize(self, watch_compilations(tell))

    def close(self) -> None:
        """Ends the watch. Idempotent; the end of the object ends it, too."""
        self._end()

    @property
    def counters(self) -> dict[str, float]:
        """Totals since the engine is ready, by the names of heartbeats."""
        allocations = num_device_allocations(self.device) - self._allocations_before
        if allocations > self._logged_allocations:
            self._logged_allocations = allocations
            reserved = torch.cuda.memory_reserved(self.device)
            logger.warning(
                "device memory grew while serving: %d allocations, %d MiB reserved now",
                allocations,
                reserved >> 20,
            )
        return {
            COMPILATIONS: self.num_compilations,
            CAPTURES: self._num_captures() - self._captures_before,
            ALLOCATIONS: allocations,
        }

    def _on_compiled(self, compiled: Compiled) -> None:
        self.num_compilations += 1
        logger.warning("kernel %s was compiled while serving: %s", compiled.kernel, compiled.variant)

    def _num_captures(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_captured

    def __repr__(self) -> str:
        return f"<ReadyWatch {self.num_compilations} compilations on {self.device}>"


def num_device_allocations(device: torch.device) -> int:
    """Blocks that torch has taken from the driver of `device` since the start; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_device_alloc", 0))
