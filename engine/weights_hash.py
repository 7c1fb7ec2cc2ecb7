"""The identity of a checkpoint's weights: a fingerprint of tensor samples, and a hash of every byte.

`model_fingerprint` is ready at start: it reads the headers and at most `MAX_SAMPLED_BYTES`. `WeightsHash`
reads every byte in the background and stores the result in a cache file, so a restarted worker has it at
once.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .models.safetensors_file import SafetensorsFile
from .models.weights import find_shards

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 4096
MAX_SAMPLES = 16  # per tensor, evenly spaced, the first and last bytes included
MIN_SAMPLES = 2
MAX_SAMPLED_BYTES = 64 << 20  # for all tensors together, if there are at most 8192
READ_BYTES = 4 << 20
CACHE_FILE = ".baton-weights.json"
CACHE_VERSION = 1
LOWEST_PRIORITY = 19


def model_fingerprint(path: Path) -> str:
    """sha256 (hex) of config.json and, by shard, of name, header, size and samples of every tensor.

    Raises CheckpointError for a shard whose header does not fit its data.
    """
    path = Path(path)
    shards = [SafetensorsFile.read(file) for file in find_shards(path)]
    num_tensors = sum(len(shard.tensors) for shard in shards)
    num_samples = MAX_SAMPLED_BYTES // (SAMPLE_BYTES * max(1, num_tensors))
    digest = hashlib.sha256()
    digest.update(_framed((path / "config.json").read_bytes()))
    for shard in shards:
        digest.update(_framed(shard.path.name.encode()))
        digest.update(_framed(shard.header))
        digest.update(_framed(shard.size.to_bytes(8, "little")))
        for sample in _samples(shard, min(MAX_SAMPLES, max(MIN_SAMPLES, num_samples))):
            digest.update(_framed(sample))
    return digest.hexdigest()


def _samples(shard: SafetensorsFile, count: int) -> Iterator[bytes]:
    """`count` samples of each tensor, or the whole tensor if it is not larger."""
    with shard.path.open("rb") as file:
        for stored in shard.tensors:
            first, size = stored.first, stored.num_bytes
            if size <= count * SAMPLE_BYTES:
                yield _read_at(file.fileno(), first, size)
                continue
            last = size - SAMPLE_BYTES
            for i in range(count):
                yield _read_at(file.fileno(), first + i * last // (count - 1), SAMPLE_BYTES)


@dataclass(frozen=True)
class _Stamp:
    """The identity of a file's content as known to the file system."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "_Stamp":
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class WeightsHash:
    """sha256 over every byte of a checkpoint's weights. `value` is "" until it is known.

    Create it before the weights are loaded. A file that changes later differs from the loaded one and has no
    hash here.
    """

    def __init__(self, path: Path, *, cache_files: Sequence[Path] | None = None) -> None:
        """`cache_files`: candidates for the cache, of which the first writable one is used (default
        `cache_files_of(path)`).

        Raises CheckpointError if the weights are missing.
        """
        self._shards = {shard.name: shard for shard in find_shards(Path(path))}
        self._stamps = {name: _Stamp.of(shard) for name, shard in self._shards.items()}
        self._cache_files = cache_files_of(Path(path)) if cache_files is None else list(cache_files)
        self._thread: threading.Thread | None = None
        known = self._cached()
        self.value = _whole(known) if known.keys() == self._shards.keys() else ""

    def __repr__(self) -> str:
        return f"WeightsHash({self.value[:16] or 'not known yet'}, {len(self._shards)} shards)"

    def start(self) -> None:
        """Hash in a background thread of lowest priority. Idempotent; no-op if the value is known."""
        if not self.value and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weights-hash", daemon=True)
            self._thread.start()

    def wait(self, timeout: float) -> str:
        """The value, after waiting at most `timeout` seconds; "" if it is still unknown."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.value

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # the priority of one thread is Linux's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            digests = self._cached()
            for name in self._shards.keys() - digests.keys():
                digests[name] = _digest_of(self._shards[name])
            if {name: _Stamp.of(shard) for name, shard in self._shards.items()} != self._stamps:
                logger.warning("weights changed on disk after they were loaded: they have no hash")
                return
            self._store(digests)
            self.value = _whole(digests)
            logger.info("weights hashed: %s", self.value)
        except OSError as error:
            logger.warning("weights could not be hashed: %s", error)

    def _cached(self) -> dict[str, str]:
        """Shard -> sha256 (hex), for shards whose stamps match the cache."""
        found: dict[str, str] = {}
        for file in self._cache_files:
            for name, entry in _read_cache(file).items():
                stamp = self._stamps.get(name)
                if stamp is not None and entry.get("stamp") == [stamp.size, stamp.mtime_ns, stamp.inode]:
                    found[name] = str(entry.get("sha256", ""))
        return {name: digest for name, digest in found.items() if len(digest) == 64}

    def _store(self, digests: dict[str, str]) -> None:
        shards = {
            name: {"stamp": [stamp.size, stamp.mtime_ns, stamp.inode], "sha256": digests[name]}
            for name, stamp in self._stamps.items()
        }
        text = json.dumps({"version": CACHE_VERSION, "shards": shards}, indent=1)
        for file in self._cache_files:
            part = file.with_name(f"{file.name}.{os.getpid()}")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                part.write_text(text, encoding="utf-8")
                part.replace(file)
            except OSError:
                continue
            return


def cache_files_of(path: Path) -> list[Path]:
    """Candidates for the hash cache of the checkpoint at `path`: beside the weights, then in the user's cache
    folder.
    """
    folder = path if path.is_dir() else path.parent
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return [folder / CACHE_FILE, user / "baton" / f"weights-{name}.json"]


def _read_cache(file: Path) -> dict[str, dict[str, Any]]:
    """The entries of a cache file; empty if it is missing or malformed."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] != CACHE_VERSION:
            return {}
        return {str(name): dict(entry) for name, entry in content["shards"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _digest_of(shard: Path) -> str:
    digest = hashlib.sha256()
    with shard.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _whole(digests: dict[str, str]) -> str:
    lines = [f"{name} {digest}\n" for name, digest in sorted(digests.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    return os.pread(descriptor, size, offset)


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
