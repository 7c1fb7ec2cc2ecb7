"""Neighbouring slots at the end of a slab, each range for one long run of blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from .slab_slots import Holder, Slot


@dataclass
class SlotRange(Slot):
    """The slots [index, index + count) with one run."""

    count: int = 1


class SlotRanges:
    """The runs in `num_slots` slots, which are numbered from `first` on."""

    def __init__(self, num_slots: int, first: int) -> None:
        self.num_slots, self._first = num_slots, first
        self._held: dict[Holder, SlotRange] = {}

    def __repr__(self) -> str:
        used = sum(held.count for held in self._held.values())
        return f"SlotRanges({used}/{self.num_slots} held)"

    def find(self, holder: Holder) -> SlotRange | None:
        """The slots of a run; None if it has none."""
        return self._held.get(holder)

    def take(self, holder: Holder, most: int, ends_at: float) -> SlotRange | None:
        """Slots for a run: its own if it has some, else free neighbours; None when all slots are in use.

        At most `most`: the first free ones that are as many, or else as many neighbours as there are.
        """
        held = self._held.get(holder)
        if held is not None:
            return held
        gaps = self._gaps()
        if not gaps:
            return None
        index, count = next((gap for gap in gaps if gap[1] >= most), max(gaps, key=lambda gap: gap[1]))
        held = self._held[holder] = SlotRange(index, ends_at, count=min(count, most))
        return held

    def free(self, holder: Holder, index: int) -> bool:
        """Frees the slots of a run; False if it does not begin at slot `index`."""
        held = self._held.get(holder)
        if held is None or held.index != index:
            return False
        del self._held[holder]
        return True

    def free_where(self, is_over: Callable[[Holder, float], bool]) -> None:
        """Frees the slots for which `is_over(holder, end of the lease)` is true."""
        for holder in [holder for holder, held in self._held.items() if is_over(holder, held.ends_at)]:
            del self._held[holder]

    def check_integrity(self) -> None:
        """Asserts that every slot is held at most once, and that no range leaves the slots."""
        gaps = sum(count for _, count in self._gaps())
        assert all(count > 0 for _, count in self._gaps()), self._gaps()
        assert gaps + sum(held.count for held in self._held.values()) == self.num_slots, repr(self)

    def _gaps(self) -> list[tuple[int, int]]:
        """(first slot, number) of the free slots between the ranges, in order."""
        gaps, at = list[tuple[int, int]](), self._first
        for held in sorted(self._held.values(), key=lambda held: held.index):
            gaps.append((at, held.index - at))
            at = held.index + held.count
        gaps.append((at, self._first + self.num_slots - at))
        return [gap for gap in gaps if gap[1] != 0]
