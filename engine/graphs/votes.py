"""The votes by which the ranks of a worker keep the same graphs.

A graph of a model that ranks share holds sums over all of them, so a graph that one rank lacks would leave
the others waiting in it. Each rank says whether it has what is voted on, and has it only if all do. All ranks
cast the same votes in the same order; a rank that fails casts one "no", which ends what the others vote on.
"""

from collections.abc import Callable
from typing import TypeAlias

# Whether it is so on all ranks; waits for their votes.
Vote: TypeAlias = Callable[[bool], bool]


def alone(is_so: bool) -> bool:
    """The vote of a worker with one rank."""
    return is_so
