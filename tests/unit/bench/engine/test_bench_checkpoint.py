"""`baton bench checkpoint` writes loadable checkpoints: equal weights, equal tokens, no overwritten files."""

from pathlib import Path

import pytest
import torch
from baton.bench.engine.checkpoint import main
from baton.bench.engine.model import random_head, random_target
from baton.engine.models.weights import load_model
from baton.engine.speculative.drafters.eagle3_weights import load_eagle3
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.engine.weights_hash import model_fingerprint
from baton.router.text.tokenizer import load_tokenizer

CPU = torch.device("cpu")
WRITE = [
    "--shape",
    "toy",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--draft-vocab",
    "300",
    "--accept-length",
    "2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bench") / "checkpoint"
    assert main([str(made), *WRITE]) == 0
    return made


def test_servers_load_the_weights_that_were_made(folder: Path) -> None:
    model, config = load_model(folder / "target", dtype=torch.float32)
    for (name, read), (_, made) in zip(
        model.tensors(), random_target(config, torch.float32, CPU).tensors(), strict=True
    ):
        assert torch.equal(read, made), name
    drafts = load_draft_config(folder / "head", config, dtype="float32", convention="auto")
    head, made_head = load_eagle3(drafts, dtype=torch.float32), random_head(drafts, 2, torch.float32, CPU)
    assert head.lm_head is not None
    assert torch.equal(head.lm_head, made_head.lm_head)
    for (name, read), (_, made) in zip(head.tensors(), made_head.tensors(), strict=True):
        assert torch.equal(read, made), name
    assert drafts.aux.ids == (1, 2)
    assert len(model_fingerprint(folder / "target")) == 64


def test_every_token_writes_something_and_text_is_read_byte_for_byte(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "target"))
    ids = tokenizer.encode("hé a")
    assert len(ids) == len("hé a".encode())
    assert min(ids) >= 4
    backend = tokenizer._backend
    assert backend.decode(ids) == "hé a"
    assert all(backend.decode([n]) for n in range(512))


def test_an_existing_checkpoint_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), *WRITE]) == 1
    assert f"{folder / 'target'} exists; name another directory" in capsys.readouterr().err


def test_a_checkpoint_has_the_layers_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "some"), *WRITE, "--layers", "2"]) == 0
    model, config = load_model(tmp_path / "some" / "target", dtype=torch.float32)
    assert config.num_layers == 2
    assert {name.split(".")[2] for name, _ in model.tensors() if ".layers." in name} == {"0", "1"}
    assert main([str(tmp_path / "more"), *WRITE, "--layers", "99"]) == 1
    assert "--layers 99: toy has" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "new"), "--shape", "toy", "--device", "cuda"]) == 1
    assert "no usable CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
