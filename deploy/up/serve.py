"""`baton serve`: `baton up` without prefill workers. Each decode worker computes prompts itself."""

import dataclasses
from collections.abc import Sequence

from ...cluster.config.load import COMMAND_LINE
from ...cluster.config.roles import UpConfig
from ...cluster.errors import ConfigError
from .launcher import run_cluster

PROG = "baton serve"


def main(argv: Sequence[str]) -> int:
    """Runs `baton serve` and returns its exit code."""
    return run_cluster(PROG, argv, without_prefill)


def without_prefill(config: UpConfig) -> UpConfig:
    """`config` with no prefill worker. Raises ConfigError when the command line asks for one."""
    if config.explicit.get("prefill") == COMMAND_LINE and config.prefill:
        raise ConfigError(
            f"--prefill {config.prefill}: {PROG} starts no prefill worker; use baton up, or leave it out"
        )
    return dataclasses.replace(config, prefill=0)
