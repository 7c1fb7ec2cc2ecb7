"""The life of a worker process: read the settings, load the engine, serve, drain, leave.

This file loads no torch, so a wrong flag or --help answers at once.
"""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..cluster.config.load import load_config
from ..cluster.config.roles import WorkerConfig
from ..cluster.net.transport_names import check_nixl, may_be_open
from ..cluster.process.log import configure
from ..cluster.process.process import Serve, run_role
from ..cluster.security.ciphers import ciphers_of

C = TypeVar("C", bound=WorkerConfig)


def run_worker(config_type: type[C], argv: Sequence[str] | None, *, start: Callable[[C, str], Serve]) -> int:
    """Run a worker of a role until it has drained; returns the exit code.

    `argv` None: the arguments of this process. `start(config, instance)` loads the engine and returns the
    serving function.
    """
    arguments = sys.argv[1:] if argv is None else argv

    def configured() -> Serve:
        config = load_config(config_type, arguments, os.environ)
        instance = secrets.token_hex(16)
        configure(config.role, instance, level=config.log_level, log_format=config.log_format)
        has_keys = bool(config.keys)
        ciphers = ciphers_of(config.kv_cipher, has_keys=has_keys, trusted_network=config.trusted_network)
        is_open = may_be_open(ciphers, trusted_network=config.trusted_network)
        check_nixl(config.transports, may_be_open=is_open)
        return start(config, instance)

    return run_role(f"baton {config_type.role}", configured)
