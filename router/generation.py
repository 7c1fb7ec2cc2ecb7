"""One choice of an answer as it grows: tokens become text, stop strings end it, log probabilities get their names."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cluster.messages import TokenLogprob
from .room_effects import Deliver
from .stop import StopStrings
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenText:
    """One output token with its log probability and the best alternatives."""

    text: str
    data: bytes
    logprob: float
    top: list[tuple[str, bytes, float]]
    at: int  # characters of the answer before this token


@dataclass(frozen=True)
class Piece:
    """What one batch of tokens adds to a choice."""

    text: str
    logprobs: list[TokenText] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str = ""  # "", "stop" or "length"

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """All of a choice's pieces as one."""
        return cls(
            text="".join(piece.text for piece in pieces),
            logprobs=[token for piece in pieces for token in piece.logprobs],
            ids=[token for piece in pieces for token in piece.ids],
            finish=next((piece.finish for piece in pieces if piece.finish), ""),
        )


class Choice:
    """The text of one choice. `finish` is set once, and nothing is added after it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, skip_special: bool, wants_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special=skip_special)
        self._stops = StopStrings(stops) if stops else None
        self._wants_logprobs = wants_logprobs
        self._num_chars = 0
        self.num_tokens = 0
        self.finish = ""

    def __repr__(self) -> str:
        return f"Choice({self.num_tokens} tokens, finish={self.finish or None})"

    def add(self, effect: Deliver) -> Piece:
        """The tokens of one message. After a stop string, what follows it is not counted."""
        if self.finish:
            return Piece("")
        text, used = self._add_text(effect.ids)
        logprobs = self._name_logprobs(effect.ids[:used], effect.logprobs) if self._wants_logprobs else []
        self.num_tokens += used
        self._num_chars += len(text)
        return Piece(text, logprobs, list(effect.ids[:used]), self.finish)

    def end(self, reason: str) -> Piece:
        """No more tokens come: what was withheld."""
        if self.finish:
            return Piece("")
        tail = self._detokenizer.flush()
        if self._stops is not None:
            tail = self._stops.feed(tail)
            tail += self._stops.flush()
        self.finish = reason
        return Piece(tail, finish=reason)

    def _add_text(self, ids: Sequence[int]) -> tuple[str, int]:
        """(text that may go out, how many ids made it)."""
        if self._stops is None:
            return self._detokenizer.feed(ids), len(ids)
        out = []
        for used, token in enumerate(ids, 1):
            out.append(self._stops.feed(self._detokenizer.feed((token,))))
            if self._stops.is_hit:
                self.finish = "stop"
                return "".join(out), used
        return "".join(out), len(ids)

    def _name_logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[TokenText]:
        names = []
        at = self._num_chars
        for token, logprob in zip(ids, logprobs, strict=False):
            data = self._tokenizer.token_bytes[token]
            text = data.decode(errors="replace")
            top = [(b.decode(errors="replace"), b, p) for b, p in self._top(logprob)]
            names.append(TokenText(text, data, logprob.logprob, top, at))
            at += len(text)
        return names

    def _top(self, logprob: TokenLogprob) -> list[tuple[bytes, float]]:
        return [(self._tokenizer.token_bytes[token], value) for token, value in logprob.top]
