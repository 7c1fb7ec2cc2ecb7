"""The byte protocol between a sandbox pool and its workers.

A frame is 4 bytes of length, little-endian, and that many bytes. The pool sends a setup frame first (a
`Setup` as JSON, or GRAMMARS), then one frame per job. The worker sends READY, then one reply per job: one
byte for its kind, and a text in UTF-8. A worker ends after a reply of TOO_LARGE.
"""

import struct

READY = b"+"  # the whole frame
RENDERED = b"t"  # followed by the result
REFUSED = b"r"  # followed by the reason in one line
TOO_LARGE = b"m"  # the job took too much memory, or its result is too long
LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    """One frame."""
    return LENGTH.pack(len(data)) + data


class Frames:
    """Cuts the bytes of a socket into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __repr__(self) -> str:
        return f"Frames({len(self._data)} bytes wait)"

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are complete now."""
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._data, at)
            if len(self._data) - at - LENGTH.size < size:
                break
            found.append(bytes(self._data[at + LENGTH.size : at + LENGTH.size + size]))
            at += LENGTH.size + size
        del self._data[:at]
        return found
