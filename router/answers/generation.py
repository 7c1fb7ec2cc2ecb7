"""One choice of an answer while it grows: token ids become text, stop strings are found, reasoning and tool
calls are split from the text, log probabilities are named."""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ...cluster.protocol.messages import TokenLogprob
from ..api.prompt_embeds import Embeddings
from ..formats.parts import CallPart, Reader
from ..rooms.effects import Deliver
from ..text.tokenizer import Tokenizer
from .routed_experts import RoutedRows
from .stop import StopStrings


class TokenText(Struct, frozen=True, gc=False):
    """One token with its log probability (None for the first token of a prompt) and the best alternatives."""

    text: str
    data: bytes
    logprob: float | None
    top: list[tuple[str, bytes, float]]
    at: int  # offset in the choice's text of the first character that the token contributes to


class Piece(Struct, frozen=True, gc=False):
    """The text, tokens and calls that one batch of tokens adds to a choice."""

    text: str
    logprobs: list[TokenText] = []
    ids: list[int] = []
    finish: str = ""  # "", "stop", "length" or "tool_calls"
    calls: list[CallPart] = []
    reasoning: str = ""
    stop: str = ""  # the stop string that ended the choice
    accepted: int = 0  # accepted drafts among the tokens: all of them or none, if the request asked
    experts: str | None = None  # of the whole choice, with its end, if the request asked

    @property
    def whole_calls(self) -> list[CallPart]:
        """The calls of a whole answer, each in one part."""
        firsts = [part for part in self.calls if part.id]
        joined = [
            "".join(part.arguments for part in self.calls if part.index == first.index) for first in firsts
        ]
        return [
            CallPart(first.index, first.id, first.name, text)
            for first, text in zip(firsts, joined, strict=True)
        ]

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """All of a choice's pieces as one."""
        if len(pieces) == 1:
            return pieces[0]
        texts: list[str] = []
        logprobs: list[TokenText] = []
        ids: list[int] = []
        calls: list[CallPart] = []
        thoughts: list[str] = []
        finish = stop = ""
        experts = None
        for piece in pieces:
            texts.append(piece.text)
            thoughts.append(piece.reasoning)
            logprobs += piece.logprobs
            ids += piece.ids
            calls += piece.calls
            finish = finish or piece.finish
            stop = stop or piece.stop
            experts = experts or piece.experts
        thought = "".join(thoughts)
        return cls("".join(texts), logprobs, ids, finish, calls, thought, stop, experts=experts)


class ChoiceOptions(Struct, frozen=True, kw_only=True, gc=False):
    """Options of a request for the text of its choices. `num_top` is -1 without log probabilities."""

    stops: tuple[str, ...] = ()
    keeps_stop: bool = False  # the text ends with the stop string
    names_ids: bool = False  # log probabilities name tokens by their ids
    begins_with: str = ""  # text before the answer, without tokens of its own
    skip_special: bool = True
    num_top: int = -1
    min_tokens: int = 0  # no stop string counts before this many tokens
    is_silent: bool = False  # the output is neither shown nor counted
    make_reader: Callable[[], Reader] | None = None  # splits reasoning and tool calls from the text
    may_think: bool = False  # the reader may find reasoning, whose tokens are counted
    shown: frozenset[int] = frozenset()  # control tokens that the reader needs to see


class Prompt(Struct, frozen=True, gc=False):
    """A prompt. Without `text`, an echo decodes the ids. The ids of `embeds` are 0."""

    ids: list[int]
    text: str | None = None
    starts: Sequence[int] = ()  # offset of each id in `text`, if log probabilities are wanted
    embeds: Embeddings | None = None


