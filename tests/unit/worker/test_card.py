"""A worker tells routers its GPU: the id that CUDA_VISIBLE_DEVICES gives it, and its name."""

import pytest
import torch
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import KVPool
from baton.worker import identity
from baton.worker.identity import card_of, hello_of, layout_of


@pytest.fixture
def named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


@pytest.mark.parametrize(
    ("device", "visible", "card"),
    [
        ("cuda", "5", "5: NVIDIA H200"),
        ("cuda:1", "3, 7", "7: NVIDIA H200"),
        ("cuda:1", None, "1: NVIDIA H200"),
        ("cuda", "GPU-ab", "GPU-ab: NVIDIA H200"),
        ("cpu", "5", ""),
    ],
)
def test_a_gpu_is_told_as_it_was_given(named, device, visible, card):
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert card_of(torch.device(device), env) == card


def test_the_card_travels_in_the_hello(monkeypatch):
    pool = KVPool(4, MHALayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=4, dtype=torch.float32))
    layout = layout_of(pool, model_fingerprint="f", feature_ids=(), feature_width=0)
    sizes = {"model": "m", "max_context": 8, "max_running": 1, "vocab_size": 9}
    monkeypatch.setattr(identity, "card_of", lambda device, env: "2: NVIDIA H200")
    assert hello_of(layout, pool, role="decode", instance="i", **sizes).card == "2: NVIDIA H200"
