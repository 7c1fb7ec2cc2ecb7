"""Blocks sealed with AES-128-GCM (NIST SP 800-38D): without the transfer's key no block can be made, changed or read.

Key: 16 random bytes per transfer, that is per (room, epoch, both instances, `have`). Prefill makes it when decode attaches
and tells it with every announcement, over CURVE; it ends with the room. A fresh key, and not one derived from a secret of
the link, since a room that is offered or attached again under the same names must not meet its old nonces, and since
nothing that outlives a transfer is then worth stealing.

Nonce: block number (8 bytes) | attempt (4 bytes), big-endian. `Sealer` owns the key and counts the attempts of each block,
so that no nonce is used twice, whatever the peer asks for and however often a send fails.

Associated data: room | epoch | block | size | fingerprint of the layout. A block of another place does not open here.
"""

import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ...cluster.errors import DigestMismatch, LocalProtocolError, RemoteProtocolError

KEY_BYTES = 16
TAG_BYTES = 16
MAX_ATTEMPTS = 2**31 - 1  # as Block.attempt
_NONCE = struct.Struct(">QI")
_PLACE = struct.Struct(">16sQQQ")


@dataclass(frozen=True)
class BlockName:
    """What the bytes of a block are. `room`: 32 hex digits; `size`: bytes of the block when it is open."""

    room: str
    epoch: int
    block: int
    size: int
    fingerprint: str

    @property
    def associated_data(self) -> bytes:
        """Of fixed widths up to the fingerprint, which comes last: no two names give the same bytes."""
        return (
            _PLACE.pack(bytes.fromhex(self.room), self.epoch, self.block, self.size)
            + self.fingerprint.encode()
        )


class Sealer:
    """The key of one transfer in prefill's hands."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
        self.key = key
        self._cipher = AESGCM(key)
        self._attempts: dict[int, int] = {}  # block -> how often it was sealed

    def __repr__(self) -> str:
        return f"Sealer(blocks={len(self._attempts)})"

    def seal(self, name: BlockName, plain: memoryview, sealed: memoryview) -> int:
        """Writes ciphertext and tag of `plain` into `sealed`, which is TAG_BYTES longer; returns the attempt.

        Raises LocalProtocolError when the nonces of a block are used up.
        """
        attempt = self._attempts.get(name.block, 0)
        if attempt > MAX_ATTEMPTS:
            raise LocalProtocolError(f"block {name.block} of room {name.room} was sealed {attempt} times")
        self._attempts[name.block] = attempt + 1
        self._cipher.encrypt_into(_NONCE.pack(name.block, attempt), plain, name.associated_data, sealed)
        return attempt


class Opener:
    """The key of one transfer in decode's hands."""

    def __init__(self, key: bytes) -> None:
        """Raises RemoteProtocolError for what cannot be a key."""
        if len(key) != KEY_BYTES:
            raise RemoteProtocolError(f"a transfer's key has {KEY_BYTES} bytes, not {len(key)}")
        self.key = key
        self._cipher = AESGCM(key)

    def __repr__(self) -> str:
        return "Opener()"

    def open(self, name: BlockName, attempt: int, sealed: memoryview, plain: memoryview) -> None:
        """Writes the block into `plain`. Raises DigestMismatch when it is not authentic; `plain` is then garbage."""
        try:
            self._cipher.decrypt_into(_NONCE.pack(name.block, attempt), sealed, name.associated_data, plain)
        except (InvalidTag, ValueError):  # ValueError: too short for a tag, or not as long as it should be
            raise DigestMismatch(f"block {name.block} of room {name.room} is not authentic") from None
