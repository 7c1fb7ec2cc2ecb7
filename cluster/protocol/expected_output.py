"""How much more output a request is expected to give, on the router and on decode. Pure."""

LATE_SHARE = 4  # an output longer than expected counts on this part of the expectation, again and again


def expected_left(expected: int, produced: int, remaining: int) -> int:
    """Output tokens to count on, of the `remaining` ones, for a request that has produced some.

    `expected` is for the whole output; 0 means unknown: then all remaining ones are counted on.
    """
    if not expected:
        return remaining
    return min(remaining, max(expected - produced, expected // LATE_SHARE, 1))
