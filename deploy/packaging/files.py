"""`baton deploy`: writes the files that run baton under a service manager."""

import sys
from collections.abc import Callable, Sequence

from ...cluster.config.fields import did_you_mean
from ...cluster.process.process import EXIT_USAGE
from . import units

KINDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "systemd": (units.main, "units of one host"),
}


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand that `argv` names and returns its exit code."""
    kind = argv[0] if argv else ""
    if kind in KINDS:
        return KINDS[kind][0](argv[1:])
    if kind and kind not in ("-h", "--help"):
        hint = did_you_mean(kind, KINDS) or f"; kinds: {', '.join(KINDS)}"
        sys.stderr.write(f"baton deploy: unknown kind {kind!r}{hint}\n")
        return EXIT_USAGE
    lines = [f"  {name:<12} {text}" for name, (_, text) in KINDS.items()]
    stream = sys.stdout if kind in ("-h", "--help") else sys.stderr
    stream.write("\n".join(["usage: baton deploy KIND [options]", "", *lines]) + "\n")
    return 0 if stream is sys.stdout else EXIT_USAGE
