"""Totals of what flows through the router, counted when it happens: the source of its charts.

The metrics count a request at its end. Charts need tokens when they arrive.
"""

from collections import Counter

from msgspec import Struct

MOST_KEPT = 512  # times to the first token, and gaps, kept between two readings; further ones are left out


class FlowTotals(Struct, frozen=True, kw_only=True):
    """The flow since the reading before."""

    output_tokens: int
    prompt_tokens: int
    """Of prompts whose first token was delivered."""
    ended: dict[str, int]
    """Requests by outcome."""
    ttfts: list[float]
    """Seconds from a request to its first token."""
    gaps: list[float]
    """Seconds between two tokens of a stream."""


class Flow:
    """Filled by the dispatcher, emptied by its one reader."""

    def __init__(self) -> None:
        self._clear()

    def __repr__(self) -> str:
        return f"Flow({self._output_tokens} tokens, {sum(self._ended.values())} requests)"

    def _clear(self) -> None:
        self._output_tokens = self._prompt_tokens = 0
        self._ended: Counter[str] = Counter()
        self._ttfts: list[float] = []
        self._gaps: list[float] = []

    def first_token(self, ttft_s: float, num_prompt: int) -> None:
        """The first tokens of a room were delivered."""
        self._prompt_tokens += num_prompt
        if len(self._ttfts) < MOST_KEPT:
            self._ttfts.append(ttft_s)

    def tokens(self, num_tokens: int) -> None:
        """Tokens were delivered, the first of a room included."""
        self._output_tokens += num_tokens

    def gap(self, gap_s: float) -> None:
        """Tokens of a stream came `gap_s` a token after the ones before."""
        if len(self._gaps) < MOST_KEPT:
            self._gaps.append(gap_s)

    def ended(self, outcome: str) -> None:
        """A request ended."""
        self._ended[outcome] += 1

    def take(self) -> FlowTotals:
        """The flow since the last call."""
        totals = FlowTotals(
            output_tokens=self._output_tokens,
            prompt_tokens=self._prompt_tokens,
            ended=dict(self._ended),
            ttfts=self._ttfts,
            gaps=self._gaps,
        )
        self._clear()
        return totals
