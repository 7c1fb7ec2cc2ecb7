"""Recorded samples: bounded, private, whole or absent, and never in the way of a request."""

import logging
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from baton.cluster.errors import ConfigError
from baton.engine.errors import CheckpointError
from baton.engine.sample_shards import RECORDED, Sample, ShardBuffer, shard_bytes
from baton.training.samples import SampleWriter, read_samples
from baton.worker import recorder as recording
from baton.worker.recorder import SampleRecorder
from safetensors.torch import save

VOCAB = 100
TINY = shard_bytes(40, 2)  # two samples of 20 tokens


class Clock:
    def __init__(self):
        self.now = 1_700_000_000.0

    def __call__(self):
        self.now += 1.0
        return self.now


def recorder(directory, name="1" * 8, *, shard=TINY, total=1 << 20, clock=None):
    made = SampleRecorder(directory, name, shard_limit=shard, total_limit=total, clock=clock or Clock())
    made.start()
    return made


def offered(made, count, *, length=20, answer=5, first=0):
    for i in range(first, first + count):
        made.offer([i] * (length - answer), [i] * answer)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def shards(directory):
    return sorted(Path(directory).glob(RECORDED))


def test_finished_sequences_are_samples_that_training_reads(tmp_path):
    made = recorder(tmp_path)
    made.offer([5, 6, 7], [8, 9])
    made.offer([], [10, 11, 12])
    made.offer([1, 2], [3])  # nothing to predict behind one token
    made.close()
    found = read_samples([tmp_path], VOCAB)
    assert [found.sample(i) for i in range(len(found))] == [
        Sample([5, 6, 7, 8, 9], [0, 0, 0, 1, 1]),
        Sample([10, 11, 12], [1, 1, 1]),
    ]
    assert made.counters["recorded_samples"] == 2
    assert made.counters["recorded_tokens"] == 8
    assert made.counters["recorded_bytes"] == shards(tmp_path)[0].stat().st_size
    assert made.counters["record_dropped"] == 0


def test_shards_keep_their_bound_and_the_oldest_make_room(tmp_path):
    total = 5 * TINY
    SampleWriter(tmp_path).flush()
    collected = SampleWriter(tmp_path)
    collected.add(Sample([1, 2, 3], [0, 1, 1]))
    collected.flush()
    made = recorder(tmp_path, total=total)
    seen = set()
    for i in range(30):
        offered(made, 1, first=i)
        until(lambda: not made._waiting)
        sizes = {path: path.stat().st_size for path in shards(tmp_path)}
        assert max(sizes.values(), default=0) <= TINY
        assert sum(sizes.values()) <= total
        seen |= sizes.keys()
    made.close()
    kept = shards(tmp_path)
    assert kept == sorted(seen | set(kept))[-len(kept) :], "the newest are left"
    assert made.counters["record_deleted_shards"] == len(seen | set(kept)) - len(kept) > 0
    assert made.counters["recorded_samples"] == 30
    assert (tmp_path / "samples-00000.safetensors").exists(), "a collector's shard is not deleted"
    assert read_samples([tmp_path], VOCAB).sample(0) == Sample([1, 2, 3], [0, 1, 1])


def test_files_are_private_and_names_are_in_the_order_of_time(tmp_path):
    clock = Clock()
    for name in ("f" * 8, "0" * 8):
        made = recorder(tmp_path, name, clock=clock)
        offered(made, 2)
        made.close()
    first, second = shards(tmp_path)
    assert first.name.endswith("-rffffffff.safetensors")
    assert second.name.endswith("-r00000000.safetensors")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (first, second)} == {0o600}
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in (first, second))


