"""Token ids of short texts, word by word: most words were there before.

What a byte-level BPE tokenizer makes of a text are the ids of its pieces, one after the other, and no piece sees another.
With the ways of cutting a text into pieces that are known here, a lone space always begins a piece: no rule for a piece
takes a space behind anything but other white space, and none looks further than the character behind white space. So the
text is cut at its lone spaces, and what a word gives is remembered, or what is between two of them. The ids are always those
of the tokenizer; a text of new words alone takes up to twice as long as with it.
"""

import json
import re
from array import array
from collections.abc import Mapping
from itertools import islice
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

ID = "I"  # four bytes, or more
MAX_CHARS = (
    4000  # of a text; a longer one is encoded in a thread, where the tokenizer lets others run meanwhile
)
MAX_WORDS = 1 << 15
MAX_WORD_CHARS = 64
LONE_SPACE = re.compile(r"(?<=\S) (?=\S)")
SPACE = "\u0120"  # how byte-level tokenizers write it
SIMPLE = re.compile(
    r"([A-Za-z]+)([.,:;!?)]?)"
)  # for all ways of cutting: letters, with the space before them, and a sign
IN_SIMPLE = re.compile(r"[A-Za-z]*[.,:;!?)]?")
CUTS = frozenset(
    f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{{L}}\\p{{N}}]?{letters}|{digits}"
    f"| ?{signs}[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
    for letters, digits, signs in (
        (r"\p{L}+", r"\p{N}{1,3}", r"[^\s\p{L}\p{N}]+"),
        (r"\p{L}+", r"\p{N}", r"[^\s\p{L}\p{N}]+"),
        (r"[\p{L}\p{M}]+", r"\p{N}", r"[^\s\p{L}\p{M}\p{N}]+"),
    )
)


class WordIds:
    """Of one tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self._words = _Words(backend)
        self._edges = _Edges(backend)

    def __repr__(self) -> str:
        return f"WordIds({len(self._words)} words)"

    def encode(self, text: str) -> list[int] | None:
        """The ids, without what the tokenizer puts around a text; None: the tokenizer shall say."""
        if len(text) > MAX_CHARS:
            return None
        try:
            return self._joined(text.split(" "))
        except _OtherSpace:
            return self._joined(LONE_SPACE.split(text))

    def _joined(self, words: list[str]) -> list[int] | None:
        """Raises _OtherSpace unless all of them are words, but for white space where the text begins and ends."""
        if len(words) < 2:
            return None
        first, last = words[0], words.pop()
        if first[-1:].isspace() or last[:1].isspace():
            raise _OtherSpace
        middle = map(self._words.__getitem__, islice(words, 1, None))
        return array(ID, b"".join((self._edges[first], *middle, self._edges[f" {last}"]))).tolist()


class _OtherSpace(Exception):
    """There is white space that is not a lone space between words."""


class _Remembered(dict[str, bytes]):
    """Ids by texts, each of which is encoded when it is looked up for the first time.

    They are kept as bytes: the numbers of a text's words, were they objects, would lie all over the memory.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._model = backend.model

    def __missing__(self, text: str) -> bytes:
        ids = self.encoded(text)
        if len(text) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[text] = ids
        return ids

    def encoded(self, text: str) -> bytes:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return array(ID, encoding.ids).tobytes()


class _Edges(_Remembered):
    """By what stands before a text's first space, and by what follows from its last one on."""


class _Words(_Remembered):
    """By words with a space on each side; the one before belongs to the ids, and the key has none."""

    def encoded(self, text: str) -> bytes:
        if simple := SIMPLE.fullmatch(text):
            letters, sign = simple.groups()
            return self._piece(SPACE + letters) + (self._piece(sign) if sign else b"")
        if not text or text[0].isspace() or text[-1].isspace():
            raise _OtherSpace
        return super().encoded(f" {text}")

    def _piece(self, piece: str) -> bytes:
        return array(ID, [token.id for token in self._model.tokenize(piece)]).tobytes()


def word_ids(backend: Backend) -> WordIds | None:
    """None for a tokenizer of another kind."""
    is_known = _is_bpe(backend.model) and _said(backend.normalizer) in (None, {"type": "NFC"})
    is_known = is_known and _cuts(_said(backend.pre_tokenizer))
    return (
        WordIds(backend)
        if is_known and all(map(_is_apart, backend.get_added_tokens_decoder().values()))
        else None
    )


def _said(part: Any) -> Any:  # noqa: ANN401 - a part of a tokenizer, as its file has it
    return None if part is None else json.loads(part.__getstate__())


def _is_bpe(model: Any) -> bool:  # noqa: ANN401 - of any kind
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return isinstance(model, models.BPE) and not any(getattr(model, name) for name in odd)


def _cuts(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a lone space begins a piece."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, last]}:
            return _cuts(last)
        case {
            "type": "Sequence",
            "pretokenizers": [{"type": "Split", "pattern": {"Regex": cut}} as split, last],
        }:
            is_usual = split["behavior"] == "Isolated" and not split["invert"]
            is_last = last["type"] == "ByteLevel" and not last["add_prefix_space"] and not last["use_regex"]
            return is_usual and is_last and cut in CUTS
        case _:
            return False


def _is_apart(token: AddedToken) -> bool:
    """Whether an added token neither looks at nor takes what is around it, and is in no simple word."""
    is_greedy = token.lstrip or token.rstrip or token.single_word
    return not is_greedy and " " not in token.content and IN_SIMPLE.fullmatch(token.content) is None
