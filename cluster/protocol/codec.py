"""Messages to frames and back: MessagePack, decoded straight into the typed structs of `messages`.

A frame from a peer is hostile until it is decoded. `Decoder.decode` raises only `RemoteProtocolError`, with
one line that names the fault and never repeats the peer's bytes. A frame holds one message or several
(`BatchDecoder`); messages of an unknown type in a batch do not affect the others.

The last field of every frame is "crc", the CRC-32 (zlib) of all bytes before its value. Without it, a flipped
bit in a small message would pass as another token. A wrong checksum raises `DamagedMessage`. A frame without
the field is accepted, since other releases may omit it. The checksum detects damage, not malice; keys protect
against malice.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Generic, TypeVar, get_args

import msgspec
import zmq

from ..errors import DamagedMessage, RemoteProtocolError, UnknownMessage
from .messages import ControlDown, ControlUp, KVDown, KVUp, Message, Pull
from .slab_messages import SlabBlock, SlotFree

T = TypeVar("T")

CONTROL_MAX_FRAME = 1 << 20  # bytes of a control-plane frame
KV_MAX_BYTES = 16 << 10  # the bound of a KV-plane message without a block's payload
LONGEST_REASON = 200
MAX_BATCH = 16  # messages in a frame of several
# bytes of a control frame with several messages; a longer message has a frame of its own
BATCH_BYTES = 64 << 10

# Messages that are sent per block may share a frame, since a frame costs far more than its content.
BATCHED = (Pull, SlotFree, SlabBlock)
_Size = msgspec.Meta(min_length=1, max_length=MAX_BATCH)
# All message types of both planes. A type outside of this set comes from another release; a known type in the
# wrong place is a fault.
TYPES = frozenset(
    kind.__name__ for union in (ControlUp, ControlDown, KVUp, KVDown) for kind in get_args(union)
)

CRC_MARK = b"\xa3crc\xce"  # MessagePack: the key "crc" and the type of a 32-bit number
CRC_BYTES = 4
FIXMAP_MAX = 0x8F  # MessagePack: a map of 15 fields; a larger one has its count in the two bytes after 0xDE


def encode(message: Message) -> bytes:
    """The frame of a message."""
    return framed([pack(message)])


def pack(message: Message) -> bytes:
    """A message as MessagePack, to be framed later."""
    return msgspec.msgpack.encode(message)


def encode_batch(messages: Sequence[Message]) -> bytes:
    """The frame of several messages of the kinds in BATCHED, at most MAX_BATCH; of one it is the same as
    `encode`.

    The last message's last field holds the checksum of the whole frame.
    """
    assert all(isinstance(message, BATCHED) for message in messages), messages
    return framed([pack(message) for message in messages])


def framed(packed: Sequence[bytes]) -> bytes:
    """The frame of 1 to MAX_BATCH packed messages, in their order."""
    num = len(packed)
    assert 1 <= num <= MAX_BATCH, num
    if num == 1:
        return _with_sum(_with_place_for_sum(packed[0]))
    head = bytes((0x90 + num,)) if num < 16 else b"\xdc" + num.to_bytes(2, "big")
    return _with_sum(b"".join((head, *packed[:-1], _with_place_for_sum(packed[-1]))))


def first_batch(waiting: Iterable[bytes], *, takes_several: bool) -> list[bytes]:
    """The packed messages for the next frame: only the first when the peer does not accept batches."""
    batch: list[bytes] = []
    num_bytes = 0
    for packed in waiting:
        num_bytes += len(packed)
        if batch and (not takes_several or len(batch) == MAX_BATCH or num_bytes > BATCH_BYTES):
            break
        batch.append(packed)
    return batch


def send_waiting(waiting: deque[bytes], transmit: Callable[[bytes], bool], *, takes_several: bool) -> bool:
    """Transmits packed messages in as few frames as possible.

    False when `transmit` refused a frame; the rest stays queued.
    """
    while waiting:
        batch = first_batch(waiting, takes_several=takes_several)
        if not transmit(framed(batch)):
            return False
        for _ in batch:
            waiting.popleft()
    return True


def messages_of(decoded: T | tuple[T, ...]) -> tuple[T, ...]:
    """The messages of a decoded frame that may hold several."""
    return decoded if isinstance(decoded, tuple) else (decoded,)


def _with_place_for_sum(data: bytes) -> bytes:
    """The packed map with the checksum's key appended. The value is to follow."""
    head = data[0]
    if head < FIXMAP_MAX:
        return b"".join((bytes((head + 1,)), data[1:], CRC_MARK))
    count = 16 if head == FIXMAP_MAX else int.from_bytes(data[1:3], "big") + 1
    return b"".join((b"\xde", count.to_bytes(2, "big"), data[1 if head == FIXMAP_MAX else 3 :], CRC_MARK))


