"""The kinds of drafters that can be trained: their settings, configs and first weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch

from ..engine.errors import CheckpointError
from ..engine.models.config import ModelConfig
from ..engine.models.weights import iter_safetensors
from ..engine.speculative.drafters.dflash_config import load_dflash_config
from ..engine.speculative.drafters.mtp_config import load_mtp_config
from ..engine.speculative.drafters.spec_config import Eagle3Config, load_draft_config
from .dflash import DflashTrainee
from .eagle3 import Eagle3Trainee
from .frozen_target import FrozenTarget
from .head_files import (
    default_layers,
    draft_vocabulary,
    spaced_layers,
    unused_token,
    write_dflash_config,
    write_eagle3_config,
    write_mtp_config,
)
from .loss_vocabulary import LossVocabulary
from .mtp import MtpTrainee
from .trainee import Trainee

EAGLE3, DFLASH, MTP = "eagle3", "dflash", "mtp"
KINDS = (EAGLE3, DFLASH, MTP)
DFLASH_FEATURES = 5  # layers that a DFLASH drafter reads
# The options of `baton draft train` that only some kinds have.
OPTIONS = MappingProxyType(
    {
        EAGLE3: ("layers", "draft_vocab", "steps", "sharpness", "missed"),
        DFLASH: ("layers", "block", "draft_layers", "anchors", "mask_token", "loss_vocab"),
        MTP: ("steps", "sharpness", "missed", "loss_vocab"),
    }
)


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What a drafter is and how its loss is taken.

    `layers`: layer outputs of the target that it reads; empty: the default of the kind. `draft_vocab` is that
    of an EAGLE3 head, 0: the target's, or that of `init`. `steps`: drafts of a chain (EAGLE3, MTP).
    `sharpness` multiplies the target's logits in the loss of a chain, and `missed` the loss of a draft for
    each wrong one before it. `block_size`, `num_layers`, `num_anchors` of each sample and `mask_token` (None:
    the rarest, or that of `init`) are a DFLASH drafter's. `loss_vocab`: tokens that the loss of DFLASH and
    MTP runs over, 0: all. `init`: a checkpoint of the same kind to start from.
    """

    kind: str
    layers: tuple[int, ...] = ()
    draft_vocab: int = 0
    steps: int = 7
    sharpness: float = 1.0
    missed: float = 1.0
    block_size: int = 8
    num_layers: int = 3
    num_anchors: int = 64
    mask_token: int | None = None
    loss_vocab: int = 0
    seed: int = 0
    init: Path | None = None

    def resolved(self, model: ModelConfig, counts: torch.Tensor) -> "HeadSettings":
        """With all defaults filled in, for a target and the counts int64 `[V]` of its samples' tokens.

        Raises CheckpointError for values that do not fit the target.
        """
        found = self
        if self.init is not None and self.kind == EAGLE3:
            found = found._as_in(self.init, model)
        if self.init is not None and self.kind == DFLASH:
            # its projection was trained on these layers, and its layers on this token
            there = load_dflash_config(self.init, model)
            mask = there.mask_token_id if self.mask_token is None else self.mask_token
            found = replace(found, layers=self.layers or there.aux.ids, mask_token=mask)
        size = found.draft_vocab or model.vocab_size
        if size > model.vocab_size:
            raise CheckpointError(
                f"--draft-vocab {size}: the target has {model.vocab_size} tokens; give fewer"
            )
        layers = found.layers or self._default_layers(model.num_layers)
        mask = unused_token(counts) if found.mask_token is None else found.mask_token
        if mask >= model.vocab_size:
            raise CheckpointError(
                f"--mask-token {mask}: the target has {model.vocab_size} tokens; give one of them"
            )
        return replace(found, draft_vocab=size, layers=layers, mask_token=mask)

    def about(self) -> dict[str, object]:
        """The settings that a run must keep, as JSON values."""
        common: dict[str, object] = {"kind": self.kind, "layers": list(self.layers)}
        if self.kind == DFLASH:
            names: tuple[str, ...] = ("block_size", "num_layers", "num_anchors", "mask_token", "loss_vocab")
        elif self.kind == MTP:
            names = ("steps", "sharpness", "missed", "loss_vocab")
        else:
            names = ("draft_vocab", "steps", "sharpness", "missed")
        return common | {name: getattr(self, name) for name in names} | {"init": str(self.init or "")}

    def __str__(self) -> str:
        about = self.about().items()
        return ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in about if value not in ("", [])
        )

    def write_config(self, directory: Path, path: Path, model: ModelConfig) -> None:
        """Writes `directory`/config.json of the drafter for the target at `path`."""
        if self.kind == EAGLE3:
            write_eagle3_config(directory, path, model, self.layers, self.draft_vocab)
        elif self.kind == DFLASH:
            assert self.mask_token is not None, "resolved"
            write_dflash_config(
                directory, path, model, self.layers, num_layers=self.num_layers,
                block_size=self.block_size, mask_token=self.mask_token,
            )  # fmt: skip
        else:
            write_mtp_config(directory, path)

    def trainee(
        self, directory: Path, model: ModelConfig, target: FrozenTarget, counts: torch.Tensor
    ) -> Trainee:
        """The drafter of the config that `write_config` wrote to `directory`, with its first weights.

        Raises CheckpointError for a config that servers would read in another way, or an `init` that does
        not fit.
        """
        dtype = str(target.model.dtype).removeprefix("torch.")
        made: Trainee
        vocabulary = None
        if 0 < self.loss_vocab < model.vocab_size:
            vocabulary = LossVocabulary(counts, self.loss_vocab, target.model.device)
        if self.kind == DFLASH:
            config = load_dflash_config(directory, model, dtype=dtype)
            made = DflashTrainee(
                config, target, num_anchors=self.num_anchors, seed=self.seed, vocabulary=vocabulary
            )
        elif self.kind == MTP:
            made = MtpTrainee(
                load_mtp_config(directory, model, dtype=dtype), target, steps=self.steps,
                sharpness=self.sharpness, missed=self.missed, seed=self.seed, vocabulary=vocabulary,
            )  # fmt: skip
        else:
            draft = self._eagle3_config(directory, model, dtype)
            ids = draft_vocabulary(counts, self.draft_vocab)
            if self.init is not None and len(old := _ids_of(self.init, model.vocab_size)) == len(ids):
                ids = old
            made = Eagle3Trainee(
                draft, target, ids, steps=self.steps, sharpness=self.sharpness, missed=self.missed,
                seed=self.seed,
            )  # fmt: skip
        if self.init is not None:
            load_weights(made, self.init)
        return made

    def _eagle3_config(self, directory: Path, model: ModelConfig, dtype: str) -> Eagle3Config:
        draft = load_draft_config(directory, model, dtype=dtype)
        if draft.aux.ids != self.layers:
            raise CheckpointError(
                f"--layers {','.join(map(str, self.layers))}: servers would take this list for inputs of "
                f"layers and read the outputs {list(draft.aux.ids)}; write those, or others from 0 to "
                f"{model.num_layers - 1}"
            )
        return draft

    def _default_layers(self, num_layers: int) -> tuple[int, ...]:
        if self.kind == EAGLE3:
            return default_layers(num_layers)
        if self.kind == DFLASH:
            return tuple(sorted(set(spaced_layers(num_layers, min(DFLASH_FEATURES, max(1, num_layers - 3))))))
        return ()

    def _as_in(self, init: Path, model: ModelConfig) -> "HeadSettings":
        """With the layers of the head at `init`, and its vocabulary unless another is given."""
        draft = load_draft_config(init, model)
        if self.layers and self.layers != draft.aux.ids:
            raise CheckpointError(
                f"--layers {','.join(map(str, self.layers))}: the head at {init} reads "
                f"{list(draft.aux.ids)}; leave the option out"
            )
        return replace(self, layers=draft.aux.ids, draft_vocab=self.draft_vocab or draft.draft_vocab_size)


