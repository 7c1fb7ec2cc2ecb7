"""Ranks on GPUs of their own, and ranks that share them in tests."""

import os

import pytest
import torch
from baton.engine.config import EngineConfig
from baton.engine.errors import CheckpointError
from baton.engine.loader import check_ranks, rank_device
from baton.engine.parallel.group import TensorGroup
from baton.engine.parallel.rank_cards import HOST_VARIABLE, VARIABLE, card_of_rank, name_host

CUDA = torch.device("cuda")


def devices(size: int) -> list[torch.device]:
    return [rank_device(CUDA, TensorGroup(rank=rank, size=size)) for rank in range(size)]


def test_each_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert devices(3) == [torch.device("cuda", rank) for rank in range(3)]
    assert rank_device(torch.device("cpu"), TensorGroup(rank=2, size=3)) == torch.device("cpu")
    assert devices(1) == [CUDA]


def test_ranks_of_one_gpu_have_hosts_of_different_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setenv(HOST_VARIABLE, "of the rank before")
    assert devices(4) == [torch.device("cuda", card) for card in (0, 0, 1, 1)]
    hosts = []
    for rank in range(4):
        name_host(rank)
        hosts.append(os.environ[HOST_VARIABLE])
    assert hosts[0] == hosts[2] != hosts[1] == hosts[3]


def test_a_host_keeps_its_name_where_no_gpu_is_shared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    name_host(1)
    assert HOST_VARIABLE not in os.environ


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "²"])
def test_a_wrong_number_is_refused_with_its_value(text: str):
    with pytest.raises(CheckpointError, match=f"{VARIABLE}='{text}'"):
        card_of_rank(1, {VARIABLE: text})


@pytest.mark.parametrize(("shared", "is_refused"), [("1", True), ("2", False)])
def test_more_ranks_than_gpus_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch, toy_checkpoint, shared: str, is_refused: bool
):
    monkeypatch.setenv(VARIABLE, shared)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("baton.engine.loader.resolve_device", lambda _: CUDA)
    config = EngineConfig(model=str(toy_checkpoint("llama")), tp=4)
    if is_refused:
        with pytest.raises(CheckpointError, match="sees 2 GPUs"):
            check_ranks(config)
    else:
        check_ranks(config)
