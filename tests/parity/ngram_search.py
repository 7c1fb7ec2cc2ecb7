"""A parity engine that drafts by lookup, and what lookup finds, by a plain search over lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.engine.hub import NGRAM
from baton.engine.models.config import ModelConfig
from baton.engine.models.interface import CausalLM
from baton.engine.speculative.drafters.ngram import NgramConfig, NgramDrafter
from baton.tests.parity.eagle3_engine import Engine

SETTINGS = NgramConfig(shortest=2, longest=4, window=64, dtype="float32")


@dataclass
class NgramEngine(Engine):
    """One target with drafts by lookup."""

    head: Path | None = Path(NGRAM)
    steps: int = 4
    config: NgramConfig = SETTINGS

    def make_drafter(self, model: CausalLM, config: ModelConfig) -> NgramDrafter:
        return NgramDrafter(self.config, capacity=2, device=self.device)


def lookup(text: Sequence[int], config: NgramConfig, count: int) -> list[int]:
    """`count` drafts behind `text`, or none: what followed the longest agreement, the newest of these."""
    known = list(text[-config.window :])
    for length in range(config.longest, config.shortest - 1, -1):
        ends = range(len(known) - 1, length - 1, -1)
        end = next((e for e in ends if known[e - length : e] == known[len(known) - length :]), None)
        if end is not None:
            start = len(known)
            for ahead in range(count):
                known.append(known[end + ahead])
            return known[start:]
    return []
