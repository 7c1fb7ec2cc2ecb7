"""Finds this host's GPUs as their driver names them to a child process, without torch.

The driver is asked in a short child process, since it keeps what it opened. `CUDA_VISIBLE_DEVICES` and
`CUDA_DEVICE_ORDER` work there as in a worker, so a number means the same GPU to both.
"""

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...cluster.errors import ConfigError
from ...cluster.process.log import PACKAGE
from ...engine.auto_sizes import CONTEXT_BYTES, Card

logger = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
LIKE_NVIDIA_SMI = "PCI_BUS_ID"  # the order in which nvidia-smi numbers GPUs
LEAST_HELD = 2**30  # bytes; less is a display's, or the driver's own
PROBE_S = 60.0  # longest time for the driver's answer; without persistence mode it starts the GPUs first


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. `index` selects it in CUDA_VISIBLE_DEVICES; `memory`, and `held` by other processes, are in
    bytes.
    """

    index: str
    name: str
    memory: int
    held: int = 0
    capability: tuple[int, int] = (0, 0)

    @property
    def free(self) -> int:
        """Bytes that workers may take."""
        return self.memory - self.held

    @property
    def card(self) -> Card:
        """The GPU as an engine on it would see it."""
        free = self.free - CONTEXT_BYTES
        return Card(name=self.name, total=self.memory, free=free, capability=self.capability)

    @property
    def idle(self) -> "Gpu":
        """The same GPU without other processes."""
        return replace(self, held=0)

    def __str__(self) -> str:
        return f"{self.index}: {self.name}, {self.memory / 2**30:.1f} GiB"


def find_gpus(env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a worker with this environment could use, in the order of CUDA_VISIBLE_DEVICES."""
    if not _has_cuda_torch():
        return ()
    return parse_gpus(_probe(ordered(env)), env)


def ordered(env: Mapping[str, str]) -> dict[str, str]:
    """`env`, with GPUs numbered as nvidia-smi does unless `env` numbers them itself."""
    chosen = env.get(VISIBLE) is not None or ORDER in env
    return dict(env) if chosen else {**env, ORDER: LIKE_NVIDIA_SMI}


def parse_gpus(listed: str, env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs in the lines of `gpu_probe`, named by `env`'s CUDA_VISIBLE_DEVICES or by number."""
    rows = [line.split("\t") for line in listed.splitlines()]
    visible = [entry.strip() for entry in env.get(VISIBLE, "").split(",") if entry.strip()]
    names = visible or [str(at) for at in range(len(rows))]
    return tuple(
        Gpu(
            index=index,
            name=name,
            memory=int(memory),
            held=held if (held := int(memory) - int(free)) >= LEAST_HELD else 0,
            capability=(int(major), int(minor)),
        )
        for index, (name, memory, free, major, minor) in zip(
            names, rows, strict=False
        )  # the driver ends at the first wrong entry
    )


def restrict(gpus: tuple[Gpu, ...], wanted: str) -> tuple[Gpu, ...]:
    """The GPUs that `--gpus` names, in its order; all for an empty `wanted`. Raises ConfigError."""
    if not wanted:
        return gpus
    known = {gpu.index: gpu for gpu in gpus}
    if not known:
        raise ConfigError(f"--gpus {wanted}: this host shows no usable GPU; leave --gpus out")
    missing = [index for index in wanted.split(",") if index not in known]
    if missing:
        raise ConfigError(f"--gpus {wanted}: there is no GPU {missing[0]}; choose from {','.join(known)}")
    return tuple(known[index] for index in wanted.split(","))


def grouped(gpus: Sequence[Gpu], size: int) -> tuple[tuple[Gpu, ...], tuple[Gpu, ...]]:
    """The GPUs `size` at a time, each group as one `Gpu` with the indices of all, and the GPUs left over.

    Each rank of a worker takes as much of its GPU as the others, so a group counts as its fullest GPU. GPUs
    of one name are grouped in the given order. Raises ConfigError where there is no group.
    """
    if size == 1:
        return tuple(gpus), ()
    groups: list[Gpu] = []
    left: list[Gpu] = []
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        alike = [gpu for gpu in gpus if gpu.name == name]
        whole = len(alike) // size * size
        for at in range(0, whole, size):
            part = alike[at : at + size]
            fullest = min(part, key=lambda gpu: gpu.free)
            groups.append(replace(fullest, index=",".join(gpu.index for gpu in part)))
        left += alike[whole:]
    if not groups:
        raise ConfigError(
            f"there are {len(gpus)} GPUs to use ({', '.join(map(str, gpus))}), and a worker needs {size} of "
            "one kind; lower --tp or --dp-attention, or allow more with --gpus"
        )
    return tuple(groups), tuple(left)


def _has_cuda_torch() -> bool:
    """Whether the installed torch has CUDA kernels, found without importing it."""
    found = importlib.util.find_spec("torch")
    folders = (found.submodule_search_locations or []) if found is not None else []
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders)


def _probe(env: Mapping[str, str]) -> str:
    """The lines of `gpu_probe`; "" when the driver is missing or does not answer."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-m", f"{PACKAGE}.deploy.up.gpu_probe"]
    try:
        done = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the GPUs of this host are not known: %s", error)
        return ""
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        logger.warning("the GPUs of this host are not known: %s", reason)
        return ""
    return done.stdout
