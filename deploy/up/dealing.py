"""Decides how many workers of each role `baton up` starts, and which GPU each gets. Pure.

Without GPUs: one prefill and one decode worker, as many as the settings say. One GPU: one decode worker that
computes prompts itself. Several: one worker per GPU, in the ratio of `deploy.capacity`. With more workers
than GPUs several workers share a GPU, and its memory is divided among them. A GPU counts by its free memory,
which other processes may reduce. A role whose settings put it on the CPU gets no GPU.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...cluster.config.roles import AUTO_WORKERS
from ...cluster.errors import ConfigError
from ...engine.auto_sizes import GPU_SHARE
from ..capacity.gpus import TYPICAL, least_share, shares_of, split_on
from ..capacity.worker_sizes import ModelNeed
from .gpu_list import Gpu, grouped

PREFILL, DECODE = "prefill", "decode"
GIB = 2**30
BEST_RATIO = "serves the most requests"
ROLE_TEXT = {PREFILL: "prompts", DECODE: "tokens"}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the settings ask for: numbers of workers (AUTO_WORKERS: to be chosen), the share of each GPU's
    memory that all its workers use (0: GPU_SHARE), the GPUs of a worker (`ranks`), and the roles on GPUs.
    """

    prefill: int = AUTO_WORKERS
    decode: int = AUTO_WORKERS
    memory_share: float = 0.0
    ranks: int = 1
    on_gpu: frozenset[str] = frozenset((PREFILL, DECODE))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The GPU of one worker, or a group as one. `memory_share` is set where workers share the GPU, else 0."""

    worker: str  # such as prefill-0
    role: str
    gpu: Gpu
    memory_share: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Numbers of workers, the place of each (none without GPUs), and what else to say about the choice.

    `local_prefill_queued_max`: the routers' default of that setting.
    """

    prefill: int
    decode: int
    local_prefill_queued_max: int = 0
    places: tuple[Place, ...] = ()
    notes: tuple[str, ...] = ()

    def place_of(self, worker: str) -> Place | None:
        """The place of the worker of that name; None without GPUs, and for a router."""
        return next((place for place in self.places if place.worker == worker), None)


def deal_without_gpus(wish: Wish) -> Deal:
    """The workers of a host without GPUs: one of each role unless the settings name numbers."""
    return Deal(
        prefill=1 if wish.prefill == AUTO_WORKERS else wish.prefill,
        decode=1 if wish.decode == AUTO_WORKERS else wish.decode,
    )


def deal(gpus: Sequence[Gpu], need: ModelNeed, wish: Wish) -> Deal:
    """Workers and their GPUs; at least one GPU is required.

    Raises ConfigError, naming the memory that would do, when the model does not fit.
    """
    share = wish.memory_share or GPU_SHARE
    is_decode = DECODE in wish.on_gpu
    gpus, left = grouped(gpus, wish.ranks)
    fitting = [gpu for gpu in gpus if least_share(gpu.card, need, is_decode=is_decode) <= share]
    if not fitting:
        role = DECODE if is_decode else PREFILL
        raise _does_not_fit(max(gpus, key=lambda gpu: gpu.free), need, [role], share)
    prefill, decode, why = _counts(fitting, need, wish)
    roles = [PREFILL] * prefill + [DECODE] * decode
    names = [f"{role}-{at if role == PREFILL else at - prefill}" for at, role in enumerate(roles)]
    named = [(name, role) for name, role in zip(names, roles, strict=True) if role in wish.on_gpu]
    chosen = _largest(fitting, len(named))
    owner = [chosen[at % len(chosen)] for at in range(len(named))]
    shares = _shares(owner, [role for _, role in named], need, share)
    crowd = Counter(owner)
    places = tuple(
        Place(
            worker=name,
            role=role,
            gpu=gpu,
            memory_share=own if crowd[gpu] > 1 else 0.0,
            why=f"{own:.0%} of the GPU's memory, {crowd[gpu]} workers share it" if crowd[gpu] > 1 else why,
        )
        for (name, role), gpu, own in zip(named, owner, shares, strict=True)
    )
    notes = [_left_out(gpu, need, share, is_decode=is_decode) for gpu in gpus if gpu not in fitting]
    if left:
        notes.append(
            f"GPU {', '.join(gpu.index for gpu in left)} stays idle: a worker takes {wish.ranks} of one kind."
        )
    notes += [f"{name} runs on the CPU, as its device says." for name in names if name not in dict(named)]
    notes += [
        f"Other processes hold {gpu.held / GIB:.1f} of {gpu.memory / GIB:.1f} GiB of GPU {gpu.index}; "
        f"{'its worker uses' if crowd[gpu] == 1 else 'its workers divide'} the rest."
        for gpu in chosen
        if gpu.held
    ]
    idle = [gpu.index for gpu in fitting if gpu not in crowd]
    if idle:
        notes.append(f"GPU {', '.join(idle)} stays idle: more workers (--prefill, --decode) would use it.")
    if why.endswith(BEST_RATIO):
        notes.append(
            f"The ratio is for prompts of {TYPICAL.prompt} and answers of {TYPICAL.output} tokens; "
            "`baton plan` shows it for others."
        )
    return Deal(prefill=prefill, decode=decode, places=places, notes=tuple(notes))


