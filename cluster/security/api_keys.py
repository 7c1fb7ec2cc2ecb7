"""API keys of clients: one JSON file that holds no secret.

A key is `bk-<8 hex digits>-<43 letters>`. The digits identify its entry; the letters encode 256 random bits.
The file holds only their SHA-256: a slow hash protects guessable secrets, and these are random. An entry
names the owner, the tenant and the limits, where 0 means unlimited. The file is reloaded when it changes. If
the new content is invalid, the previous keys stay in force.
"""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from ..errors import ConfigError
from .keyring import Name, read_owned, write_owned

logger = logging.getLogger(__name__)

LONGEST_KEY = 128  # characters; the rest of a longer one is ignored
LOOK_AGAIN_S = 0.25  # seconds between two checks for a changed file
NOTHING = "0" * 64

Limit = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Priority = Annotated[int, Meta(ge=-100, le=100)]


class ApiKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the file."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
    name: Name
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Name | None = None  # keys of one tenant share cached prefixes; None: only keys of this name
    priority: Priority = 0  # lower is served first; a request may lower its own priority, not raise it
    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0  # prompt tokens and requested output tokens
    max_requests: Limit = 0  # concurrent requests
    operator: bool = False  # sees the cluster and the figures of all requests, but none of their text
    observer: bool = False  # sees the same as an operator, and may not generate
    no_recording: bool = False  # workers record no token of this tenant for training
    not_after: Annotated[datetime, Meta(tz=True)] | None = None

    def is_valid(self, now: float) -> bool:
        """`now`: seconds since the epoch."""
        return self.not_after is None or now <= self.not_after.timestamp()

    @property
    def salt(self) -> str:
        """Separates the prefix caches of tenants: a hash of the tenant's name, 32 hex digits."""
        tenant = self.tenant or self.name
        return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"baton tenant").hexdigest()


class ApiKeysFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    keys: list[ApiKey] = []


def make_api_key() -> tuple[str, str, str]:
    """Makes a key. Returns (the key, its entry's id, its hash)."""
    name = secrets.token_hex(4)
    key = f"bk-{name}-{secrets.token_urlsafe(32)}"
    return key, name, hash_of(key)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_api_keys(path: Path) -> list[ApiKey]:
    """The entries. Raises ConfigError for an invalid file, and for one that other users can write."""
    keys = read_owned(
        path, ApiKeysFile, forbidden=0o022, fault="writable by others", remedy=f"chmod go-w {path}"
    ).keys
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError(f"{path}: two entries have the same id; remove one")
    return keys


def entries_of(keys: list[ApiKey]) -> dict[str, ApiKey]:
    """The entries by id. A tenant's objection to recording, at any of its keys, holds for all of them."""
    unrecorded = {key.salt for key in keys if key.no_recording}
    return {key.id: replace(key, no_recording=True) if key.salt in unrecorded else key for key in keys}


def write_api_keys(path: Path, keys: list[ApiKey]) -> None:
    """Replaces the file."""
    write_owned(path, ApiKeysFile(keys=keys))


class ApiKeys:
    """The current content of the file.

    `clock` gives seconds since the epoch, `monotonic` seconds for the reload interval.
    """

    def __init__(self, path: Path, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self.path = path
        self._clock, self._monotonic = clock, monotonic
        self._entries = entries_of(read_api_keys(path))
        self._stamp = self._stamp_now()
        self._looked_at = monotonic()

    def __repr__(self) -> str:
        return f"ApiKeys({self.path}, {len(self._entries)} keys)"

    def find(self, presented: str) -> ApiKey | None:
        """The entry of a currently valid key, else None.

        Takes constant time, so that timing reveals nothing about a secret.
        """
        self._look()
        entry = self._entries.get(presented[3:11]) if len(presented) <= LONGEST_KEY else None
        digest = hash_of(presented[:LONGEST_KEY])
        is_equal = hmac.compare_digest(digest, entry.sha256 if entry is not None else NOTHING)
        return entry if entry is not None and is_equal and entry.is_valid(self._clock()) else None

    def _look(self) -> None:
        now = self._monotonic()
        if now - self._looked_at < LOOK_AGAIN_S:
            return
        self._looked_at = now
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._entries = entries_of(read_api_keys(self.path))
        except ConfigError as error:
            logger.warning("API keys stay as they were: %s", error)

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
