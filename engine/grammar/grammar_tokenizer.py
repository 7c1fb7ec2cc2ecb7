"""A model's vocabulary for grammars: the bytes of every token, and the tokens that spell forced text.

The text of a grammar never becomes a control token: a constant "<|im_end|>" does not end the output and is
written in pieces. Tokens that a tokenizer has added as text, such as `<tool_call>` in many vocabularies, are
ordinary text: they are allowed wherever their characters are, and forced where their characters are forced.
llguidance alone does the opposite in both cases.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper


class Spelling:
    """The tokenizer interface that llguidance expects.

    Raises ValueError for a tokenizer file that it cannot read.
    """

    def __init__(self, path: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        eos = eos_ids[0] if eos_ids else None
        self._plain = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=eos, slices=[])
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or ()
        texts = {token["id"] for token in added if not token["special"]}
        control = {i for i in range(vocab_size) if self._plain.is_special_token(i)} - texts
        self.tokens = [self._plain.decode_bytes([i]) for i in range(vocab_size)]
        self.special_token_ids = sorted(control.union(eos_ids))
        self.eos_token_id = eos
        self.bos_token_id = None
        self._control = frozenset(self.special_token_ids)

    def __repr__(self) -> str:
        return f"<Spelling of {len(self.tokens)} tokens, {len(self._control)} of control>"

    def __call__(self, data: bytes) -> list[int]:
        """Token ids whose bytes are `data`.

        These are the model's own tokens, unless they contain control tokens or change a byte; then smaller
        pieces.
        """
        ids: list[int] = []
        for token in self._plain.tokenize_bytes(data):
            ids += self._pieces(self.tokens[token]) if token in self._control else [token]
        return ids if b"".join([self.tokens[i] for i in ids]) == data else self._pieces(data)

    def _pieces(self, data: bytes) -> list[int]:
        """The longest text tokens for `data`; one per character if these contain a control token."""
        text, greedy = data.decode(), self._plain.greedy_tokenize
        ids = greedy(text)
        return ids if self._control.isdisjoint(ids) else [i for char in text for i in greedy(char)]


def load_tokenizer(path: Path, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The llguidance tokenizer of the file at `path`, with its index of bytes.

    Raises ValueError as `Spelling`.
    """
    return LLTokenizer(TokenizerWrapper(Spelling(path, vocab_size, eos_ids)))