def _with_sum(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(CRC_BYTES, "big")


class Decoder(Generic[T]):
    """Decodes frames of one tagged union, at most `max_bytes` each."""

    def __init__(self, union_type: object, max_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union_type)
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"Decoder(max_bytes={self._max_bytes})"

    def decode(self, frame: bytes | memoryview | zmq.Frame) -> T:
        """The message in `frame`.

        Raises DamagedMessage for a wrong checksum, RemoteProtocolError for anything but one message of the
        union.
        """
        data = frame.buffer if isinstance(frame, zmq.Frame) else frame
        size = len(data)
        if size > self._max_bytes:
            raise RemoteProtocolError(f"a frame of {size} bytes, at most {self._max_bytes} are allowed")
        if is_damaged(data):
            raise DamagedMessage(f"a frame of {size} bytes has not the checksum that it was sent with")
        try:
            return self._decoder.decode(data)
        except Exception as error:  # any exception here is caused by the peer's bytes
            kind = UnknownMessage if is_unknown(error) else RemoteProtocolError
            raise kind(f"a frame of {size} bytes is not a message: {_reason(error)}") from None


def is_damaged(data: bytes | memoryview) -> bool:
    """Whether a frame has a checksum that does not match its bytes."""
    if data[-CRC_BYTES - len(CRC_MARK) : -CRC_BYTES] != CRC_MARK:
        return False
    return zlib.crc32(data[:-CRC_BYTES]) != int.from_bytes(data[-CRC_BYTES:], "big")


class _Kind(msgspec.Struct):
    """The type of a message, without its other fields."""

    type: str


class BatchDecoder(Decoder[T | tuple[T, ...]], Generic[T]):
    """Decodes frames of one message of `union_type`, or of 1 to MAX_BATCH of `batched`; at most `max_bytes`
    each."""

    def __init__(self, union_type: object, batched: object, max_bytes: int) -> None:
        several = Annotated[tuple[batched, ...], _Size]  # type: ignore[valid-type]
        super().__init__(union_type | several, max_bytes)
        self._one: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(batched)
        self._parts = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], _Size])
        self._kind = msgspec.msgpack.Decoder(_Kind)

    def messages(self, frame: bytes | memoryview | zmq.Frame) -> tuple[tuple[T, ...], int]:
        """Decodes `frame`. Returns (its messages, number of skipped messages of unknown type).

        Raises as `decode` does. A frame with a single message of unknown type, or with any other fault, is
        refused as a whole.
        """
        try:
            return messages_of(self.decode(frame)), 0
        except UnknownMessage as refusal:
            found = self._known(frame.buffer if isinstance(frame, zmq.Frame) else frame)
            if found is None:
                raise refusal
            return found

    def _known(self, data: bytes | memoryview) -> tuple[tuple[T, ...], int] | None:
        """As `messages`, for a frame with an unknown type; None if it has other faults or is not an array."""
        try:
            parts = self._parts.decode(data)
            known = [part for part in parts if self._kind.decode(part).type in TYPES]
            return tuple(self._one.decode(part) for part in known), len(parts) - len(known)
        except Exception:  # as in `decode`
            return None


def decoder(union_type: object, max_bytes: int) -> Decoder[T]:
    """A decoder of any tagged union; annotate the result, as in `d: Decoder[KVUp] = decoder(KVUp, 4096)`."""
    return Decoder(union_type, max_bytes)


def control_up_decoder(max_bytes: int = CONTROL_MAX_FRAME) -> BatchDecoder[ControlUp]:
    """For the router: decodes frames of workers."""
    return BatchDecoder(ControlUp, ControlUp, max_bytes)


def control_down_decoder(max_bytes: int = CONTROL_MAX_FRAME) -> BatchDecoder[ControlDown]:
    """For a worker: decodes frames of the router."""
    return BatchDecoder(ControlDown, ControlDown, max_bytes)


def kv_up_decoder(max_bytes: int = KV_MAX_BYTES) -> Decoder[KVUp]:
    """For prefill: decodes messages of decode."""
    return Decoder(KVUp, max_bytes)


def kv_down_decoder(max_bytes: int = KV_MAX_BYTES) -> Decoder[KVDown]:
    """For decode: decodes messages of prefill."""
    return Decoder(KVDown, max_bytes)


def kv_up_frames() -> BatchDecoder[KVUp]:
    """As `kv_up_decoder`, for frames that may hold several messages."""
    return BatchDecoder(KVUp, Pull | SlotFree, KV_MAX_BYTES)


def kv_down_frames() -> BatchDecoder[KVDown]:
    """As `kv_down_decoder`, for frames that may hold several messages."""
    return BatchDecoder(KVDown, SlabBlock, KV_MAX_BYTES)


def unknown_messages(num: int) -> str:
    """The log line about skipped messages of a frame."""
    return f"{num} messages of unknown types in a frame of several"


def is_unknown(error: Exception) -> bool:
    """Whether the only fault found in a message is its type."""
    # the decoder's message quotes the tag
    return isinstance(error, msgspec.ValidationError) and str(error).startswith("Invalid value")


def _reason(error: Exception) -> str:
    """One printable line about `error` without any of the peer's bytes."""
    if is_unknown(error):
        return "unknown message type"
    if isinstance(error, msgspec.ValidationError):
        line = "".join(c if c.isprintable() and c.isascii() else "?" for c in str(error))
        return line[:LONGEST_REASON]
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "malformed MessagePack"
