"""Settings of `baton up` that contradict each other are refused before anything is downloaded for them."""

from pathlib import Path

import pytest
from baton.cluster.config.roles import UpConfig
from baton.cluster.errors import ConfigError
from baton.deploy.up.settle import settle


def test_roles_with_unequal_ranks_are_one_line_with_both_numbers(tmp_path: Path):
    config = UpConfig(model=str(tmp_path), prefill=1, decode=1)
    env = {"BATON_PREFILL_TP": "2", "BATON_DECODE_TP": "4"}
    with pytest.raises(ConfigError) as caught:
        settle(config, env, lambda env: (), lambda name, setting: Path(name))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(
        "prefill takes 2 GPUs (--tp) and decode 4 (--tp, --dp-attention), and `baton up` deals"
    )
    assert "give both the same" in message
