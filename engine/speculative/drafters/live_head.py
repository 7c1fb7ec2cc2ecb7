"""The weights of a running drafter, which others of the same shape may replace in place.

    stage    reads and checks a checkpoint in any thread, while the engine runs
    apply    copies the staged tensors over those in use, between two steps, in the thread that steps

Graphs read weights by address, so the tensors stay where they are. Whatever is derived from weights when a
head is shared with its target, such as a projection, is replaced with them. Tensors of the target are never
written. Draft KV of the old weights stays readable but fits no new row: its owner forgets what is cached.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...parallel.vocabulary import rows_of
from ...weights_hash import model_fingerprint
from ..drafting.shape import DraftShape
from .mtp import MtpModel
from .protocol import Drafter
from .registry import DraftConfig, DraftModel, DraftSource, TargetWeights

SPARE_BYTES = 256 << 20  # of a GPU, free beside a staged head
CHECKED_VALUES = 1 << 22  # of a tensor, looked at together: they take a few times their memory
REMEDY = "restart the decode workers with it: baton draft swap --restart"
Pair = tuple[torch.Tensor, torch.Tensor]  # a tensor in use, and the values to write there


@dataclass(frozen=True, kw_only=True)
class HeadVersion:
    """One checkpoint of a head. `fingerprint` (hex) covers its config.json and samples of its tensors."""

    path: Path
    fingerprint: str


class OtherShape(CheckpointError):
    """A head that fits the target and cannot take the place of the one in use."""


@dataclass(frozen=True, kw_only=True)
class StagedHead:
    """Weights that are checked and in memory. `pairs`: tensors in use with their new values."""

    version: HeadVersion
    pairs: Sequence[Pair]


class LiveHead:
    """The weights of the drafter that runs, of `model` with the config `config`.

    `read` gives the source of another checkpoint for the same target, or raises CheckpointError. `lent` are
    the target's tensors, which heads share. `shape`: the drafts of a step.
    """

    def __init__(
        self,
        drafter: Drafter,
        model: DraftModel,
        config: DraftConfig,
        *,
        read: Callable[[Path], DraftSource],
        lent: TargetWeights,
        shape: DraftShape,
    ) -> None:
        self.version = HeadVersion(path=config.path, fingerprint=model_fingerprint(config.path))
        self._drafter, self._config, self._read, self._target = drafter, config, read, lent
        self._dialect, self._shape = _dialect_of(model), shape
        shared = (
            rows_of(lent.embed_tokens),
            rows_of(lent.lm_head),
            *(one for _, one in lent.final_norm.tensors("")),
        )
        self._lent = {tensor.data_ptr() for tensor in shared}
        self._previous: StagedHead | None = None
        self._stream: torch.cuda.Stream | None = None  # one for good, whose memory every staging uses again
        self._num_staged = 0  # bytes that the allocator keeps for that stream
        if lent.device.type == "cuda":
            self._stream = torch.cuda.Stream(lent.device)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"<LiveHead {self.version.path}, {self.version.fingerprint[:8]}>"

    @property
    def feature_ids(self) -> tuple[int, ...]:
        """The layers of the target that the head reads."""
        return self._config.aux.ids

    @property
    def previous(self) -> HeadVersion | None:
        """The kept weights that were in use before; None if there are none."""
        return None if self._previous is None else self._previous.version

    @torch.no_grad()
    def stage(self, path: Path) -> StagedHead:
        """The weights at `path` with copies in this process; the engine may step meanwhile.

        Raises CheckpointError if the checkpoint is unreadable, does not fit the target, or has numbers that
        are not finite; OtherShape if it only has another shape than the head in use.
        """
        source = self._source_of(path)
        self._must_agree(source.config)
        self._must_fit(sum(one.nbytes for one in self._own()))
        with self._own_stream():
            model = source.load(self._target)
            if _dialect_of(model) != self._dialect:
                raise OtherShape(f"{path}: its modules are of another family than those in use; {REMEDY}")
            drafter = model.drafter(num_pages=2, page_size=1, capacity=2)  # the names of its tensors
            pairs = self._pairs(path, dict(drafter.parameters()))
            self._wait()
        fingerprint = model_fingerprint(path)
        return StagedHead(version=HeadVersion(path=path, fingerprint=fingerprint), pairs=pairs)

    @torch.no_grad()
    def read_other(self, path: Path) -> tuple[HeadVersion, tuple[int, ...]]:
        """The version of a head of any shape that a restarted engine could load, and the layers that it
        reads. Raises CheckpointError if it could not.
        """
        source = self._source_of(path)
        self._must_fit(sum(file.stat().st_size for file in path.glob("*.safetensors")))
        with self._own_stream():
            model = source.load(self._target)
            model.check(self._shape)
            for name, tensor in model.drafter(num_pages=2, page_size=1, capacity=2).parameters():
                _must_be_finite(path, name, tensor)
        return HeadVersion(path=path, fingerprint=model_fingerprint(path)), source.config.aux.ids

    def _source_of(self, path: Path) -> DraftSource:
        if not path.is_absolute() or not path.is_dir():
            raise CheckpointError(f"{path}: no directory of this host; name an absolute path of a head")
        return self._read(path)

    @torch.no_grad()
    def keep(self) -> StagedHead:
        """Copies of the weights in use, in host memory; no `apply` may run meanwhile."""
        with self._own_stream():
            pairs = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._own()]
        return StagedHead(version=self.version, pairs=pairs)

    @torch.no_grad()
    def apply(self, staged: StagedHead, kept: StagedHead | None) -> None:
        """Writes staged weights over those in use. `kept`: the weights that `stage_previous` gives then. When
        the staged head is the one in use, those kept before it stay.

        Call it between two steps; the copies run in the order of the device.
        """
        for tensor, values in staged.pairs:
            tensor.copy_(values)
        self._wait()  # staged tensors are freed behind this
        if kept is None or staged.version.fingerprint != self.version.fingerprint:
            self._previous = kept
        self.version = staged.version

    @torch.no_grad()
    def stage_previous(self) -> StagedHead:
        """The weights before the last `apply`, as `stage`. Raises CheckpointError if none are kept."""
        kept = self._previous
        if kept is None:
            raise CheckpointError(f"no weights from before {self.version.path} are kept")
        self._must_fit(sum(values.nbytes for _, values in kept.pairs))
        with self._own_stream():
            pairs = [(tensor, values.to(tensor.device)) for tensor, values in kept.pairs]
            self._wait()
        return StagedHead(version=kept.version, pairs=pairs)

    def _must_agree(self, config: DraftConfig) -> None:
        """Raises OtherShape naming the first field of the config that graphs and pools rely on."""
        path, running = config.path, self._config
        if type(config) is not type(running):
            raise OtherShape(
                f"{path}: its kind is {_kind(config)}, that of the head in use {_kind(running)}; {REMEDY}"
            )
        if config.aux.ids != running.aux.ids:
            layers = ",".join(map(str, config.aux.ids))
            raise OtherShape(
                f"{path}: reads the layers {layers}, the head in use {','.join(map(str, running.aux.ids))}; "
                f"give prefill --feature-layers {layers}, then {REMEDY}"
            )
        if name := _difference(running, config):
            raise OtherShape(
                f"{path}: {name} is {getattr(config, name)!r}, that of the head in use is "
                f"{getattr(running, name)!r}; {REMEDY}"
            )

    def _pairs(self, path: Path, fresh: Mapping[str, torch.Tensor]) -> list[Pair]:
        running = dict(self._drafter.parameters())
        if missing := running.keys() ^ fresh.keys():
            raise OtherShape(
                f"{path}: tensor {min(missing)} is in only one of this head and the head in use; {REMEDY}"
            )
        pairs: list[Pair] = []
        for name, tensor in running.items():
            values = fresh[name]
            if tensor.data_ptr() in self._lent:
                if values.data_ptr() != tensor.data_ptr():
                    raise OtherShape(
                        f"{path}: has its own tensor {name}, the head in use reads the target's; {REMEDY}"
                    )
                continue
            if values.shape != tensor.shape or values.dtype != tensor.dtype:
                raise OtherShape(
                    f"{path}: tensor {name} is {values.dtype} {list(values.shape)}, that of the head in use "
                    f"is {tensor.dtype} {list(tensor.shape)}; {REMEDY}"
                )
            _must_be_finite(path, name, values)
            pairs.append((tensor, values))
        return pairs

    def _own_stream(self) -> AbstractContextManager[object]:
        """On a GPU the stream of staging, besides that of the steps."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _must_fit(self, need: int) -> None:
        """Raises CheckpointError if a second head of `need` bytes does not fit beside the engine.

        An allocation that fails would first give the engine's cached memory back to the driver.
        """
        if self._stream is None:
            return
        free = torch.cuda.mem_get_info(self._target.device)[0]
        if need + SPARE_BYTES > free + self._num_staged:
            raise CheckpointError(
                f"the new head takes {need >> 20} MiB beside the one in use, {free >> 20} MiB of the GPU are "
                "free; restart the worker with a lower --gpu-memory-share"
            )
        self._num_staged = max(need, self._num_staged)

    def _own(self) -> list[torch.Tensor]:
        """The tensors in use that belong to the head alone."""
        return [one for _, one in self._drafter.parameters() if one.data_ptr() not in self._lent]

    def _wait(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.current_stream(self._target.device).synchronize()


def _must_be_finite(path: Path, name: str, tensor: torch.Tensor) -> None:
    parts = torch.split(tensor.reshape(-1), CHECKED_VALUES) if tensor.is_floating_point() else ()
    if not all(map(_is_finite, parts)):
        raise CheckpointError(
            f"{path}: tensor {name} has numbers that are not finite; use another state of its run"
        )


def _is_finite(part: torch.Tensor) -> bool:
    wide = part.float() if part.element_size() == 1 else part  # torch does not check values of 8 bits
    return bool(wide.isfinite().all())


def _kind(config: DraftConfig) -> str:
    return type(config).__name__.removesuffix("Config")


def _dialect_of(model: DraftModel) -> str:
    """The family of MTP modules, which their config does not tell; "" for other drafters."""
    return model.head.dialect.name if isinstance(model, MtpModel) else ""


def _difference(one: DraftConfig, other: DraftConfig) -> str:
    """The first field in which two configs of one type differ and that a forward depends on; "" if none.

    A head that was trained for more positions than the one in use drafts for as many as that one.
    """
    assert is_dataclass(one), one
    for field in fields(one):
        old, new = getattr(one, field.name), getattr(other, field.name)
        is_free = field.name in ("path", "aux", "dialect")
        if not is_free and old != new and not (field.name == "max_position_embeddings" and new > old):
            return field.name
    return ""
