"""One rank of `baton bench load`: a process that loads its part of a checkpoint, once, and says what it took.

It writes a line when it is ready, loads when it gets one, and writes a JSON document of `RankLoad`.
"""

import dataclasses
import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ...engine.config import resolve_device, resolve_dtype
from ...engine.loader import rank_device
from ...engine.models.weights import load_model
from ...engine.parallel.group import TensorGroup
from ...engine.parallel.sharing import Sharing, tensor_parallel

READY = "ready"


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What one rank of `size` loads, and where to. `by_expert`: it has whole experts."""

    path: str
    rank: int
    size: int
    device: str
    dtype: str
    quantize: str
    by_expert: bool = False

    @property
    def sharing(self) -> Sharing:
        """The part of this rank; nothing is computed, so it needs no process group."""
        return tensor_parallel(TensorGroup(rank=self.rank, size=self.size), by_expert=self.by_expert)


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """`total_s` from the order to the end. `read_bytes` of files, `held_bytes` of weights in the end.

    Bytes of memory of the process: `before_bytes` when the order came, `peak_bytes` at most after it.
    """

    total_s: float
    read_bytes: int
    held_bytes: int
    before_bytes: int
    peak_bytes: int


def load(job: RankJob) -> RankLoad:
    """Loads the part of `job`. Raises CheckpointError as `load_model`."""
    device = rank_device(resolve_device(job.device), job.sharing.tensor)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context is there before the clock runs
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    before, read = _status("VmRSS"), _bytes_read()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is counted from here
    started = time.monotonic()
    dtype = resolve_dtype(job.dtype, device)
    model, _ = load_model(
        Path(job.path), dtype=dtype, device=device, quantize=job.quantize, sharing=job.sharing
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return RankLoad(
        total_s=time.monotonic() - started,
        read_bytes=_bytes_read() - read,
        held_bytes=sum(tensor.nbytes for _, tensor in model.tensors()),
        before_bytes=before,
        peak_bytes=_status("VmHWM"),
    )


def _status(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _bytes_read() -> int:
    """Bytes that this process got from read calls."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    return 0


def main() -> None:
    """Runs one rank; the job is the only argument."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    job = RankJob(**json.loads(sys.argv[1]))
    json.dump(dataclasses.asdict(load(job)), sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
