"""Which rank of a tensor-parallel worker is lost: pure, fed by a thread of rank 0.

A rank that has ended is lost at once. A rank gives signs of life between plans and between the layers of a
forward, and in a start at each phase and each vote on a graph; one that waits for others in a collective
gives none. Of the ranks without a sign for the limit, the one that fell silent first is lost: it is the one
that the others wait for.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

# The longest silence of a start. Its longest phase reads weights: 600 GiB at 200 MiB/s take 50 minutes.
START_LIMIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class RankSign:
    """What is seen of a rank.

    `code`: as `Popen.returncode`, None while it runs. `seen_alive`: the time of its last sign of life, in any
    unit. `state`: the letter of its state in /proc.
    """

    rank: int
    pid: int
    code: int | None
    seen_alive: int
    state: str = ""


class RankWatch:
    """Counts looks without a sign of life. A pause of this process counts as one look, however long.

    `limit_s`: the longest silence, 0 for any, in a start too; `start_limit_s`: that of a start; `every_s`:
    the time between two looks.
    """

    def __init__(self, limit_s: float, every_s: float, start_limit_s: float = START_LIMIT_S) -> None:
        self.limit_s = limit_s
        self.start_limit_s = start_limit_s
        self._every_s = every_s
        self._silent: dict[int, int] = {}  # looks without a sign, by rank
        self._last: dict[int, int] = {}
        self._was_serving = False

    def look(self, signs: Sequence[RankSign], *, is_serving: bool) -> str:
        """Takes in the signs of all ranks; returns why the worker must end, or "".

        A start computes for long without a sign, so it has a limit of its own. Its silence does not count
        once the worker serves.
        """
        for sign in signs:
            if sign.code is not None:
                return f"rank {sign.rank} (pid {sign.pid}) {_end_of(sign.code)}"
        if not self.limit_s:
            return ""
        if is_serving and not self._was_serving:
            self._last.clear()
        self._was_serving = is_serving
        limit_s = self.limit_s if is_serving else self.start_limit_s
        for sign in signs:
            is_new = self._last.get(sign.rank) != sign.seen_alive
            self._last[sign.rank] = sign.seen_alive
            self._silent[sign.rank] = 0 if is_new else self._silent.get(sign.rank, 0) + 1
        silent = [sign for sign in signs if self._silent[sign.rank] * self._every_s >= limit_s]
        if not silent:
            return ""
        first = min(silent, key=lambda sign: (sign.state != "T", sign.seen_alive))
        how = "is stopped" if first.state == "T" else "hangs" if is_serving else "hangs in the start"
        return f"rank {first.rank} (pid {first.pid}) {how}: no sign of life for {limit_s:g} s"


def _end_of(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"
