"""A cache of token ids by word, for short texts and byte-level BPE tokenizers.

A byte-level BPE tokenizer first cuts a text into pieces and encodes each piece without looking at the others.
A lone space stands between two characters that are not white space. With each cut rule listed here, a lone
space always begins a piece: no rule puts a space after anything but white space, and no rule looks further
than the character after white space. A text is therefore cut before its lone spaces, and the ids of each part
are cached. The result always equals the tokenizer's.

Measured with SmolLM2 and chats of 500 letters, three words of them new: 21 us instead of 120 us, and some 300
us instead of 430 us of CPU time for a whole request.
"""

import json
import re
from array import array
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

ID = "I"  # unsigned, four bytes
MAX_CHARS = (
    # characters of a text; longer ones are encoded in a thread, where the tokenizer releases the interpreter
    # lock
    4000
)
MAX_WORDS = 1 << 15
MAX_WORD_CHARS = 64
BEFORE_LONE_SPACE = re.compile(r"(?<=\S)(?= \S)")
CUTS = frozenset(
    f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{{L}}\\p{{N}}]?{letters}|{digits}"
    f"| ?{signs}[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
    for letters, digits, signs in (
        (r"\p{L}+", r"\p{N}{1,3}", r"[^\s\p{L}\p{N}]+"),
        (r"\p{L}+", r"\p{N}", r"[^\s\p{L}\p{N}]+"),
        (r"[\p{L}\p{M}]+", r"\p{N}", r"[^\s\p{L}\p{M}\p{N}]+"),
    )
)


class WordIds(dict[str, bytes]):
    """The ids of words, each with its leading space, of one tokenizer. A word is encoded at its first
    look-up.

    Ids are kept as bytes, since lists of integers would cost ten times the memory.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def __repr__(self) -> str:
        return f"WordIds({len(self)} words)"

    def __missing__(self, word: str) -> bytes:
        [encoding] = self._backend.encode_batch_fast([word], add_special_tokens=False)
        ids = array(ID, encoding.ids).tobytes()
        if len(word) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> list[int] | None:
        """The ids of `text` without added special tokens; None for a long text and one without a lone
        space."""
        words = BEFORE_LONE_SPACE.split(text) if len(text) <= MAX_CHARS else ()
        if len(words) < 2:
            return None
        return array(ID, b"".join(map(self.__getitem__, words))).tolist()


def word_ids(backend: Backend) -> WordIds | None:
    """The cache for a tokenizer; None if its cut rule is unknown or a special token may span a lone space."""
    is_known = _is_bpe(backend.model) and _state_of(backend.normalizer) in (None, {"type": "NFC"})
    is_known = is_known and _cuts_at_spaces(_state_of(backend.pre_tokenizer))
    is_known = is_known and all(map(_ignores_spaces, backend.get_added_tokens_decoder().values()))
    return WordIds(backend) if is_known else None


def _state_of(part: Any) -> Any:  # noqa: ANN401 - a part of a tokenizer, as its file has it
    return None if part is None else json.loads(part.__getstate__())


def _is_bpe(model: Any) -> bool:  # noqa: ANN401 - of any kind
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return isinstance(model, models.BPE) and not any(getattr(model, name) for name in unusual)


def _cuts_at_spaces(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a lone space begins a piece."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, last]}:
            return _cuts_at_spaces(last)
        case {
            "type": "Sequence",
            "pretokenizers": [{"type": "Split", "pattern": {"Regex": cut}} as split, last],
        }:
            is_usual = split["behavior"] == "Isolated" and not split["invert"]
            is_last = last["type"] == "ByteLevel" and not last["add_prefix_space"] and not last["use_regex"]
            return is_usual and is_last and cut in CUTS
        case _:
            return False


def _ignores_spaces(token: AddedToken) -> bool:
    """Whether an added token depends on no neighbouring characters and holds no space."""
    return not (token.lstrip or token.rstrip or token.single_word) and " " not in token.content
