"""Two checkpoints that differ have two fingerprints, and one changed byte has another hash."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine import weights_hash
from baton.engine.errors import CheckpointError
from baton.engine.weights_hash import CACHE_FILE, MAX_SAMPLES, SAMPLE_BYTES, WeightsHash, model_fingerprint
from safetensors.torch import load_file, save_file

Copy = Callable[..., Path]
FLOATS_READ_WHOLE = MAX_SAMPLES * SAMPLE_BYTES // 4


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def big_tensors() -> dict[str, torch.Tensor]:
    """Tensors in the middle of the file, each longer than all its samples together."""
    noise = torch.Generator().manual_seed(1)
    names = ("a.embed", "b.q_proj", "c.o_proj", "d.mlp", "e.lm_head")
    return {name: torch.randn(2 * FLOATS_READ_WHOLE, generator=noise) for name in names}


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_changed_weights_of_one_kind_give_another_fingerprint(toy_copy: Copy, name: str) -> None:
    path = toy_copy("llama")
    before = model_fingerprint(path)
    tensors = load_file(path / "model.safetensors")
    changed = [key for key in tensors if name in key]
    assert changed
    for key in changed:
        tensors[key] = tensors[key] * 1.01
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert model_fingerprint(path) != before


@pytest.mark.parametrize("name", ["b.q_proj", "c.o_proj", "d.mlp"])
def test_every_tensor_of_a_large_shard_contributes_samples(tmp_path: Path, name: str) -> None:
    tensors = big_tensors()
    before = model_fingerprint(checkpoint(tmp_path / "m", tensors))
    tensors[name] = tensors[name] + 1e-3
    assert model_fingerprint(checkpoint(tmp_path / "m", tensors)) != before


def test_the_fingerprint_reads_a_bounded_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: sizes.append(n) or pread(fd, n, at))
    path = checkpoint(tmp_path / "m", big_tensors())
    model_fingerprint(path)
    assert sum(sizes) == 5 * MAX_SAMPLES * SAMPLE_BYTES
    monkeypatch.setattr(weights_hash, "MAX_SAMPLED_BYTES", 5 * 4 * SAMPLE_BYTES)
    sizes.clear()
    model_fingerprint(path)
    assert sum(sizes) == 5 * 4 * SAMPLE_BYTES


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": {"data_offsets": [0, 99999]}}', b'{"a": 1}'])
def test_a_header_that_does_not_fit_its_data_has_no_fingerprint(tmp_path: Path, header: bytes) -> None:
    path = checkpoint(tmp_path / "m", {"a": torch.zeros(4)})
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="safetensors"):
        model_fingerprint(path)


def hashed(path: Path, **places: list[Path]) -> WeightsHash:
    found = WeightsHash(path, **places)
    found.start()
    assert found.wait(30)
    return found


def test_one_byte_between_the_samples_changes_the_hash_alone(tmp_path: Path) -> None:
    tensors = big_tensors()
    path = checkpoint(tmp_path / "m", tensors)
    fingerprint, whole = model_fingerprint(path), hashed(path).value
    tensors["c.o_proj"][SAMPLE_BYTES // 4 + 7] += 1.0  # behind the first sample
    checkpoint(path, tensors)
    assert model_fingerprint(path) == fingerprint
    assert hashed(path).value != whole


def test_a_hash_is_known_at_once_after_it_was_computed(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m", big_tensors())
    assert WeightsHash(path).value == ""
    whole = hashed(path).value
    assert len(whole) == 64
    assert WeightsHash(path).value == whole
    assert sorted(file.name for file in path.iterdir()) == [CACHE_FILE, "config.json", "model.safetensors"]


@pytest.mark.parametrize("change", ["size", "mtime", "inode", "cache"])
def test_a_cached_hash_is_not_used_for_another_file(tmp_path: Path, change: str) -> None:
    path = checkpoint(tmp_path / "m", big_tensors())
    hashed(path)
    file = path / "model.safetensors"
    stat = file.stat()
    if change == "size":
        file.write_bytes(file.read_bytes() + b"\0")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "mtime":
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    elif change == "inode":
        other = path / "other"
        other.write_bytes(file.read_bytes())
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        other.replace(file)
    else:
        (path / CACHE_FILE).write_text('{"version": 1, "shards": {"model.safetensors": 3}}')
    assert WeightsHash(path).value == ""


def test_the_hash_goes_to_the_second_place_where_the_first_is_not_writable(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m", big_tensors())
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    places = [blocked / CACHE_FILE, tmp_path / "cache" / "weights.json"]
    whole = hashed(path, cache_files=places).value
    assert places[1].is_file()
    assert WeightsHash(path, cache_files=places).value == whole


def test_weights_that_change_after_they_were_loaded_have_no_hash(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m", big_tensors())
    loaded = WeightsHash(path)
    os.utime(path / "model.safetensors", ns=(0, 0))
    loaded.start()
    assert loaded.wait(30) == ""
    assert not (path / CACHE_FILE).exists()
