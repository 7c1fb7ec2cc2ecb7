"""The life of a worker process: read the settings, load the engine, serve, drain, leave.

This file loads no torch, so a wrong flag or --help answers at once.
"""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..cluster.config.link_checks import check_links
from ..cluster.config.load import load_config
from ..cluster.config.roles import WorkerConfig
from ..cluster.config.tier_checks import check_tiers
from ..cluster.errors import ConfigError
from ..cluster.process.log import configure
from ..cluster.process.process import EXIT_OTHER_ROLE, Serve, run_role
from ..engine.errors import UnknownCheckpoint
from .role_change import CONFIGS, argv_as, start_as

C = TypeVar("C", bound=WorkerConfig)


def run_worker(config_type: type[C], argv: Sequence[str] | None, *, start: Callable[[C, str], Serve]) -> int:
    """Run a worker of a role until it has drained; returns the exit code.

    `argv` None: the arguments of this process. `start(config, instance)` loads the engine and returns the
    serving function. A worker whose role changes does not return: its process starts in the other role.
    """
    arguments = sys.argv[1:] if argv is None else argv
    settings: list[C] = []

    def configured() -> Serve:
        config = load_config(config_type, arguments, os.environ)
        settings.append(config)
        instance = secrets.token_hex(16)
        configure(config.role, instance, level=config.log_level, log_format=config.log_format)
        check_links(config)
        check_tiers(config)
        try:
            return start(config, instance)
        except UnknownCheckpoint as error:
            raise ConfigError(str(error)) from None

    code = run_role(f"baton {config_type.role}", configured)
    if code == EXIT_OTHER_ROLE:
        role = next(role for role in CONFIGS if role != config_type.role)
        start_as(role, argv_as(settings[0], role, os.environ))
    return code
