"""Reasoning between two markers at the beginning of an answer, and text and calls after it.

A template may write the opening marker into the prompt. Then the answer begins inside of the reasoning.
"""

from dataclasses import dataclass

from .parts import NOTHING, CallPart, Reader, Split, held_back


@dataclass(frozen=True)
class Markers:
    """The texts around reasoning."""

    open: str
    close: str


class PlainReader:
    """Leaves all text as it is."""

    is_thinking = False
    num_calls = 0

    def __repr__(self) -> str:
        return "PlainReader()"

    def feed(self, text: str) -> Split:
        return Split(text)

    def flush(self) -> Split:
        return NOTHING


class ThinkingReader:
    """Splits reasoning from the rest, which `after` reads. White space around the markers is dropped.

    `is_thinking` at the start means that the prompt ends with the opening marker.
    """

    def __init__(self, markers: Markers, after: Reader, *, is_thinking: bool) -> None:
        self._markers = markers
        self._after = after
        self._held = ""
        self._is_at_start = True  # nothing but white space since the last marker
        self._is_over = False  # the reasoning has ended, or there is none
        self.is_thinking = is_thinking

    def __repr__(self) -> str:
        state = "thinking" if self.is_thinking else "over" if self._is_over else "at the start"
        return f"ThinkingReader({state}, {self._after})"

    @property
    def num_calls(self) -> int:
        return self._after.num_calls

    def feed(self, text: str) -> Split:
        self._held += text
        split = NOTHING
        if not self.is_thinking and not self._is_over:
            self._read_start()
        if self.is_thinking:
            split += self._read_reasoning()
        if self._is_over and self._is_at_start:
            self._held = self._held.lstrip()
            self._is_at_start = not self._held
        if self._is_over and self._held:
            held, self._held = self._held, ""
            split += self._after.feed(held)
        return split

    def flush(self) -> Split:
        held, self._held = self._held, ""
        if self.is_thinking:
            return Split(reasoning=held.rstrip())
        return self._after.feed(held) + self._after.flush()

    def _read_start(self) -> None:
        """Decides whether the text begins with the opening marker."""
        opening, text = self._markers.open, self._held.lstrip()
        if text.startswith(opening):
            self.is_thinking, self._held = True, text[len(opening) :]
        elif not opening.startswith(text):
            self._is_over, self._is_at_start = True, False

    def _read_reasoning(self) -> Split:
        if self._is_at_start:
            self._held = self._held.lstrip()
        closing = self._markers.close
        thought, found, rest = self._held.partition(closing)
        if found:
            self.is_thinking, self._is_over, self._is_at_start = False, True, True
            self._held = rest
            return Split(reasoning=thought.rstrip())
        self._is_at_start = self._is_at_start and not self._held
        whole = len(self._held)
        cut = len(self._held[: whole - held_back(self._held, (closing,))].rstrip())
        self._held, thought = self._held[cut:], self._held[:cut]
        return Split(reasoning=thought)


class OneCallReader:
    """Drops all calls of a reader but the first: `parallel_tool_calls` is false."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __repr__(self) -> str:
        return f"OneCallReader({self._reader})"

    @property
    def num_calls(self) -> int:
        return min(1, self._reader.num_calls)

    @property
    def is_thinking(self) -> bool:
        return self._reader.is_thinking

    def feed(self, text: str) -> Split:
        return _first_only(self._reader.feed(text))

    def flush(self) -> Split:
        return _first_only(self._reader.flush())


def _first_only(split: Split) -> Split:
    kept: tuple[CallPart, ...] = tuple(call for call in split.calls if call.index == 0)
    return split._replace(calls=kept)
