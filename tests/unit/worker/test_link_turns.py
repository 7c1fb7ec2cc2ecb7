"""A turn of a link thread reads a few messages of a socket, and no longer than others can wait."""

from itertools import pairwise

import pytest
from baton.kvtransfer.transports.polling import MESSAGES_PER_SOCKET, TURN_S, a_few


@pytest.mark.parametrize(
    ("message_s", "read"), [(0.0, MESSAGES_PER_SOCKET), (TURN_S / 4.5, 5), (TURN_S, 1), (100 * TURN_S, 1)]
)
def test_a_turn_reads_one_message_or_more_and_none_after_its_time(message_s: float, read: int) -> None:
    clock = [7.0]
    numbers = []
    for number in a_few(lambda: clock[0]):
        numbers.append(number)
        clock[0] += message_s
    assert numbers[0] == 1
    assert all(after == before + 1 for before, after in pairwise(numbers))
    assert len(numbers) == read
