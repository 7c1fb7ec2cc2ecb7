"""Argument types that the benchmarks' command lines share."""

import argparse
import math
from collections.abc import Callable

SAMPLING = {  # how a request chooses its tokens, as far as a step's work depends on it
    "temperature": float, "top_k": int, "top_p": float, "min_p": float,
    "repetition_penalty": float, "frequency_penalty": float, "presence_penalty": float,
}  # fmt: skip


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `low`. Any other text is a usage error."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return number


def sampling(names: dict[str, type[float] | type[int]]) -> Callable[[str], dict[str, float]]:
    """An argparse type: NAME=VALUE[,NAME=VALUE...] of these `names`. Any other text is a usage error."""

    def fields(text: str) -> dict[str, float]:
        given = dict(part.partition("=")[::2] for part in text.split(","))
        if unknown := sorted(given.keys() - names.keys()):
            raise argparse.ArgumentTypeError(f"no setting {', '.join(unknown)}; there are {', '.join(names)}")
        return {name: _finite(name, value, names[name]) for name, value in given.items()}

    return fields


def _finite(name: str, text: str, kind: type[float] | type[int]) -> float:
    try:
        value = kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}={text}: {error}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{name}={text} is no number")
    return value
