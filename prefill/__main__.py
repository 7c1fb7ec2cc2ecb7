"""`baton prefill`: one prefill worker process."""

import os
import secrets
import sys
from collections.abc import Sequence

from ..cluster.config.load import load_config
from ..cluster.config.roles import PrefillConfig
from ..cluster.errors import ConfigError
from ..cluster.net.endpoints import advertise_fault
from ..cluster.net.sockets import check_bind_address
from ..cluster.process.log import configure
from ..cluster.process.process import Serve, run_role
from ..cluster.security.ciphers import ciphers_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run until drained; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_role("baton prefill", lambda: configured(arguments))


def configured(argv: Sequence[str]) -> Serve:
    """Read the settings, then load what is slow to load: a wrong flag or --help need not wait for torch."""
    config = load_config(PrefillConfig, argv, os.environ)
    instance = secrets.token_hex(16)
    configure("prefill", instance, level=config.log_level, log_format=config.log_format)
    ciphers_of(config.kv_cipher, has_keys=bool(config.keys), trusted_network=config.trusted_network)
    check_bind_address(config.kv_bind, config.trusted_network, has_keys=bool(config.keys))
    if fault := advertise_fault(config.kv_bind, config.kv_advertise):
        raise ConfigError(fault)
    from .startup import start

    return start(config, instance)


if __name__ == "__main__":
    sys.exit(main())
