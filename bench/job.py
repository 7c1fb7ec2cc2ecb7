"""What benchmarks that start servers of their own share on the command line."""

import json
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from ..cluster.errors import BatonError
from ..cluster.process.progress import JobProgress
from ..engine.errors import CheckpointError


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments in front of `--`, and those behind it, which are the server's."""
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


Found = TypeVar("Found", bound=Collection[object])


def report_of(
    found: Found,
    as_document: Callable[[Found], dict[str, object]],
    as_table: Callable[[Found], str],
    *,
    is_json: bool,
) -> str:
    """What was measured, as one JSON document or as a table; "" for nothing."""
    if not found:
        return ""
    return json.dumps(as_document(found)) + "\n" if is_json else as_table(found)


def run_job(
    prog: str, work: Callable[[JobProgress], tuple[str, int]], so_far: Callable[[], str] = str
) -> int:
    """Runs `work`, which gives the text to print and the exit code, with a progress display.

    Returns that code; 1, with one line of `prog`, where it raises what a user can mend; 130 if interrupted:
    then `so_far()` is printed, what it has measured until then.
    """
    progress = JobProgress()
    try:
        text, code = work(progress)
    except (BatonError, CheckpointError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        sys.stdout.write(so_far())
        return 130
    finally:
        progress.close()
    sys.stdout.write(text)
    return code
