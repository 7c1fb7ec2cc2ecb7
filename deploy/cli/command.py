"""Runs a terminal command: returns its exit code, and writes one line to stderr on failure."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from ...cluster.errors import BatonError, ConfigError
from ...cluster.process.process import EXIT_CANNOT_START, EXIT_INTERRUPTED, EXIT_USAGE


def run_command(prog: str, work: Callable[[], int]) -> int:
    """Runs `work` and returns its exit code; 2 for ConfigError, 1 for another BatonError, 130 on Ctrl-C."""
    try:
        return work()
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return EXIT_USAGE
    except BatonError as error:
        sys.stderr.write(f"{prog}: {error}\n")
    except BrokenPipeError:
        _discard_output()
        sys.stderr.write(f"{prog}: the output was closed before its end\n")
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return EXIT_INTERRUPTED
    return EXIT_CANNOT_START


def _discard_output() -> None:
    """Discards buffered output for a closed pipe, which would fail again at the interpreter's exit."""
    with suppress(OSError, ValueError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
