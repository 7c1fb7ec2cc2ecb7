"""Attempts of rooms at a worker: what is known, what a Cancel reaches, and what it keeps from beginning."""

from dataclasses import dataclass

import pytest
from baton.worker.room_table import MAX_CLOSED, RoomTable


@dataclass(frozen=True)
class Try:
    key: tuple[str, int]
    state: str = "running"


@pytest.fixture
def table() -> RoomTable[Try]:
    table: RoomTable[Try] = RoomTable()
    for epoch in (1, 2):
        table.add(Try(("a", epoch)))
    table.add(Try(("b", 0)))
    return table


def test_ended_and_superseded_attempts_stay_known(table: RoomTable[Try]) -> None:
    assert [table.is_known("a", epoch) for epoch in (0, 1, 2, 3)] == [True, True, True, False]
    for room in table:
        table.remove(room)
    assert [table.is_known("a", epoch) for epoch in (0, 1, 2, 3)] == [True, True, True, False]
    assert not table.is_known("c", 0)


def test_a_cancel_reaches_the_attempts_up_to_its_epoch(table: RoomTable[Try]) -> None:
    assert [room.key for room in table.cancel("a", 1)] == [("a", 1)]
    assert [room.key for room in table.cancel("a", 5)] == [("a", 1), ("a", 2)]


def test_an_order_that_arrives_after_its_cancel_starts_nothing(table: RoomTable[Try]) -> None:
    assert table.cancel("c", 1) == []
    assert table.is_known("c", 1)
    assert not table.is_known("c", 2)


def test_the_memory_of_ended_rooms_is_bounded(table: RoomTable[Try]) -> None:
    for number in range(MAX_CLOSED + 1):
        table.cancel(f"{number}", 0)
    assert not table.is_known("0", 0)
    assert table.is_known(f"{MAX_CLOSED}", 0)
