"""`baton prefill`: one prefill worker process."""

import sys
from collections.abc import Sequence

from ..cluster.config.roles import PrefillConfig
from ..cluster.process.process import Serve
from ..worker.run_worker import run_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Run until drained; returns the exit code."""
    return run_worker(PrefillConfig, argv, start=start)


def start(config: PrefillConfig, instance: str) -> Serve:
    """Load the engine and open the sockets."""
    from .startup import PrefillStartup

    return PrefillStartup(config, instance).run()


if __name__ == "__main__":
    sys.exit(main())
