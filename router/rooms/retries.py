"""The limits on repeated attempts: a number per room, and a budget over all rooms, so that a fault cannot
multiply load. Pure."""

from collections import deque

MAX_ATTEMPTS = 3  # of one room
BUDGET_SHARE = 0.2  # repeated attempts per room
BUDGET_FLOOR = 10  # repeated attempts always allowed within the window
BUDGET_WINDOW_S = 60.0
BUDGET_STEP_S = 1.0  # length of one step of the sliding window


class RetryBudget:
    """Allows repeated attempts for a fifth of the rooms within the window, or of the live rooms."""

    def __init__(self) -> None:
        # [begin, rooms, repeated attempts] of each step of the window
        self._steps: deque[list[float]] = deque()

    def __repr__(self) -> str:
        return f"RetryBudget({self._sum(2):g} of {self._sum(1):g} rooms)"

    def came(self, num_rooms: int, now: float) -> None:
        """Counts new rooms."""
        self._step(now)[1] += num_rooms

    def take(self, num_live: int, now: float) -> bool:
        """Whether one more repeated attempt is allowed; counts it if so."""
        step = self._step(now)
        allowed = max(BUDGET_FLOOR, BUDGET_SHARE * max(num_live, self._sum(1)))
        if self._sum(2) + 1 > allowed:
            return False
        step[2] += 1
        return True

    def _step(self, now: float) -> list[float]:
        while self._steps and now - self._steps[0][0] >= BUDGET_WINDOW_S:
            self._steps.popleft()
        if not self._steps or now - self._steps[-1][0] >= BUDGET_STEP_S:
            self._steps.append([now, 0, 0])
        return self._steps[-1]

    def _sum(self, column: int) -> float:
        return sum(step[column] for step in self._steps)
