"""Reports the verdicts of a judge's groups of calls; it needs only the standard library."""

from collections.abc import Callable, Sequence


def make_all(calls: Sequence[Callable[[], object]], kind: str) -> int:
    """Makes all of them and prints how many passed, and what went wrong; the exit code."""
    failed = []
    for call in calls:
        try:
            call()
        except Exception as error:
            failed.append(f"{call.__name__}: {type(error).__name__}: {error}"[:300])
    print(f"{len(calls) - len(failed)} of {len(calls)} groups of {kind} {failed or ''}")
    return 1 if failed else 0
