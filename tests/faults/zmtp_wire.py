"""ZMTP 3.x framing (rfc.zeromq.org/spec/37) without libzmq: greeting, commands, multipart messages."""

from dataclasses import dataclass, replace

import msgpack

GREETING_SIZE = 64
MORE, LONG, COMMAND = 1, 2, 4
SHORT_MAX = 255


@dataclass(frozen=True)
class Message:
    """A message of one or more frames, or a command of one."""

    frames: tuple[bytes, ...]
    is_command: bool = False

    def wire(self) -> bytes:
        last = len(self.frames) - 1
        flags = COMMAND if self.is_command else 0
        return b"".join(
            frame_bytes(frame, flags | (MORE if i < last else 0)) for i, frame in enumerate(self.frames)
        )

    def fields(self) -> dict:
        """The first frame as baton's messages are written: a MessagePack map; {} for anything else. Without
        its checksum, so that what is made of it is another message and not a damaged one.
        """
        found = self._found()
        return without_sum(found) if isinstance(found, dict) else {}

    def types(self) -> set:
        """Of the messages in the first frame, of which there may be several."""
        found = self._found()
        return {
            one.get("type")
            for one in (found if isinstance(found, list) else [found])
            if isinstance(one, dict)
        }

    def _found(self) -> object:
        try:
            return msgpack.unpackb(self.frames[0])
        except Exception:
            return None

    def with_frame(self, index: int, frame: bytes) -> "Message":
        frames = list(self.frames)
        frames[index] = frame
        return replace(self, frames=tuple(frames))

    def with_fields(self, **changes: object) -> "Message":
        """Every message of the first frame has these."""
        found = self._found()
        changed = (
            [without_sum(one) | changes for one in found]
            if isinstance(found, list)
            else self.fields() | changes
        )
        return self.with_frame(0, msgpack.packb(changed))


def without_sum(fields: dict) -> dict:
    return {key: value for key, value in fields.items() if key != "crc"}


def frame_bytes(frame: bytes, flags: int = 0) -> bytes:
    """A frame with its header."""
    if len(frame) > SHORT_MAX:
        return bytes([flags | LONG]) + len(frame).to_bytes(8, "big") + frame
    return bytes([flags, len(frame)]) + frame


class Parser:
    """Cuts one direction of a connection into its greeting, as it comes, and whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeting_left = GREETING_SIZE
        self._frames: list[bytes] = []

    @property
    def is_mid_message(self) -> bool:
        return bool(self._buffer or self._frames)

    def feed(self, data: bytes) -> list[bytes | Message]:
        """The items that `data` completes: bytes of the greeting, read in parts by both ends, or messages."""
        found: list[bytes | Message] = []
        if self._greeting_left:
            head, data = data[: self._greeting_left], data[self._greeting_left :]
            self._greeting_left -= len(head)
            found.append(bytes(head))
        self._buffer += data
        while (size := self._frame_size()) is not None and size[0] + size[1] <= len(self._buffer):
            message = self._take(*size)
            if message is not None:
                found.append(message)
        return found

    def _frame_size(self) -> tuple[int, int] | None:
        """(header bytes, body bytes) of the frame at the front; None while its header is incomplete."""
        if len(self._buffer) < 2:
            return None
        if not self._buffer[0] & LONG:
            return 2, self._buffer[1]
        return (9, int.from_bytes(self._buffer[1:9], "big")) if len(self._buffer) >= 9 else None

    def _take(self, header: int, size: int) -> Message | None:
        flags = self._buffer[0]
        body = bytes(memoryview(self._buffer)[header : header + size])
        del self._buffer[: header + size]
        if flags & COMMAND:
            return Message((body,), is_command=True)
        self._frames.append(body)
        if flags & MORE:
            return None
        frames, self._frames = self._frames, []
        return Message(tuple(frames))
