"""Which ranks of a worker share which parts of its model.

Tensor parallel ranks share all of it and compute the same rows. With data-parallel attention each rank has
attention, dense MLPs and vocabulary whole, with requests and rows of its own, and the ranks share the experts
only. Experts are cut by their widths, or dealt whole to ranks.
"""

from dataclasses import dataclass

from ...kernels.row_ops import ROWS_OF_ONE_RANK, ExpertRows
from .expert_rows import LockstepRows, SummedRows
from .group import SOLO, TensorGroup


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """`tensor`: the ranks that share attention, dense MLPs and vocabulary. `experts`: those that share the
    experts. `by_expert`: each of these has whole experts, otherwise a part of the width of every expert.
    `lockstep`: their rows, if each has its own; None if all have the same.
    """

    tensor: TensorGroup = SOLO
    experts: TensorGroup = SOLO
    by_expert: bool = False
    lockstep: LockstepRows | None = None

    @property
    def is_solo(self) -> bool:
        """Whether one rank has the whole model."""
        return self.tensor.is_solo and self.experts.is_solo

    @property
    def has_own_rows(self) -> bool:
        """Whether ranks that share experts have rows of their own."""
        return self.lockstep is not None

    @property
    def expert_rows(self) -> ExpertRows:
        """The rows that the experts of a layer compute."""
        if self.lockstep is not None:
            return self.lockstep
        return ROWS_OF_ONE_RANK if self.experts.is_solo else SummedRows(self.experts)

    @property
    def setting(self) -> str:
        """The settings that ask for it, for error messages."""
        of_attention = self.has_own_rows
        name = f"dp_attention {self.experts.size}" if of_attention else f"tp {self.tensor.size}"
        return f"{name} with ep" if self.by_expert else name


ALONE = Sharing()


def tensor_parallel(group: TensorGroup, *, by_expert: bool = False) -> Sharing:
    """The ranks of `group` share all parts of the model."""
    return Sharing(tensor=group, experts=group, by_expert=by_expert)


def attention_parallel(group: TensorGroup, *, by_expert: bool = False) -> Sharing:
    """The ranks of `group` share the experts; each has the rest of the model, and rows, of its own."""
    return Sharing(experts=group, by_expert=by_expert, lockstep=LockstepRows(group))
