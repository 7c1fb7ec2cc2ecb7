"""Keys on disk: the key pairs of this host, and the list of admitted peers.

    DIR/prefill.key   a key pair, mode 0600; likewise router.key and decode.key, for the roles that run on
                      this host
    DIR/peers.json    every admitted public key with role and name, and the moment after which it is refused

Keys are CURVE keys of 32 bytes, written as 64 hex digits, which need no quoting in shells and addresses. A
peer may have several keys while one replaces another; the newest comes last. A key has one role and one name.
`peers.json` is reloaded when it changes, so peers are added and revoked without a restart. Existing
connections are not closed.
"""

import os
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import zmq
from msgspec import Meta, Struct
from zmq.utils import z85

from ..errors import ConfigError

ROLES = ("router", "prefill", "decode")
PEERS = "peers.json"
MAX_FILE_BYTES = 1 << 20
KEY_BYTES = 32

Role = Annotated[str, Meta(pattern=r"^(router|prefill|decode)\Z")]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
HexKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
T = TypeVar("T")


class Peer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One admitted key."""

    role: Role
    name: Name
    public: HexKey
    not_after: Annotated[datetime, Meta(tz=True)] | None = None  # None: until it is removed

    @property
    def user(self) -> str:
        """The identity that ZAP attaches to every message of this peer: `prefill/p0`."""
        return f"{self.role}/{self.name}"

    def is_valid(self, now: float) -> bool:
        """`now`: seconds since the epoch."""
        return self.not_after is None or now <= self.not_after.timestamp()


class PeersFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of peers.json."""

    peers: list[Peer] = []


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ROLE.key."""

    role: Role
    name: Name
    public: HexKey
    secret: HexKey

    def __repr__(self) -> str:
        return f"KeyFile({self.role}/{self.name}, {self.public[:8]})"


@dataclass(frozen=True)
class Curve:
    """The keys of one socket, 32 bytes each.

    `server` is the server's public key on a client socket, None on a server socket.
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes | None = None


class AllowList:
    """The current content of a directory's peers.json.

    Thread-safe, since it is read into one immutable value.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = directory / PEERS
        self._clock = clock
        self._read: tuple[tuple[int, int, int], tuple[Peer, ...]] | None = None  # (mtime, inode, size), peers

    def __repr__(self) -> str:
        return f"AllowList({self.path})"

    def find(self, public: str, roles: Collection[str]) -> Peer | None:
        """The peer of this key, if it has one of `roles` and is not past its end. Raises ConfigError."""
        for peer in self._peers():
            if peer.public == public:
                return peer if peer.role in roles and peer.is_valid(self._clock()) else None
        return None

    def of_role(self, role: str) -> list[Peer]:
        """The valid keys of a role, the newest first. Raises ConfigError."""
        now = self._clock()
        return [peer for peer in reversed(self._peers()) if peer.role == role and peer.is_valid(now)]

    def _peers(self) -> tuple[Peer, ...]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be read ({error.strerror}); make it with `baton keys init`"
            ) from None
        stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
        if self._read is None or self._read[0] != stamp:
            self._read = (stamp, tuple(read_peers(self.path.parent)))
        return self._read[1]


@dataclass(frozen=True)
class Keyring:
    """A process's own key pair and its admitted peers."""

    own: KeyFile
    peers: AllowList

    def called(self) -> Curve:
        """The keys of a server socket."""
        return Curve(bytes.fromhex(self.own.public), bytes.fromhex(self.own.secret))

    def calling(self, public: str) -> Curve:
        """The keys of a client socket that connects only to the owner of `public` (64 hex digits)."""
        return Curve(bytes.fromhex(self.own.public), bytes.fromhex(self.own.secret), bytes.fromhex(public))


def load_keyring(directory: str, role: str) -> Keyring | None:
    """The keys of `role` in the directory that `--keys` names; None without one. Raises ConfigError."""
    if not directory:
        return None
    keyring = Keyring(read_key(Path(directory), role), AllowList(Path(directory)))
    keyring.peers.of_role(role)  # an unreadable list is an error at the start, not at the first peer
    return keyring