def _ids_of(init: Path, vocab_size: int) -> torch.Tensor:
    """The target's tokens that the head at `init` drafts, int64 `[Vd]`."""
    offsets = [tensor for name, tensor in iter_safetensors(init) if name == "d2t"]
    return offsets[0] + torch.arange(len(offsets[0])) if offsets else torch.arange(vocab_size)


@torch.no_grad()
def load_weights(trainee: Trainee, init: Path) -> None:
    """Fills `trainee` from the checkpoint at `init`. Of an EAGLE3 head with another vocabulary, it takes the
    output rows of the tokens that both have.

    Raises CheckpointError naming a tensor that is missing or of another shape.
    """
    stored: Mapping[str, torch.Tensor] = dict(iter_safetensors(init))
    own = cast(torch.nn.Module, trainee).state_dict()
    for tensor, name in zip(own.values(), trainee.checkpoint_tensors(), strict=False):
        found = stored.get(name)
        if found is None and name == "lm_head.weight":
            continue  # it shares the target's, from which this one starts
        if found is not None and name == "lm_head.weight" and isinstance(trainee, Eagle3Trainee):
            found = _rows_of(
                found, _ids_of(init, trainee.config.vocab_size), trainee.target_ids.cpu(), tensor
            )
        if found is None or found.shape != tensor.shape:
            has = "none" if found is None else str(list(found.shape))
            raise CheckpointError(
                f"--init {init}: tensor {name} of shape {list(tensor.shape)} is needed, there is {has}; "
                "start from a drafter of the same kind and sizes"
            )
        tensor.copy_(found)


def _rows_of(
    found: torch.Tensor, there: torch.Tensor, wanted: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """The rows of `found`, which are those of tokens `there`, in the order of `wanted`. A token that is not
    there gets its row of `other`, mapped as the rows of tokens in both are best mapped by a matrix.
    """
    places = torch.full((int(torch.cat((there, wanted)).max()) + 1,), -1)
    places[there] = torch.arange(len(there))
    chosen = places[wanted]
    has, rows = chosen >= 0, found.float()[chosen.clamp(min=0)]
    if not has.any() or has.all():
        return torch.where(has[:, None], rows, other.cpu())
    mapped = other.cpu() @ torch.linalg.lstsq(other.cpu()[has], rows[has]).solution
    return torch.where(has[:, None], rows, mapped)
