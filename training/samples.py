"""Training samples on disk: token ids and loss masks in bounded safetensors shards, and their batches.

`engine/sample_shards.py` describes a shard. A collector's shards are `samples-NNNNN.safetensors`. A shard is
written under another name and renamed when it is whole.
"""

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..engine.errors import CheckpointError
from ..engine.host_copy import to_device
from ..engine.sample_shards import PATTERN, RECORDED, Sample, shard_tensors
from .tensor_files import write_tensors

logger = logging.getLogger(__name__)

SHARD_TOKENS = 1 << 20  # so many at most are lost with a collector that is killed
WIDTH_STEP = 8
SORT_WINDOW = 1024  # samples of a window that are sorted by length, so that batches have little padding


def padded(length: int) -> int:
    """The width of a batch of samples of `length` tokens: rows of matrices begin at aligned addresses."""
    return -(-length // WIDTH_STEP) * WIDTH_STEP


@dataclass(frozen=True)
class Batch:
    """`tokens` int64 `[B, L]` and `mask` bool `[B, L]`, padded with token 0 and False on the right.

    `tokens` may be on any device, `mask` is on the host. `num_samples` counts the rows of all ranks. `seed`
    is for what a drafter draws at random for this batch.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    num_samples: int
    seed: int = 0

    def to(self, device: torch.device) -> "Batch":
        return replace(self, tokens=to_device(self.tokens, device))


class SampleWriter:
    """Writes samples to shards of `directory`, behind the shards that are there."""

    def __init__(self, directory: Path, shard_tokens: int = SHARD_TOKENS) -> None:
        self._directory, self._shard_tokens = directory, shard_tokens
        directory.mkdir(parents=True, exist_ok=True)
        self._waiting: list[Sample] = []
        self._num_tokens = 0

    def add(self, sample: Sample) -> None:
        """Adds a sample of at least two tokens; shorter ones predict nothing and are left out."""
        if len(sample.tokens) != len(sample.mask):
            raise ValueError(f"{len(sample.tokens)} tokens with a mask of {len(sample.mask)}")
        if len(sample.tokens) < 2:
            return
        self._waiting.append(sample)
        self._num_tokens += len(sample.tokens)
        if self._num_tokens >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Writes the samples that wait, if any. Raises CheckpointError if the disk takes no more."""
        if not self._waiting:
            return
        # counted now and from the last name: a shard that was deleted must not free the name of another one
        path = self._directory / f"samples-{self._next_number():05d}.safetensors"
        write_tensors(path, shard_tensors(self._waiting))
        self._waiting, self._num_tokens = [], 0

    def _next_number(self) -> int:
        names = (path.stem.rpartition("-")[2] for path in self._directory.glob(PATTERN))
        return max((int(name) + 1 for name in names if name.isdecimal()), default=0)


@dataclass(frozen=True)
class SampleSet:
    """All samples of some shards in memory: `tokens` int32 `[T]`, `mask` uint8 `[T]`, `offsets` `[N+1]`."""

    tokens: torch.Tensor
    mask: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def lengths(self) -> list[int]:
        return (self.offsets[1:] - self.offsets[:-1]).tolist()

    def sample(self, index: int) -> Sample:
        start, end = self.offsets[index : index + 2].tolist()
        return Sample(self.tokens[start:end].tolist(), self.mask[start:end].tolist())

    def prompt(self, index: int) -> tuple[int, ...]:
        """The tokens of a sample before the first generated one."""
        start, end = self.offsets[index : index + 2].tolist()
        generated = self.mask[start:end].nonzero()
        count = int(generated[0]) if len(generated) else end - start
        return tuple(self.tokens[start : start + count].tolist())

    def without(self, prompts: Container[tuple[int, ...]]) -> "SampleSet":
        """The samples whose prompt is not among `prompts`."""
        kept = [index for index in range(len(self)) if self.prompt(index) not in prompts]
        if len(kept) == len(self):
            return self
        spans = [slice(*self.offsets[index : index + 2].tolist()) for index in kept]
        lengths = torch.tensor([0, *(span.stop - span.start for span in spans)])
        empty = [self.tokens[:0]], [self.mask[:0]]
        tokens = torch.cat([*empty[0], *(self.tokens[span] for span in spans)])
        mask = torch.cat([*empty[1], *(self.mask[span] for span in spans)])
        return SampleSet(tokens, mask, lengths.cumsum(0))

    def split(self, num_held_out: int) -> tuple["SampleSet", "SampleSet"]:
        """(all but the last `num_held_out` samples, those)."""
        count = len(self) - num_held_out
        if not 0 < count <= len(self):
            raise CheckpointError(
                f"{num_held_out} of {len(self)} samples are held out; collect more or hold out fewer"
            )
        middle = int(self.offsets[count])
        first = SampleSet(self.tokens[:middle], self.mask[:middle], self.offsets[: count + 1])
        last = SampleSet(self.tokens[middle:], self.mask[middle:], self.offsets[count:] - middle)
        return first, last

    def counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token was generated, int64 `[V]`."""
        return torch.bincount(self.tokens[self.mask.bool()].long(), minlength=vocab_size)


def read_samples(directories: Iterable[Path], vocab_size: int) -> SampleSet:
    """The samples of all shards of `directories`.

    Raises CheckpointError naming the file for a shard that is torn, malformed or of another vocabulary. A
    torn shard that a decode worker recorded, and one that it deleted meanwhile, is passed over.
    """
    directories = list(directories)
    paths = [path for directory in directories for path in sorted(Path(directory).glob(PATTERN))]
    found = [_recorded_shard(path, vocab_size) for path in paths]
    shards = [shard for shard in found if shard is not None]
    if not shards:
        raise CheckpointError(
            f"{', '.join(map(str, directories)) or 'no directory'}: no {PATTERN}; run `baton draft collect`"
        )
    starts = [0]
    for shard in shards:
        starts.append(starts[-1] + len(shard["tokens"]))
    offsets = [shard["offsets"][:-1] + start for shard, start in zip(shards, starts[:-1], strict=True)]
    return SampleSet(
        torch.cat([shard["tokens"] for shard in shards]),
        torch.cat([shard["mask"] for shard in shards]),
        torch.cat([*offsets, torch.tensor(starts[-1:])]),
    )


def _recorded_shard(path: Path, vocab_size: int) -> dict[str, torch.Tensor] | None:
    """The tensors of a shard; None for a recorded one that is gone or torn, which is logged."""
    try:
        return _read_shard(path, vocab_size)
    except UnreadableShard as error:
        if not path.match(RECORDED):
            raise
        logger.warning("%s: passed over", error)
        return None


class UnreadableShard(CheckpointError):
    """A shard that is torn, or that was deleted meanwhile."""


def _read_shard(path: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    remedy = "delete the file or collect again"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UnreadableShard(f"{path}: not a readable shard ({error}); {remedy}") from None
    wanted = {"tokens": torch.int32, "mask": torch.uint8, "offsets": torch.int64}
    for name, dtype in wanted.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != dtype or tensor.dim() != 1:
            raise CheckpointError(f"{path}: tensor {name} is not a {dtype} vector; {remedy}")
    tokens, offsets = tensors["tokens"], tensors["offsets"]
    is_partition = (
        len(offsets) > 1
        and int(offsets[0]) == 0
        and int(offsets[-1]) == len(tokens) == len(tensors["mask"])
        and bool((offsets[1:] > offsets[:-1]).all())
    )
    if not is_partition:
        raise CheckpointError(f"{path}: offsets do not divide its {len(tokens)} tokens; {remedy}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise CheckpointError(
            f"{path}: token {int(tokens.max())} is outside the vocabulary of {vocab_size}; "
            "these samples are of another model"
        )
    return {name: tensors[name] for name in wanted}


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Divides samples into batches of at most `max_tokens` padded tokens, cut to `max_length` tokens.

    The batches of an epoch depend on `seed` and the epoch alone, so that a resumed run continues the same
    sequence. Each rank takes every `num_ranks`-th batch; an incomplete last group is left out.
    """

    samples: SampleSet
    max_tokens: int
    max_length: int
    seed: int
    rank: int = 0
    num_ranks: int = 1

    def groups(self, epoch: int) -> list[list[int]]:
        """The sample indices of each batch of all ranks."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.samples), generator=generator).tolist()
        lengths = [padded(min(length, self.max_length)) for length in self.samples.lengths()]
        groups: list[list[int]] = []
        for start in range(0, len(order), SORT_WINDOW):
            window = sorted(order[start : start + SORT_WINDOW], key=lambda index: (lengths[index], index))
            group: list[int] = []
            for index in window:
                if group and lengths[index] * (len(group) + 1) > self.max_tokens:
                    groups.append(group)
                    group = []
                group.append(index)
            groups.append(group)
        shuffled = torch.randperm(len(groups), generator=generator).tolist()
        return [groups[index] for index in shuffled]

    def steps(self, epoch: int) -> int:
        """Steps of an epoch: batches of each rank."""
        return len(self.groups(epoch)) // self.num_ranks

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of this rank from step `first` of the epoch."""
        groups = self.groups(epoch)
        for step in range(first, len(groups) // self.num_ranks):
            both = groups[step * self.num_ranks : (step + 1) * self.num_ranks]
            seed = ((self.seed * 1_000_003 + epoch) * 1_000_003 + step) * self.num_ranks + self.rank
            yield self._batch(both[self.rank], sum(map(len, both)), seed % (1 << 63))

    def _batch(self, group: Sequence[int], num_samples: int, seed: int) -> Batch:
        offsets = self.samples.offsets
        bounds = [offsets[index : index + 2].tolist() for index in group]
        spans = [(start, min(end, start + self.max_length)) for start, end in bounds]
        width = padded(max(end - start for start, end in spans))
        tokens = torch.zeros(len(spans), width, dtype=torch.int64)
        mask = torch.zeros(len(spans), width, dtype=torch.bool)
        for row, (start, end) in enumerate(spans):
            tokens[row, : end - start] = self.samples.tokens[start:end]
            mask[row, : end - start] = self.samples.mask[start:end].bool()
        return Batch(tokens, mask, num_samples, seed)
