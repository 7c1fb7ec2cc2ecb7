"""The registry of drafters, keyed by the architecture in config.json.

A prefill engine reads only the drafter's config, for the layer outputs to capture. A decode engine loads the
weights and runs the drafter. A new kind of drafter adds a `DraftSource` here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch

from ...errors import CheckpointError
from ...kv.layouts import PageLayout
from ...models.config import ModelConfig
from ...models.config_reader import read_json
from ...models.layers import RMSNorm
from ...parallel.vocabulary import Table
from ..drafting.shape import DraftShape
from .dflash import DflashModel
from .dflash_config import ARCHITECTURE, DflashConfig, load_dflash_config
from .dflash_weights import load_dflash
from .eagle3 import Eagle3Model
from .eagle3_weights import load_eagle3
from .eagle_config import EagleConfig, is_eagle, load_eagle_config
from .eagle_weights import load_eagle
from .mtp import MtpModel
from .mtp_config import MtpConfig, load_mtp_config
from .mtp_names import is_mtp
from .mtp_weights import load_mtp
from .ngram import NgramConfig, NgramModel
from .protocol import Drafter
from .spec_config import AuxSpec, DraftDims, Eagle3Config, load_draft_config


class DraftConfig(Protocol):
    """The fields that every drafter's config has. `aux`: the layer outputs of the target that the drafter
    reads.
    """

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""

    @property
    def aux(self) -> AuxSpec:
        """The layer outputs of the target that the drafter reads."""

    @property
    def dims(self) -> DraftDims:
        """Widths and dtypes of the features and of the draft's own hidden."""


class DraftModel(Protocol):
    """The weights of a drafter, including those shared with the target, before its pools exist."""

    @property
    def num_weights(self) -> int:
        """Number of weights that a draft forward reads, without embedding tables."""

    @property
    def late_rows(self) -> int:
        """The `late_rows` of its drafter."""

    def kv_layout(self, page_size: int) -> PageLayout | None:
        """The layout of the draft's KV in pages of `page_size` tokens; None for a drafter without KV."""

    def check(self, shape: DraftShape) -> None:
        """Raises CheckpointError unless the model can draft steps of `shape`."""

    def drafter(self, *, num_pages: int, page_size: int, capacity: int) -> Drafter:
        """Returns the drafter over pools of its own, with state rows for `capacity` - 1 requests."""


@dataclass(frozen=True, kw_only=True)
class TargetWeights:
    """The weights that a target shares with its drafter: `embed_tokens` and `lm_head`, each `[V, Ht]`.

    `final_norm` stands before `lm_head`. `max_context` is the number of positions to serve, in `dtype` on
    `device`. `steps`: the most draft steps of a decode step.
    """

    embed_tokens: Table
    lm_head: Table
    final_norm: RMSNorm
    steps: int
    max_context: int
    dtype: torch.dtype
    device: torch.device


class DraftSource(Protocol):
    """A drafter's checkpoint. `drafts_blocks`: one forward drafts a whole block, and draft KV depends on no
    later token.
    """

    drafts_blocks: ClassVar[bool]

    @property
    def config(self) -> DraftConfig:
        """The config, read and checked."""

    def load(self, target: TargetWeights) -> DraftModel:
        """Loads the weights and shares those of `target`. Raises CheckpointError if they do not fit."""


@dataclass(frozen=True)
class Eagle3Source:
    """An EAGLE3 head in any dialect."""

    config: Eagle3Config
    drafts_blocks: ClassVar[bool] = False

    def load(self, target: TargetWeights) -> Eagle3Model:
        head = load_eagle3(self.config, dtype=target.dtype, device=target.device)
        head.share(target.embed_tokens, target.lm_head, target.max_context, target.final_norm)
        return Eagle3Model(head)


@dataclass(frozen=True)
class EagleSource:
    """An EAGLE head of the first or second version."""

    config: EagleConfig
    drafts_blocks: ClassVar[bool] = False

    def load(self, target: TargetWeights) -> Eagle3Model:
        head = load_eagle(self.config, dtype=target.dtype, device=target.device)
        head.share(target.embed_tokens, target.lm_head, target.max_context, target.final_norm)
        return Eagle3Model(head)


@dataclass(frozen=True)
class DflashSource:
    """A DFLASH drafter as `DFlashDraftModel` checkpoints hold it."""

    config: DflashConfig
    drafts_blocks: ClassVar[bool] = True

    def load(self, target: TargetWeights) -> DflashModel:
        head = load_dflash(self.config, dtype=target.dtype, device=target.device)
        head.share(target.embed_tokens, target.lm_head, target.max_context)
        return DflashModel(head)


@dataclass(frozen=True)
class MtpSource:
    """Modules of multi-token prediction, in a checkpoint of their own or in the target's."""

    config: MtpConfig
    drafts_blocks: ClassVar[bool] = False

    def load(self, target: TargetWeights) -> MtpModel:
        """Loads the modules that `target.steps` steps use: each of several modules drafts one token."""
        count = max(1, min(self.config.num_modules, target.steps))
        head = load_mtp(self.config, count, dtype=target.dtype, device=target.device)
        head.share(target.embed_tokens, target.lm_head, target.final_norm, target.max_context)
        return MtpModel(head)


@dataclass(frozen=True)
class NgramSource:
    """Drafting by lookup in the request's own tokens (`--draft ngram`); there is no checkpoint."""

    config: NgramConfig
    drafts_blocks: ClassVar[bool] = False

    def load(self, target: TargetWeights) -> NgramModel:
        return NgramModel(self.config, target.max_context, target.device)


# (path, target, directory of the target for errors, dtype that the target runs in) -> the drafter
Reader = Callable[[Path, ModelConfig, Path | None, str | None], DraftSource]


def _read_eagle3(path: Path, target: ModelConfig, target_path: Path | None, dtype: str | None) -> DraftSource:
    return Eagle3Source(load_draft_config(path, target, target_path=target_path, dtype=dtype))


def _read_dflash(path: Path, target: ModelConfig, target_path: Path | None, dtype: str | None) -> DraftSource:
    return DflashSource(load_dflash_config(path, target, dtype=dtype))


# EAGLE3 heads are published under several architecture names, even under their target's, so EAGLE3 is the
# default; see `config_formats`.
READERS: Mapping[str, Reader] = MappingProxyType({ARCHITECTURE: _read_dflash})
OTHER_BLOCK_DRAFTERS = frozenset({"DFlash2DraftModel", "DSparkDraftModel", "DominoDraftModel"})


def read_drafter(
    path: Path, target: ModelConfig, *, target_path: Path | None = None, dtype: str | None = None
) -> DraftSource:
    """Reads the drafter at `path` for a `target` that runs in `dtype` (None: that of its checkpoint).

    Raises CheckpointError naming file, key, value and remedy.
    """
    raw = read_json(Path(path) / "config.json")
    if is_mtp(raw):
        return MtpSource(load_mtp_config(path, target, dtype=dtype))
    if is_eagle(raw):
        return EagleSource(load_eagle_config(path, target, target_path=target_path, dtype=dtype))
    named = raw.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    if first in OTHER_BLOCK_DRAFTERS:
        raise CheckpointError(
            f"{Path(path) / 'config.json'}: architectures {named!r} is a block drafter with extensions that "
            f"baton does not run; use a {ARCHITECTURE}"
        )
    return READERS.get(str(first), _read_eagle3)(path, target, target_path, dtype)
