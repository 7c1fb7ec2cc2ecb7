"""`baton decode`: one decode worker process."""

import sys
from collections.abc import Sequence

from ..cluster.config.roles import DecodeConfig
from ..cluster.process.process import Serve
from ..worker.run_worker import run_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Run until drained; returns the exit code."""
    return run_worker(DecodeConfig, argv, start=start)


def start(config: DecodeConfig, instance: str) -> Serve:
    """Load the engine and open the sockets."""
    from .startup import DecodeStartup

    return DecodeStartup(config, instance).run()


if __name__ == "__main__":
    sys.exit(main())