class Choice:
    """The text of one choice. `finish` is set once, and nothing is added after it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: ChoiceOptions,
        echo: Prompt | None = None,
        routed: RoutedRows | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._detokenizer = tokenizer.detokenizer(skip_special=options.skip_special, shown=options.shown)
        self._stops = StopStrings(options.stops, keeps_stop=options.keeps_stop) if options.stops else None
        self._reader = options.make_reader() if options.make_reader is not None else None
        self._echo = echo
        self._routed = routed
        self._begin = options.begins_with  # until it was given
        self._num_chars = 0  # characters completed by all tokens so far
        self._sum_logprobs = 0.0
        self.num_tokens = 0
        self.num_reasoning = 0  # of the tokens
        self.finish = ""

    def __repr__(self) -> str:
        return f"Choice({self.num_tokens} tokens, finish={self.finish or None})"

    @property
    def mean_logprob(self) -> float:
        """The mean log probability per output token, which best_of compares."""
        return self._sum_logprobs / max(1, self.num_tokens)

    def add(self, effect: Deliver) -> Piece:
        """Adds the tokens of one message, after the prompt if it is echoed. Tokens after a stop string are
        not counted.

        Raises ValueError when log probabilities of the prompt, or experts, are wanted and are not all there.
        """
        if self.finish:
            return Piece("")
        if self._routed is not None:
            self._routed.add(effect.experts)
        if self._echo is None:
            return self._ended(self._begun(self._add_output(effect)))
        echo, self._echo = self._echo, None
        pieces = [self._add_prompt(echo, effect.prompt), self._add_output(effect)]
        return self._ended(Piece.joined(pieces))

    def end(self, reason: str) -> Piece:
        """Ends the choice: the text that was withheld so far. Raises ValueError as `add`."""
        if self.finish:
            return Piece("")
        tail = self._detokenizer.flush()
        if self._stops is not None:
            tail = self._stops.feed(tail)
            tail += self._stops.flush()
        self.finish = reason
        return self._ended(self._begun(self._parted(Piece(tail, finish=reason))))

    def _ended(self, piece: Piece) -> Piece:
        """The piece, with the experts of all rows if it is the last one."""
        if self._routed is None or not piece.finish:
            return piece
        return replace(piece, experts=self._routed.encoded(self.num_tokens))

    def _begun(self, piece: Piece) -> Piece:
        """The piece, behind the text that comes first."""
        begin, self._begin = self._begin, ""
        return replace(piece, text=begin + piece.text) if begin else piece

    def _parted(self, piece: Piece) -> Piece:
        """Splits the text of a piece into reasoning, plain text and tool calls."""
        reader = self._reader
        if reader is None:
            return piece
        was_thinking = reader.is_thinking
        split = reader.feed(piece.text)
        if was_thinking or reader.is_thinking:
            self.num_reasoning += len(piece.ids)
        if piece.finish:
            split += reader.flush()
            if piece.finish == "stop" and reader.num_calls:
                self.finish = "tool_calls"
        finish = self.finish if piece.finish else ""
        return replace(piece, text=split.text, calls=[*split.calls], reasoning=split.reasoning, finish=finish)

    def _add_prompt(self, prompt: Prompt, logprobs: Sequence[TokenLogprob]) -> Piece:
        ids, options = prompt.ids, self._options
        text, starts = self._spell(ids)
        # echo the client's own text, with control tokens and without normalisation
        if prompt.text is not None:
            text, starts = prompt.text, prompt.starts
        self._num_chars = len(text)
        if options.num_top < 0:
            return Piece(text, ids=list(ids))
        if len(logprobs) != len(ids) - 1:
            raise ValueError(f"{len(logprobs)} log probabilities of a prompt of {len(ids)} tokens")
        known: list[TokenLogprob | None] = [None, *logprobs]
        named = [
            self._named(token, logprob, at) for token, logprob, at in zip(ids, known, starts, strict=True)
        ]
        return Piece(text, named, list(ids))

    def _add_output(self, effect: Deliver) -> Piece:
        if self._options.is_silent:
            return Piece("")
        if self._options.may_think and len(effect.ids) > 1:
            return Piece.joined([self._add_output(token) for token in self._singly(effect)])
        ids, names = effect.ids, []
        if self._stops is None and not effect.logprobs:
            text, used = self._detokenizer.feed(ids), len(ids)
            self._num_chars += len(text)
        else:
            text, starts = self._spell_to_stop(ids)
            used = len(starts)
            logprobs = effect.logprobs[:used]
            self._sum_logprobs += sum(logprob.logprob for logprob in logprobs)
            if self._options.num_top >= 0:
                names = [self._named(*token) for token in zip(ids, logprobs, starts, strict=False)]
        self.num_tokens += used
        stop = self._stops.hit if self._stops is not None else ""
        return self._parted(Piece(text, names, list(ids[:used]), self.finish, stop=stop))

    def _singly(self, effect: Deliver) -> Iterator[Deliver]:
        """The tokens of a message one by one up to the choice's end: those of reasoning are counted."""
        for at, token in enumerate(effect.ids):
            if not self.finish:
                yield Deliver([token], effect.logprobs[at : at + 1])

    def _spell(self, ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        """The text of `ids`, and the offset at which each begins."""
        parts, starts = [], []
        for token in ids:
            starts.append(self._num_chars)
            parts.append(self._detokenizer.feed((token,)))
            self._num_chars += len(parts[-1])
        return "".join(parts), starts

    def _spell_to_stop(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text that may go out, and the offsets of the ids that produced it."""
        out: list[str] = []
        starts: list[int] = []
        for number, token in enumerate(ids, self.num_tokens + 1):
            text, start = self._spell((token,))
            starts += start
            is_checked = self._stops is not None and number > self._options.min_tokens
            out.append(self._stops.feed(text) if is_checked and self._stops is not None else text)
            if self._stops is not None and self._stops.is_hit:
                self.finish = "stop"
                break
        return "".join(out), starts

    def _named(self, token: int, logprob: TokenLogprob | None, at: int) -> TokenText:
        data = self._tokenizer.token_bytes[token]
        if logprob is None:
            return TokenText(self._name(token, data), data, None, [], at)
        names = []
        for other, value in logprob.top[: self._options.num_top]:
            spelled = self._tokenizer.token_bytes[other]
            names.append((self._name(other, spelled), spelled, value))
        return TokenText(self._name(token, data), data, logprob.logprob, names, at)

    def _name(self, token: int, data: bytes) -> str:
        return f"token_id:{token}" if self._options.names_ids else name_of(data)


def name_of(data: bytes) -> str:
    """A token as a string.

    Bytes that are no UTF-8 text are written as `bytes:\\xff`, as in the OpenAI API.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
