"""The cost of a prompt on prefill and on decode, fitted to the workers' timings: decides where a short prompt
runs. Pure.

Prefill computes a prompt apart from the running streams and hands its KV over. Decode computes it between two
steps of its batch, which waits, and hands nothing over. The time of each side is a line, `fixed + slope *
tokens`, fitted by recursive least squares with a forgetting factor (Haykin, "Adaptive Filter Theory"). A
prompt runs where the total delay over all requests is smaller: a side's time counts once for the request and
once for every stream that waits for it. Prompts that come first do not wait.
"""

from ...cluster.protocol.messages import DecodeTimeline, PrefillTimeline
from ...cluster.telemetry.linear_fit import LinearFit
from ..workers.registry import Backlog


class CostModel:
    """The fits of one fingerprint: prefill's forward, the hand-off, decode's own prefill."""

    def __init__(self) -> None:
        self.prefill, self.handoff, self.local = LinearFit(), LinearFit(), LinearFit()
        self.pull = LinearFit()  # of prefixes by prefill

    def __repr__(self) -> str:
        fits = f"prefill={self.prefill}, handoff={self.handoff}, local={self.local}, pull={self.pull}"
        return f"CostModel({fits})"

    def prefilled(self, timeline: PrefillTimeline, *, is_local: bool) -> None:
        """Adds the timing of a computed prompt."""
        tokens = max(0, timeline.prompt_tokens - timeline.cached_tokens)
        (self.local if is_local else self.prefill).add(tokens, timeline.busy_ms / 1000)

    def handed_over(self, num_tokens: int, timeline: DecodeTimeline) -> None:
        """Adds the timing of a hand-off of `num_tokens` tokens."""
        self.handoff.add(num_tokens, timeline.handoff_ms / 1000)

    def pulled(self, num_tokens: int, seconds: float) -> None:
        """Adds the timing of a pull of `num_tokens` tokens from decode by prefill, its waits included."""
        self.pull.add(num_tokens, seconds)

    def on_prefill(self, backlog: Backlog, num_new: int) -> float:
        """Seconds until prefill has computed `num_new` tokens behind `backlog`."""
        return _behind(self.prefill, backlog, num_new)

    def is_local_cheaper(
        self,
        *,
        new_on_prefill: int,
        new_on_decode: int,
        before_on_prefill: Backlog,
        before_on_decode: Backlog,
        running: int,
    ) -> bool:
        """Whether decode, with `running` streams, should compute a prompt that lacks `new_on_decode` tokens
        there.

        `new_on_prefill` tokens are uncached on prefill. Other prompts come before it on either side. Until
        decode's own times are known, prefill's stand in, since the model is the same. Without prefill's and
        the hand-off's times the answer is no.
        """
        if not (self.prefill.is_known and self.handoff.is_known):
            return False
        here = self.local if self.local.is_known else self.prefill
        local = _behind(here, before_on_decode, new_on_decode) + here.at(new_on_decode) * running
        remote = self.on_prefill(before_on_prefill, new_on_prefill) + self.handoff.at(new_on_decode)
        return local < remote


def _behind(line: LinearFit, backlog: Backlog, num_new: int) -> float:
    return line.total(backlog.prompts + 1, backlog.tokens + num_new)
