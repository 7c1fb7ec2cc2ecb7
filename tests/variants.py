"""Variants of a law: a few in `make test` as its witnesses, the others from `make test-cluster` on, or slow
tests of `make test-full`.
"""

from collections.abc import Collection, Iterable

import pytest


def slow(*values: object, id: str | None = None) -> object:
    """A set of parameters that only `make test-full` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def second(*values: object, id: str | None = None) -> object:
    """A set of parameters that runs from `make test-cluster` on."""
    return pytest.param(*values, id=id, marks=pytest.mark.cluster)


def witnesses(values: Iterable[object], quick: Collection[object]) -> list[object]:
    """All `values` as parameters, of which those in `quick` are in `make test`. Tuples are several values."""
    known = list(values)
    assert set(quick) <= set(known), f"no variants: {set(quick) - set(known)}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else pytest.mark.slow,
        )
        for value in known
    ]