# --- addresses ----------------------------------------------------------------------------------------------


def with_key(endpoint: str, public: str) -> str:
    """An endpoint with the public key of its server: `tcp://10.0.0.2:7200#<64 hex digits>`."""
    return f"{endpoint}#{public}"


def split_key(endpoint: str) -> tuple[str, str]:
    """(endpoint, key) of an address made by `with_key`; the key is "" where there is none."""
    address, mark, key = endpoint.rpartition("#")
    is_key = len(key) == 2 * KEY_BYTES and set(key) <= set("0123456789abcdef")
    return (address, key) if mark and is_key else (endpoint, "")


# --- files --------------------------------------------------------------------------------------------------


def make_key(role: str, name: str) -> KeyFile:
    """A new key pair."""
    public, secret = (z85.decode(half).hex() for half in zmq.curve_keypair())
    return KeyFile(role=role, name=name, public=public, secret=secret)


def read_key(directory: Path, role: str) -> KeyFile:
    """The key pair of a role. Raises ConfigError, also when other users can read the file."""
    path = directory / f"{role}.key"
    key = read_owned(path, KeyFile, forbidden=0o077, fault="readable by others", remedy=f"chmod 600 {path}")
    if key.role != role:
        remedy = f"make one with `baton keys init {directory} --role {role}`"
        raise ConfigError(f"{path}: holds the key of a {key.role}; {remedy}")
    public = zmq.curve_public(z85.encode(bytes.fromhex(key.secret)))
    if z85.decode(public).hex() != key.public:
        raise ConfigError(f"{path}: public and secret key do not belong together; copy the file again")
    return key


def read_peers(directory: Path) -> list[Peer]:
    """The peers of a directory. Raises ConfigError, also when other users can write the list."""
    path = directory / PEERS
    peers = read_owned(
        path, PeersFile, forbidden=0o022, fault="writable by others", remedy=f"chmod go-w {path}"
    ).peers
    seen: set[str] = set()
    for peer in peers:
        if peer.public in seen:
            raise ConfigError(
                f"{path}: key {peer.public[:8]}.. stands there twice; a key has one role and one name"
            )
        seen.add(peer.public)
    return peers


def write_key(directory: Path, key: KeyFile) -> None:
    """Replaces the key pair of a role. Raises ConfigError."""
    write_owned(directory / f"{key.role}.key", key)


def write_peers(directory: Path, peers: list[Peer]) -> None:
    """Replaces peers.json. Raises ConfigError."""
    write_owned(directory / PEERS, PeersFile(peers=peers))


def end_of(seconds: float, now: float) -> datetime:
    """The value of `not_after` for an end `seconds` after `now` (seconds since the epoch)."""
    return datetime.fromtimestamp(int(now + seconds), timezone.utc)


def read_owned(path: Path, kind: type[T], *, forbidden: int, fault: str, remedy: str) -> T:
    """Reads a JSON file. Owner and mode are checked on the open file, so it cannot be swapped in between.

    Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            # Kubernetes mounts a pod's secrets as root's, readable by the pod's group
            mask = forbidden & ~0o040 if found.st_uid == 0 != os.geteuid() else forbidden
            if stat.S_IMODE(found.st_mode) & mask:
                raise ConfigError(f"{path}: is {fault}; {remedy}")
            if found.st_uid not in (0, os.geteuid()):
                raise ConfigError(f"{path}: belongs to another user; chown it to the user that runs baton")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path}: cannot be read ({reason}); make it with `baton keys init`") from None
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not a file of `baton keys`: {error}") from None


def write_owned(path: Path, content: Struct) -> None:
    """Writes a temporary file and renames it, so that a reader sees the old content or the new.

    Raises ConfigError.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror or error}); check the directory"
        ) from None
