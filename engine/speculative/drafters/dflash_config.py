"""Reads from a DFLASH drafter's config.json which target layers it uses, in which order and width.

A prefill engine needs nothing else. Decode does not run DFLASH drafters. Ids name layer outputs. The default
ids follow `build_target_layer_ids` of github.com/z-lab/dflash.
"""

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...models.config import ModelConfig, read_json
from .config_formats import Fields
from .spec_config import AuxSpec, DraftDims, check_ids

ARCHITECTURE = "DFlashDraftModel"
IDS_KEY = "target_layer_ids"


@dataclass(frozen=True, kw_only=True)
class DflashConfig:
    """The directory of a DFLASH drafter and the features that it reads."""

    path: Path
    aux: AuxSpec
    dims: DraftDims


def load_dflash_config(path: Path, target: ModelConfig, *, dtype: str | None = None) -> DflashConfig:
    """Reads `path`/config.json for a drafter of `target`.

    `dtype` is the dtype in which the target runs; None means the dtype of its checkpoint. Raises
    CheckpointError naming file, key, value and remedy.
    """
    file = Path(path) / "config.json"
    raw = read_json(file)
    inner = raw.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise CheckpointError(f"{file}: dflash_config is {inner!r}, expected an object")
    fields = Fields(file=file, dialect=0, values={**raw, **inner})
    hidden = fields.integer("hidden_size")
    if hidden != target.hidden_size:
        problem = (
            f"is {hidden}, but the target has {target.hidden_size}; use the drafter trained for this target"
        )
        raise fields.error("hidden_size", problem)
    given = fields.integers(IDS_KEY)
    ids = _default_ids(fields, target.num_layers) if given is None else given
    check_ids(fields, ids, ids, target, "output", key=IDS_KEY)
    running = target.dtype if dtype is None else dtype
    return DflashConfig(
        path=Path(path),
        aux=AuxSpec(ids=ids, convention="default" if given is None else "output", dtype=running),
        dims=DraftDims(
            target_feature_width=len(ids) * target.hidden_size,
            target_feature_dtype=running,
            self_width=hidden,
            self_dtype=running,
            num_features=len(ids),
        ),
    )


def _default_ids(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """As many layers as the drafter has, evenly spaced over 1 to L-3; the middle layer for a drafter of one
    layer.
    """
    count = fields.integer("num_hidden_layers")
    if count == 1:
        return (num_layers // 2,)
    if num_layers - 3 < count:
        raise fields.error(
            IDS_KEY, f"is absent, and {num_layers} layers of the target have no {count} defaults"
        )
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
