"""`baton prefill`: one prefill worker process."""

import sys
from collections.abc import Sequence

from ..cluster.config.roles import PrefillConfig
from ..cluster.errors import ConfigError
from ..cluster.net.endpoints import advertise_fault
from ..cluster.net.sockets import check_bind_address
from ..cluster.process.process import Serve
from ..worker.life import run_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Run until drained; returns the exit code."""
    return run_worker(PrefillConfig, argv, start=start)


def start(config: PrefillConfig, instance: str) -> Serve:
    """Check the addresses, then load the engine. Raises ConfigError for an address that cannot be used."""
    check_bind_address(config.kv_bind, config.trusted_network, has_keys=bool(config.keys))
    if fault := advertise_fault(config.kv_bind, config.kv_advertise):
        raise ConfigError(fault)
    from .startup import PrefillStartup

    return PrefillStartup(config, instance).run()


if __name__ == "__main__":
    sys.exit(main())
