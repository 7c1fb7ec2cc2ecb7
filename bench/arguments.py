"""Types of command-line arguments that the benchmarks share."""

import argparse
from collections.abc import Callable


def at_least(low: int) -> Callable[[str], int]:
    """A whole number of `low` or more; anything else is a usage error."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return number
