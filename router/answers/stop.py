"""Stop strings in a stream of text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds the first of `stops` in streamed text. Withholds only text that may begin a stop string.

    With `keeps_stop` the text ends with the stop string, else before it.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._keeps_stop = keeps_stop
        assert all(stops), "empty stop string"
        self._stops = tuple(stops)
        self._held = ""
        self.hit = ""  # the stop string that was found

    def __repr__(self) -> str:
        return f"StopStrings({len(self._stops)} stops, held={len(self._held)}, hit={self.is_hit})"

    @property
    def is_hit(self) -> bool:
        return bool(self.hit)

    def feed(self, text: str) -> str:
        """Adds text.

        Returns the text that may go out now; after a hit, the text up to the stop string, then "".
        """
        if self.is_hit or not self._stops:
            return "" if self.is_hit else text
        text = self._held + text
        # The stop string that is complete first wins, so the result does not depend on the cuts of the text.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self.hit, self._held = text[at:end], ""
            return text[: end if self._keeps_stop else at]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Ends the text. Returns the withheld rest."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
