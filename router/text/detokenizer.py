"""Token ids to text, for one growing output, without cutting a character in two.

A token is a byte string. The text of a sequence is the UTF-8 decoding of the joined bytes. An incomplete
character is withheld until its last byte comes, so the pieces together equal the text of the whole.
"""

import codecs
import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from tokenizers import Tokenizer as Backend

from ...cluster.errors import ConfigError

SPACE_MARK = "▁"


class TokenBytes:
    """The bytes of every token of a vocabulary, and which tokens are special."""

    def __init__(self, backend: Backend) -> None:
        decoder = json.loads(backend.to_str())["decoder"]
        kinds = _kinds(decoder)
        if "ByteLevel" in kinds:
            to_bytes = _byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            to_bytes = _byte_fallback
        else:
            known = "ByteLevel, ByteFallback and Metaspace"
            raise ConfigError(
                f"the tokenizer's decoder {sorted(kinds)} is not supported: use a model with {known}"
            )
        self.strips_first_space = to_bytes is _byte_fallback and _strips_first_space(decoder)
        added = backend.get_added_tokens_decoder()
        vocab = backend.get_vocab(with_added_tokens=True)
        self._bytes = [b""] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            self._bytes[token_id] = token.encode() if token_id in added else to_bytes(token)
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)

    def __repr__(self) -> str:
        return f"TokenBytes({len(self)} tokens, {len(self.special)} special)"

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that the tokenizer does not know (padding of the embedding)."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def joined(self, ids: Sequence[int], skipped: AbstractSet[int] = frozenset()) -> bytes:
        """The joined bytes of tokens, without those in `skipped`."""
        known = self._bytes
        try:
            return b"".join([known[i] for i in ids if i not in skipped])
        except IndexError:
            return b"".join([self[i] for i in ids if i not in skipped])

    @property
    def longest(self) -> int:
        return max(map(len, self._bytes), default=1)


class Detokenizer:
    """Decodes one growing output."""

    def __init__(
        self, table: TokenBytes, *, skip_special: bool = True, shown: AbstractSet[int] = frozenset()
    ) -> None:
        """`skip_special` leaves special tokens out of the text, besides those in `shown`."""
        self._table = table
        self._skipped = table.special - shown if skip_special else frozenset()
        self._rest = b""  # bytes of an incomplete character
        self._strip_next = table.strips_first_space

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; an incomplete last character is withheld."""
        data = self._table.joined(ids, self._skipped)
        if self._strip_next and data:
            self._strip_next = False
            data = data.removeprefix(b" ")
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        """Ends the output: a replacement character if its last character is incomplete, else ""."""
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


def _kinds(decoder: dict[str, object] | None) -> set[str]:
    """The types of a tokenizer.json decoder and of its parts."""
    if decoder is None:
        return set()
    parts = decoder.get("decoders", [])
    assert isinstance(parts, list)
    return {str(decoder["type"])}.union(*(_kinds(part) for part in parts))


def _strips_first_space(decoder: dict[str, object]) -> bool:
    """Whether decoding removes the space that encoding puts before a text."""
    if decoder["type"] == "Metaspace":
        return decoder.get("prepend_scheme") != "never"
    parts = decoder.get("decoders", [])
    assert isinstance(parts, list)
    return any(part["type"] == "Strip" and part.get("start") for part in parts) or any(
        part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    values = [_BYTE_OF.get(char) for char in token]
    return bytes([v for v in values if v is not None]) if None not in values else token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE_MARK, " ").encode()