def test_a_sequence_is_dropped_and_counted_when_too_much_waits(tmp_path, monkeypatch):
    blocked, entered = threading.Event(), threading.Event()

    def write(path, content):
        entered.set()
        assert blocked.wait(30)

    monkeypatch.setattr(recording, "write_private", write)
    monkeypatch.setattr(recording, "MAX_WAITING_TOKENS", 100)
    made = recorder(tmp_path)
    offered(made, 3)
    assert entered.wait(30), "the disk takes its time"
    began = time.monotonic()
    offered(made, 9)
    assert time.monotonic() - began < 5, "nobody waits for the disk"
    assert made.counters["record_dropped"] == 4  # 100 tokens are 5 sequences
    blocked.set()
    made.close()
    assert made.counters["recorded_samples"] == 8


def test_a_sequence_longer_than_a_shard_is_dropped(tmp_path):
    made = recorder(tmp_path)
    made.offer([1] * 1000, [2, 3])
    offered(made, 1)
    made.close()
    assert made.counters["record_dropped"] == 1
    assert len(read_samples([tmp_path], VOCAB)) == 1


def test_samples_that_wait_long_for_others_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "SHARD_AGE_S", 0.05)
    made = recorder(tmp_path, shard=1 << 20)
    offered(made, 1)
    until(lambda: shards(tmp_path))
    assert len(read_samples([tmp_path], VOCAB)) == 1
    made.close()


def test_a_full_disk_ends_recording_with_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recording.os, "fsync", no_space)
    made = recorder(tmp_path)
    with caplog.at_level(logging.INFO, "baton"):
        offered(made, 3)
        until(lambda: made.fault)
        offered(made, 50)
        made.close()
    said = [entry.getMessage() for entry in caplog.records]
    assert said == [f"recording ends: {tmp_path}: No space left on device"]
    assert not made.status.is_on
    assert made.status.fault == "No space left on device"
    assert made.counters["recorded_samples"] == 0
    assert made.counters["record_dropped"] == 53
    assert os.listdir(tmp_path) == [], "no partial file is left"


def no_space(descriptor):
    raise OSError(28, "No space left on device")


def test_a_directory_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/baton-samples")):
        with pytest.raises(ConfigError, match="nothing can be written there") as caught:
            SampleRecorder.open(str(path), "1" * 32, shard_mb=1, total_mb=4)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="less than two shards"):
        SampleRecorder.open(str(tmp_path / "new"), "1" * 32, shard_mb=3, total_mb=4)


def test_a_new_directory_is_private_and_old_remains_are_deleted(tmp_path):
    directory = tmp_path / "a" / "b"
    SampleRecorder.open(str(directory), "1" * 32, shard_mb=1, total_mb=4).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    old, young = (directory / f".samples-{i:013d}-r11111111.safetensors.partial" for i in range(2))
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    SampleRecorder.open(str(directory), "1" * 32, shard_mb=1, total_mb=4).close()
    assert [path for path in (old, young) if path.exists()] == [young]


def test_a_torn_recorded_shard_is_passed_over_and_a_collected_one_is_not(tmp_path, caplog):
    made = recorder(tmp_path)
    offered(made, 2)
    made.close()
    [whole] = shards(tmp_path)
    torn = tmp_path / "samples-0000000000001-r22222222.safetensors"
    torn.write_bytes(whole.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, "baton"):
        assert len(read_samples([tmp_path], VOCAB)) == 2
    assert f"{torn}: not a readable shard" in caplog.text
    torn.rename(tmp_path / "samples-00007.safetensors")
    with pytest.raises(CheckpointError, match=r"samples-00007\.safetensors: not a readable shard"):
        read_samples([tmp_path], VOCAB)


@pytest.mark.parametrize(("tokens", "samples"), [(1, 1), (40, 2), (100_000, 1), (5000, 1000)])
def test_the_size_of_a_shard_is_known_before_it_is_written(tokens, samples):
    buffer = ShardBuffer()
    for i in range(samples):
        size = tokens // samples
        buffer.add(Sample([i] * size, bytes(size)))
    size = len(save(buffer.tensors()))
    assert size <= buffer.num_bytes == shard_bytes(buffer.num_tokens, samples)
    assert buffer.num_bytes - size < 512
