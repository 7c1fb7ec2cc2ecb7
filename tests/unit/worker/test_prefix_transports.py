"""The ways by which prefixes travel from decode to prefill, by what a decode worker has memory for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig
from baton.cluster.protocol.messages import Layout
from baton.worker import hand_off
from baton.worker.hand_off import EndFacts, prefix_end, with_prefix_pulls

LAYOUT = Layout(
    fingerprint="f", dtype="float32", page_size=4, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=400
)
ALL = ("cuda_slab", "shm", "nixl", "zmq_blocks")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What the ends are opened with."""
    found: list[tuple[Any, Any]] = []
    for name in ("open_sender", "open_receiver"):
        monkeypatch.setattr(hand_off, name, lambda names, setup: found.append((names, setup)))
    monkeypatch.setattr(hand_off, "planes_of", lambda pool, features: None)
    monkeypatch.setattr(hand_off, "TwoWayTransport", lambda **ends: None)
    return found


def facts(device_slab_bytes: int) -> EndFacts:
    engine: Any = SimpleNamespace(
        pool=SimpleNamespace(device=torch.device("cuda")),
        group=SimpleNamespace(rank=0, size=1),
        sizes=SimpleNamespace(device_slab_bytes=device_slab_bytes),
    )
    return EndFacts(
        instance="a" * 32, layout=LAYOUT, engine=engine, keyring=None, ciphers=(), transports=ALL,
        clock=lambda: 0.0, reach=lambda site: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "expected"), [(512 << 20, ("cuda_slab", "shm", "zmq_blocks")), (0, ("shm", "zmq_blocks"))]
)
def test_decode_offers_prefixes_in_device_memory_if_it_has_some(
    opened: list[tuple[Any, Any]], size: int, expected: tuple[str, ...]
) -> None:
    config = load_config(DecodeConfig, ["--model", "m"], {})
    prefix_end(config, facts(size), None)  # type: ignore[arg-type]
    ((names, setup),) = opened
    assert names == expected
    assert (setup.device_slab_bytes, setup.slab_flag) == (size, "--prefix-slab-mb")


def test_prefill_takes_whatever_decode_has(opened: list[tuple[Any, Any]]) -> None:
    config = load_config(PrefillConfig, ["--model", "m"], {})
    with_prefix_pulls(None, config, facts(0), None)  # type: ignore[arg-type]
    ((names, _),) = opened
    assert names == ("cuda_slab", "shm", "zmq_blocks")


def test_memory_for_prefixes_is_of_no_use_without_offers(caplog: pytest.LogCaptureFixture) -> None:
    arguments = ["--model", "m", "--offer-prefixes", "off", "--prefix-slab-mb", "512"]
    load_config(DecodeConfig, arguments, {})
    assert "--prefix-slab-mb is ignored" in caplog.text
