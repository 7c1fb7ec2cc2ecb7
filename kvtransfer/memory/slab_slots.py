"""The slots of a slab, as prefill tracks them: the block in each slot and the end of its lease."""

from collections.abc import Callable
from dataclasses import dataclass

from ...cluster.protocol.slab_messages import SlabBlock

Holder = tuple[str, int, int]  # room, epoch, block


@dataclass
class Slot:
    """A slot with a block."""

    index: int
    ends_at: float
    header: SlabBlock | None = None  # None while it is being filled
    is_filling: bool = False  # a move is under way


class SlabSlots:
    """The block in each of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._held: dict[Holder, Slot] = {}

    def __repr__(self) -> str:
        return f"SlabSlots({len(self._held)}/{self.num_slots} held)"

    @property
    def num_held(self) -> int:
        """Slots with a block."""
        return len(self._held)

    def take(self, holder: Holder, ends_at: float) -> Slot | None:
        """A slot for a block: the block's own if it has one, else a free one; None when all are in use."""
        slot = self._held.get(holder)
        if slot is None and self._free:
            slot = self._held[holder] = Slot(self._free.pop(), ends_at)
        return slot

    def free(self, holder: Holder, index: int) -> bool:
        """Frees a slot; False if the slot does not hold this block."""
        slot = self._held.get(holder)
        if slot is None or slot.index != index:
            return False
        self._give_back(holder)
        return True

    def free_where(self, is_over: Callable[[Holder, float], bool]) -> None:
        """Frees the slots for which `is_over(holder, end of the lease)` is true."""
        for holder in [holder for holder, slot in self._held.items() if is_over(holder, slot.ends_at)]:
            self._give_back(holder)

    def check_integrity(self) -> None:
        """Asserts that every slot is either free or held, exactly once."""
        indices = self._free + [slot.index for slot in self._held.values()]
        assert sorted(indices) == list(range(self.num_slots)), indices

    def _give_back(self, holder: Holder) -> None:
        self._free.append(self._held.pop(holder).index)
