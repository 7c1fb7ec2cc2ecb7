"""The change of a worker's role: the process drains, and starts again in the other role.

    order     checked against the settings of the other role before anything is given up
    drain     no new requests; running ones end, or go on elsewhere when the time is over
    return    the process replaces its program (execve): it keeps its PID, its place under a supervisor, its
              GPU and its environment. Weights come from the page cache

The other role gets the settings that both roles have. It reads the others from its own environment variables
and its table of `--config`.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from ..cluster.config.fields import as_text, describe, flag_of, settings_of
from ..cluster.config.load import COMMAND_LINE, load_config
from ..cluster.config.roles import DecodeConfig, PrefillConfig, WorkerConfig
from ..cluster.errors import ConfigError
from ..cluster.process.log import PACKAGE, fields
from ..cluster.protocol.messages import CHANGING_ROLE, ChangeRole

logger = logging.getLogger(__name__)

CONFIGS: Mapping[str, type[WorkerConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
LAST_FILE = 1 << 16  # file descriptors below are closed before the program is replaced


class RoleChange:
    """The newest order to change the role of a worker.

    `on_order` begins the drain. `check` returns the fault of the settings for a role, "" where they are fine.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.target = ""  # the role to come; "": no order was taken
        self.fault = ""  # why the newest order was refused
        self.on_order: Callable[[ChangeRole], None] = lambda order: None
        self.check: Callable[[str], str] = lambda role: "this worker cannot be started again"
        self._order = ""

    def __repr__(self) -> str:
        return f"<RoleChange {self.role}{f' to {self.target}' if self.target else ''}>"

    @property
    def state(self) -> str:
        """The state of the worker for its heartbeat; "" without a change."""
        return CHANGING_ROLE if self.target else ""

    def take(self, order: ChangeRole) -> None:
        """Takes an order. Ignores a repeated one, one for the present role, and any behind the first that was
        taken.
        """
        if self.target or order.order == self._order or order.role == self.role:
            return
        self._order, self.fault = order.order, self.check(order.role)
        if self.fault:
            logger.warning("role change refused: %s", self.fault)
            return
        self.target = order.role
        logger.info("role changes", extra=fields(role=self.role, to=order.role))
        self.on_order(order)


def settings_fault(config: WorkerConfig, role: str, env: Mapping[str, str]) -> str:
    """The fault of the settings with which `role` would start in place of `config`; "" if there is none."""
    try:
        load_config(CONFIGS[role], argv_as(config, role, env), env, warns=False)
    except ConfigError as error:
        return str(error)
    return ""


def argv_as(config: WorkerConfig, role: str, env: Mapping[str, str]) -> list[str]:
    """The flags of a worker of `role` in place of `config`: its settings, unless `role` has its own in `env`
    or in the file. Raises ConfigError.
    """
    known = settings_of(CONFIGS[role])
    given = [name for name in config.explicit if name in known]
    first = [name for name in given if config.explicit[name] == COMMAND_LINE or name in ("config", "model")]
    found = load_config(CONFIGS[role], _flags(config, first), env, warns=False)
    rest = [name for name in given if name not in first and name not in found.explicit]
    return _flags(config, first + rest)


def _flags(config: WorkerConfig, names: list[str]) -> list[str]:
    known = settings_of(type(config))
    return [f"{flag_of(name)}={as_text(getattr(config, name), describe(known[name]))}" for name in names]


def start_as(role: str, argv: list[str]) -> NoReturn:
    """Replaces the program of this process by a worker of `role`."""
    sys.stdout.flush()
    sys.stderr.flush()
    safe = ["-P"] if sys.version_info >= (3, 11) else []  # as `baton up` starts its children
    os.closerange(3, LAST_FILE)
    os.execv(sys.executable, [sys.executable, *safe, "-m", f"{PACKAGE}.{role}", *argv])
