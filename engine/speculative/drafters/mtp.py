"""The loaded modules of multi-token prediction (MTP), and the drafter that fits their number.

DeepMtpDrafter    K modules propose K tokens, one each, at the end of the step before
SharedMtpDrafter  one module is applied again to its own hidden, as often as there are draft steps
"""

from ...errors import CheckpointError
from ...kv.layouts import PageLayout
from ..drafting.shape import DraftShape
from .mtp_deep import DeepMtpDrafter
from .mtp_head import MtpHead
from .mtp_prefill import MtpDrafter, modules_layout
from .mtp_shared import SharedMtpDrafter


class MtpModel:
    """The loaded modules of a checkpoint, which share the target's embedding, lm_head and final norm."""

    late_rows = MtpDrafter.late_rows

    def __init__(self, head: MtpHead) -> None:
        self.head = head

    @property
    def num_weights(self) -> int:
        """Number of weights that one proposal reads: one module and the output projection."""
        return self.head.modules[0].num_weights

    def kv_layout(self, page_size: int) -> PageLayout:
        """The layout of the modules' KV in pages of `page_size` tokens."""
        return modules_layout(self.head, page_size)

    def check(self, shape: DraftShape) -> None:
        config = self.head.config
        if self.head.num_modules == 1:
            if shape.topk > config.layer.vocab_size:
                raise CheckpointError(
                    f"spec_topk {shape.topk}: the model has {config.layer.vocab_size} tokens; lower "
                    "--spec-topk"
                )
            return
        if shape.topk > 1:
            raise CheckpointError(
                f"spec_topk {shape.topk}: the {config.num_modules} modules at {config.path} draft a chain, "
                "one token each; use --spec-topk 1"
            )
        if shape.steps > config.num_modules:
            raise CheckpointError(
                f"spec_steps {shape.steps}: the {config.num_modules} modules at {config.path} draft one "
                f"token each; use --spec-steps {config.num_modules} or less"
            )

    def drafter(self, *, num_pages: int, page_size: int, capacity: int) -> SharedMtpDrafter | DeepMtpDrafter:
        kind = SharedMtpDrafter if self.head.num_modules == 1 else DeepMtpDrafter
        return kind(self.head, num_pages=num_pages, page_size=page_size, capacity=capacity)

    def __repr__(self) -> str:
        return f"<MtpModel {self.head!r}>"
