"""Weights are read whole and in their places, by any number of threads, or a fault names the file."""

import logging
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models import weight_reader
from baton.engine.models.safetensors_file import SafetensorsFile
from baton.engine.models.weight_reader import Piece, pieces_of, read_pieces, reads_of
from safetensors.torch import save_file


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and several threads for little data."""
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 1000)
    monkeypatch.setattr(weight_reader, "BYTES_PER_THREAD", 4000)
    monkeypatch.setattr(weight_reader, "MAX_THREADS", 4)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    tensors = {
        "wide": torch.randn(7, 501, generator=noise),
        "half": torch.randn(3000, generator=noise).to(torch.bfloat16),
        "none": torch.zeros(0, 5),
        "one": torch.randn(1, generator=noise),
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load(
    folder: Path, dtype: torch.dtype, *, step: int = 1
) -> tuple[dict[str, torch.Tensor], weight_reader.ReadReport]:
    """Every `step`-th tensor of the file."""
    path, made, pieces = folder / "model.safetensors", {}, []
    for each in SafetensorsFile.read(path).tensors[::step]:
        made[each.name] = torch.full(each.shape, float("nan"), dtype=dtype)
        assert each.dtype is not None
        pieces += pieces_of(path, each.first, each.dtype, made[each.name])
    return made, read_pieces(pieces)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_piece_lands_in_its_place_and_dtype(tmp_path, dtype):
    wanted = stored(tmp_path)
    made, report = load(tmp_path, dtype)
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor.to(dtype)), name
    assert report.num_threads == 4
    assert report.num_bytes == sum(tensor.nbytes for tensor in wanted.values())


def test_a_small_load_starts_no_thread(tmp_path):
    stored(tmp_path)
    assert load(tmp_path, torch.float32)[1].num_threads == 1


@pytest.mark.usefixtures("small")
def test_a_file_that_ends_early_is_named_and_ends_all_threads(tmp_path):
    stored(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = SafetensorsFile.read(path)
    pieces = [
        piece
        for each in whole.tensors
        for piece in pieces_of(path, each.first, each.dtype, torch.empty(each.shape, dtype=each.dtype))
    ]
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(CheckpointError, match=f"{path}: not a complete safetensors file"):
        read_pieces(pieces)


@pytest.mark.usefixtures("small")
def test_a_long_load_tells_its_progress(tmp_path, monkeypatch, caplog):
    stored(tmp_path)
    preadv = os.preadv
    monkeypatch.setattr(weight_reader, "TELL_EVERY_S", 0.01)
    monkeypatch.setattr(os, "preadv", lambda *args: time.sleep(0.01) or preadv(*args))
    with caplog.at_level(logging.INFO):
        report = load(tmp_path, torch.float32)[1]
    shares = [int(line.split()[1]) for line in caplog.messages if " % [" in line]
    assert shares == sorted(shares)
    assert shares
    assert report.read_s > 0
    assert "read" in str(report)


@pytest.mark.usefixtures("small")
def test_an_error_of_one_thread_is_raised_to_the_caller(tmp_path, monkeypatch):
    stored(tmp_path)

    def refuse(*_):
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(MemoryError, match="no pinned memory"):
        load(tmp_path, torch.float32)


# --- many small tensors -------------------------------------------------------------------------------------


def small_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of 4, 2 and 1 bytes a value in turns, most with odd numbers of values."""
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    tensors = {f"{i:02}": torch.arange(1 + i * 37 % 90).to(dtypes[i % 3]) for i in range(60)}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def wide_pieces(folder: Path) -> list[Piece]:
    """The pieces of all tensors, for targets of another dtype, so that they are staged."""
    path = folder / "model.safetensors"
    return [
        piece
        for each in SafetensorsFile.read(path).tensors
        for piece in pieces_of(path, each.first, each.dtype, torch.empty(each.shape, dtype=torch.float64))
    ]


def reads_counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of all reads from now on."""
    offsets, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: offsets.append(at) or preadv(file, into, at))
    return offsets


@pytest.mark.usefixtures("small")
def test_small_tensors_share_reads_and_land_in_their_places(tmp_path, monkeypatch):
    wanted, offsets = small_tensors(tmp_path), reads_counted(monkeypatch)
    made, report = load(tmp_path, torch.float64)
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor.to(torch.float64)), name
    assert report.num_bytes == sum(tensor.nbytes for tensor in wanted.values())
    assert len(offsets) < len(wanted) / 3


@pytest.mark.usefixtures("small")
def test_tensors_that_share_a_read_may_have_others_between_them(tmp_path, monkeypatch):
    wanted, offsets = small_tensors(tmp_path), reads_counted(monkeypatch)
    made, _ = load(tmp_path, torch.float64, step=2)
    for name, tensor in made.items():
        assert torch.equal(tensor, wanted[name].to(torch.float64)), name
    assert len(offsets) < len(made)


def test_a_read_is_one_stretch_of_a_file_that_fits_a_buffer(tmp_path, monkeypatch):
    small_tensors(tmp_path)
    pieces = wide_pieces(tmp_path)
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 600)
    reads = reads_of(pieces)
    assert [piece for read in reads for piece in read] == pieces
    assert any(len(read) > 2 for read in reads)
    for read in reads:
        assert read[-1].end - read[0].first <= 600
        assert all((piece.first - read[0].first) % piece.dtype.itemsize == 0 for piece in read)
        assert all(one.end == two.first for one, two in pairwise(read))


def test_what_is_read_to_its_place_or_lies_apart_is_read_alone(tmp_path):
    small_tensors(tmp_path)
    path, one, far = tmp_path / "a", torch.empty(8), torch.empty(8, dtype=torch.float64)

    def piece(first: int, target: torch.Tensor, *, path: Path = path, stride: int = 0) -> Piece:
        return Piece(path=path, first=first, dtype=torch.float32, target=target, stride=stride)

    near = 32 + weight_reader.MAX_GAP
    for pair, count in (
        ((piece(0, far), piece(32, far)), 1),
        ((piece(0, far), piece(near, far)), 1),
        ((piece(0, far), piece(near + 4, far)), 2),
        ((piece(0, far), piece(34, far)), 2),  # its values would not begin at a multiple of their size
        ((piece(32, far), piece(0, far)), 2),
        ((piece(0, one), piece(32, one)), 2),
        ((piece(0, far), piece(32, one)), 2),
        ((piece(0, far, stride=64), piece(32, far)), 2),
        ((piece(0, far), piece(32, far, stride=64)), 2),
        ((piece(0, far), piece(32, far, path=tmp_path / "b")), 2),
        ((piece(0, far), piece(32, far.to("meta"))), 2),
    ):
        assert len(reads_of(pair)) == count, pair
