"""An empty batch for a draft forward. Its width and dtype come from `DraftDims`, as those of all other
batches.
"""

import torch

from ...batch.forward_batch import CaptureHidden, ForwardBatch
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
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        slots=nothing,
        page_table=torch.empty((0, 1), dtype=torch.int64, device=device),
        q_lens=[],
        kv_lens=[],
        capture_hidden=CaptureHidden.LAST,
        features=torch.empty((0, width), dtype=getattr(torch, name), device=device),
    )