def _counts(gpus: Sequence[Gpu], need: ModelNeed, wish: Wish) -> tuple[int, int, str]:
    """The numbers of prefill and decode workers, and the reason."""
    prefill, decode, count = wish.prefill, wish.decode, len(gpus)
    if prefill != AUTO_WORKERS and decode != AUTO_WORKERS:
        return prefill, decode, "as --prefill and --decode say"
    if prefill == 0:
        return 0, count, "--prefill 0: computes prompts itself, one worker per GPU"
    if PREFILL not in wish.on_gpu:
        return (
            1 if prefill == AUTO_WORKERS else prefill,
            count if decode == AUTO_WORKERS else decode,
            "prefill runs on the CPU",
        )
    if DECODE not in wish.on_gpu:
        return (
            count if prefill == AUTO_WORKERS else prefill,
            1 if decode == AUTO_WORKERS else decode,
            "decode runs on the CPU",
        )
    if prefill != AUTO_WORKERS:
        return prefill, max(1, count - prefill), "as --prefill says; decode has the other GPUs"
    if count == 1:
        return 0, 1 if decode == AUTO_WORKERS else decode, "one GPU: computes prompts itself, no hand-off"
    if decode != AUTO_WORKERS:
        return max(1, count - decode), decode, "as --decode says; prefill has the other GPUs"
    prefill, decode = split_on([gpu.card for gpu in gpus], need)
    return prefill, decode, f"{prefill} : {decode} {BEST_RATIO}"


def _largest(gpus: Sequence[Gpu], count: int) -> list[Gpu]:
    """The `count` GPUs with the most free memory, those with less of it first, else in the given order.

    Prefill workers come first, so decode gets the larger GPUs: its KV stays longer.
    """
    largest = sorted(range(len(gpus)), key=lambda at: (-gpus[at].free, at))[:count]
    return [gpus[at] for at in sorted(largest, key=lambda at: (gpus[at].free, at))]


def _shares(owner: Sequence[Gpu], roles: Sequence[str], need: ModelNeed, share: float) -> list[float]:
    """The share of its GPU's memory for each worker. Raises ConfigError when workers do not fit together."""
    shares = [share] * len(owner)
    for gpu in dict.fromkeys(owner):
        ours = [at for at, other in enumerate(owner) if other == gpu]
        if len(ours) > 1:
            free = min(share, gpu.free / gpu.memory)
            own = shares_of(gpu.card, need, [roles[at] == DECODE for at in ours], free)
            if not own:
                raise _does_not_fit(gpu, need, [roles[at] for at in ours], share)
            for at, part in zip(ours, own, strict=True):
                shares[at] = part
    return shares


def _left_out(gpu: Gpu, need: ModelNeed, share: float, *, is_decode: bool) -> str:
    """The note on a GPU that cannot hold the model."""
    memory = gpu.memory / GIB
    needed = least_share(gpu.idle.card, need, is_decode=is_decode) * memory
    if gpu.held:
        has = f"other processes hold {gpu.held / GIB:.1f} of its {memory:.1f} GiB"
        return f"GPU {gpu.index} is left out: {has}, the model needs {needed:.1f}."
    return f"GPU {gpu.index} is left out: it has {memory:.1f} GiB, the model needs {needed / share:.1f}."


def _does_not_fit(gpu: Gpu, need: ModelNeed, roles: Sequence[str], share: float) -> ConfigError:
    """The error for workers that one GPU cannot hold, with the memory that would do."""
    needed = sum(least_share(gpu.idle.card, need, is_decode=role == DECODE) for role in roles) * gpu.memory
    workers = " and ".join(f"{count} {role}" for role, count in Counter(roles).items())
    there = f"{share:g} of its memory is {gpu.memory * share / GIB:.1f}"
    remedy = (
        "start fewer workers (--prefill 0: decode computes prompts itself)"
        if len(roles) > 1
        else "serve a smaller model, raise --gpu-memory-share, or serve on the CPU with --device cpu"
    )
    if gpu.free < gpu.memory * share:
        there = f"{gpu.free / GIB:.1f} are free, since other processes hold {gpu.held / GIB:.1f}"
        remedy = f"end those processes (nvidia-smi lists them), choose other GPUs with --gpus, or {remedy}"
    return ConfigError(
        f"GPU {gpu} cannot hold {workers} worker: weights, workspace and one request of "
        f"{TYPICAL.prompt + TYPICAL.output} tokens need {needed / GIB:.1f} GiB, and {there}; {remedy}"
    )


def table_of(settled: Deal) -> list[str]:
    """The lines that `baton up` prints: worker, GPU, role, reason, then the notes."""
    rows = [("worker", "GPU", "role", "why")]
    for place in settled.places:
        role = "prompts and tokens" if settled.prefill == 0 else ROLE_TEXT[place.role]
        rows.append((place.worker, str(place.gpu), role, place.why))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines = ["  ".join([*(row[at].ljust(widths[at]) for at in range(3)), row[3]]) for row in rows]
    return [*lines, *settled.notes]
