"""Blocks sealed with AES-128-GCM (NIST SP 800-38D) under a key of each transfer.

Without the key, no block can be made, changed or read.

Key: 16 random bytes per transfer, that is per (room, epoch, both instances, `have`). Prefill makes the key
when decode attaches and sends it in every announcement over CURVE. The key ends with the room. It is random
and not derived from a secret of the link, for two reasons: a room that is offered or attached again under the
same names must not reuse nonces, and no secret that outlives a transfer is then worth stealing.

Nonce: block number (8 bytes) | attempt (4 bytes), big-endian. `Sealer` owns the key and counts the attempts
of each block. No nonce is used twice, whatever the peer requests and however often a send fails.

Associated data: room | epoch | block | size | fingerprint of the layout. A block of another place fails to
open.
"""

import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ...cluster.errors import DigestMismatch, LocalProtocolError, RemoteProtocolError

KEY_BYTES = 16
TAG_BYTES = 16
MAX_ATTEMPTS = 2**31 - 1  # the range of Block.attempt
_NONCE = struct.Struct(">QI")
_PLACE = struct.Struct(">16sQQQ")


@dataclass(frozen=True)
class BlockName:
    """The identity of a block. `room`: 32 hex digits; `size`: bytes of the plain block."""

    room: str
    epoch: int
    block: int
    size: int
    fingerprint: str

    @property
    def associated_data(self) -> bytes:
        """The name as bytes. Fields before the final fingerprint have fixed widths, so no two names give the
        same bytes.
        """
        return (
            _PLACE.pack(bytes.fromhex(self.room), self.epoch, self.block, self.size)
            + self.fingerprint.encode()
        )


class Sealer:
    """The key of one transfer on prefill, with the attempts of each block."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
        self.key = key
        self._cipher = AESGCM(key)
        self._attempts: dict[int, int] = {}  # block -> how often it was sealed

    def __repr__(self) -> str:
        return f"Sealer(blocks={len(self._attempts)})"

    def seal(self, name: BlockName, plain: memoryview, sealed: memoryview) -> int:
        """Writes ciphertext and tag of `plain` into `sealed`, which is TAG_BYTES longer. Returns the attempt.

        Raises LocalProtocolError when the nonces of a block are used up.
        """
        attempt = self._attempts.get(name.block, 0)
        if attempt > MAX_ATTEMPTS:
            raise LocalProtocolError(f"block {name.block} of room {name.room} was sealed {attempt} times")
        self._attempts[name.block] = attempt + 1
        self._cipher.encrypt_into(_NONCE.pack(name.block, attempt), plain, name.associated_data, sealed)
        return attempt


class Opener:
    """The key of one transfer on decode."""

    def __init__(self, key: bytes) -> None:
        """Raises RemoteProtocolError for a key of the wrong length."""
        if len(key) != KEY_BYTES:
            raise RemoteProtocolError(f"a transfer's key has {KEY_BYTES} bytes, not {len(key)}")
        self.key = key
        self._cipher = AESGCM(key)

    def __repr__(self) -> str:
        return "Opener()"

    def open(self, name: BlockName, attempt: int, sealed: memoryview, plain: memoryview) -> None:
        """Writes the block into `plain`.

        Raises DigestMismatch if the block is not authentic; `plain` then holds garbage.
        """
        try:
            self._cipher.decrypt_into(_NONCE.pack(name.block, attempt), sealed, name.associated_data, plain)
        except (InvalidTag, ValueError):  # ValueError: a wrong length
            raise DigestMismatch(f"block {name.block} of room {name.room} is not authentic") from None
