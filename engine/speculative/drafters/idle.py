"""An empty batch for a draft forward. Its width and dtype come from `DraftDims`, as those of all other
batches.
"""

from dataclasses import replace

import torch

from ...batch.forward_batch import CaptureHidden, ForwardBatch
from ...batch.padding import idle_batch
from .eagle3_head import DraftPhase
from .spec_config import DraftDims


def idle_draft_batch(
    dims: DraftDims, phase: DraftPhase, *, device: torch.device | str = "cpu"
) -> ForwardBatch:
    """A batch without rows, whose `features` match `phase`: `[0, K*Ht]` of the target or `[0, H]` of the
    draft.
    """
    is_from_target = phase is DraftPhase.FROM_TARGET_FEATURES
    width = dims.target_feature_width if is_from_target else dims.self_width
    name = dims.target_feature_dtype if is_from_target else dims.self_dtype
    features = torch.empty((0, width), dtype=getattr(torch, name), device=device)
    batch = idle_batch(torch.device(device), CaptureHidden.LAST)
    return replace(batch, logit_rows=None, features=features)
