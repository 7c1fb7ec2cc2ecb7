"""The order of requests of different classes, on the router and on workers. Pure.

A request's rank is its time of arrival plus `PRIORITY_S` per step of lower priority. An urgent request thus
overtakes those that arrived shortly before it, and urgent requests cannot delay another one forever.
"""

PRIORITY_S = 10.0  # seconds of waiting that one step of priority is worth


def rank(arrived: float, priority: int) -> float:
    """The rank in seconds; lower goes first."""
    return arrived + PRIORITY_S * priority
