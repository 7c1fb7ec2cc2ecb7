"""The learning rate of each step of a training run: a linear warm-up, then a cosine."""

import math
from typing import Protocol


class RateSettings(Protocol):
    """What the rate depends on; see `TrainSettings`."""

    @property
    def lr(self) -> float:
        """The highest rate."""

    @property
    def minutes(self) -> float:
        """The length of a run that ends by time."""

    @property
    def warmup(self) -> float:
        """The share of the run in which the rate rises."""

    @property
    def final_rate(self) -> float:
        """The share of `lr` that is left at the end."""


def learning_rate(step: int, total: int, settings: RateSettings) -> float:
    """The rate of `step` (from 0): linear warm-up, then a cosine down to `final_rate`."""
    warmup = max(1, int(settings.warmup * total))
    return _rate((step + 1) / warmup, (step - warmup) / max(1, total - warmup), settings)


def timed_rate(seconds: float, settings: RateSettings) -> float:
    """As `learning_rate`, by the seconds that are gone of `minutes`."""
    share = seconds / (60 * settings.minutes)
    # the first step is taken at second 0
    begun = (share + 0.001) / max(settings.warmup, 0.001)
    return _rate(begun, (share - settings.warmup) / (1 - settings.warmup), settings)


def _rate(warm: float, share: float, settings: RateSettings) -> float:
    if warm < 1:
        return settings.lr * warm
    low = settings.final_rate
    return settings.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, share)))))
