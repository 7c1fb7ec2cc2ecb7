"""The numbers of a head that takes the place of another are looked at in parts, in any dtype."""

from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.speculative.drafters import live_head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("place", range(8))
def test_a_number_that_is_not_finite_is_found_in_any_part(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, place: int
):
    monkeypatch.setattr(live_head, "CHECKED_VALUES", 3)
    values = torch.arange(8.0)
    live_head._must_be_finite(Path("head"), "fc", values.to(dtype).view(2, 4))
    values[place] = float("nan")
    with pytest.raises(CheckpointError, match="head: tensor fc has numbers that are not finite"):
        live_head._must_be_finite(Path("head"), "fc", values.to(dtype).view(2, 4))


def test_a_part_takes_the_memory_of_few_values(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr(live_head, "_is_finite", lambda part: seen.append(part.numel()) or True)
    live_head._must_be_finite(Path("head"), "experts", torch.zeros(2, live_head.CHECKED_VALUES))
    live_head._must_be_finite(Path("head"), "ids", torch.zeros(4, dtype=torch.int64))
    assert seen == [live_head.CHECKED_VALUES] * 2
