"""The cost of a prompt on prefill and on decode, fitted to the workers' timings: decides where a short prompt
runs. Pure.

Prefill computes a prompt apart from the running streams and hands its KV over. Decode computes it between two
steps of its batch, which waits, and hands nothing over. The time of each side is a line, `fixed + slope *
tokens`, fitted by recursive least squares with a forgetting factor (Haykin, "Adaptive Filter Theory"). A
prompt runs where the total delay over all requests is smaller: a side's time counts once for the request and
once for every request that waits for it.
"""

from dataclasses import dataclass, field

from ...cluster.protocol.messages import DecodeTimeline, PrefillTimeline

FORGETTING = 0.98  # factor on the weight of older samples, per new sample
MIN_SAMPLES = 3  # samples before a line is used


@dataclass(eq=False)
class LinearFit:
    """Seconds as a linear function of tokens."""

    num_samples: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # weights of 1, x, x^2, y, x*y

    def __repr__(self) -> str:
        return f"LinearFit({self.num_samples} samples)"

    @property
    def is_known(self) -> bool:
        return self.num_samples >= MIN_SAMPLES

    def add(self, tokens: int, seconds: float) -> None:
        """Adds one sample."""
        self.num_samples += 1
        n, x, xx, y, xy = self._sums
        old = FORGETTING
        self._sums = [
            old * n + 1.0,
            old * x + tokens,
            old * xx + tokens**2,
            old * y + seconds,
            old * xy + tokens * seconds,
        ]

    def at(self, tokens: int) -> float:
        """Predicted seconds for `tokens`; neither coefficient is below 0."""
        n, x, xx, y, xy = self._sums
        if not n:
            return 0.0
        spread = xx - x * x / n
        slope = max(0.0, (xy - x * y / n) / spread) if spread > 1e-6 * max(1.0, xx) else 0.0
        fixed = (y - slope * x) / n
        if fixed < 0 < xx:  # fit a line through 0 instead
            slope, fixed = xy / xx, 0.0
        return fixed + slope * tokens


class CostModel:
    """The fits of one fingerprint: prefill's forward, the hand-off, decode's own prefill."""

    def __init__(self) -> None:
        self.prefill, self.handoff, self.local = LinearFit(), LinearFit(), LinearFit()

    def __repr__(self) -> str:
        return f"CostModel(prefill={self.prefill}, handoff={self.handoff}, local={self.local})"

    def prefilled(self, timeline: PrefillTimeline, *, is_local: bool) -> None:
        """Adds the timing of a computed prompt."""
        tokens = max(0, timeline.prompt_tokens - timeline.cached_tokens)
        (self.local if is_local else self.prefill).add(tokens, timeline.prefill_ms / 1000)

    def handed_over(self, num_tokens: int, timeline: DecodeTimeline) -> None:
        """Adds the timing of a hand-off of `num_tokens` tokens."""
        self.handoff.add(num_tokens, timeline.handoff_ms / 1000)

    def is_local_cheaper(
        self,
        *,
        new_on_prefill: int,
        new_on_decode: int,
        queued_on_prefill: int,
        queued_on_decode: int,
        running: int,
    ) -> bool:
        """Whether decode, with `running` requests, should compute a prompt that lacks `new_on_decode` tokens
        there.

        `new_on_prefill` tokens are uncached on prefill. The queued tokens of other prompts come first on
        either side. Until decode's own times are known, prefill's stand in, since the model is the same.
        Without prefill's and the hand-off's times the answer is no.
        """
        if not (self.prefill.is_known and self.handoff.is_known):
            return False
        here = self.local if self.local.is_known else self.prefill
        local = here.at(queued_on_decode + new_on_decode) + here.at(new_on_decode) * running
        remote = self.prefill.at(queued_on_prefill + new_on_prefill) + self.handoff.at(new_on_decode)
        return local < remote
