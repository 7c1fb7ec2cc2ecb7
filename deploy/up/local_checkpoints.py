"""Downloads checkpoints of the hub once, before any child starts, and gives the children the directories."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...cluster.config.groups import EngineSettings, ModelSettings, RoleConfig
from ...cluster.errors import ConfigError
from ...cluster.process.log import fields
from ...cluster.process.progress import JobProgress
from ...engine.errors import UnknownCheckpoint
from ...engine.hub import NGRAM, is_hub_id, resolve_checkpoint
from .download_bar import download_bar

logger = logging.getLogger(__name__)

Fetch = Callable[[str, str], Path]  # the directory of a checkpoint, by its name and the flag that gave it
C = TypeVar("C", bound=RoleConfig)


def fetch_once() -> Fetch:
    """A function that returns the directory of a checkpoint and asks the hub once per hub id.

    It raises ConfigError for a name that is neither a directory nor a hub id, and CheckpointError when a
    download fails.
    """

    def fetch(name: str, flag: str) -> Path:
        if not is_hub_id(name):
            try:
                return resolve_checkpoint(name, flag).absolute()
            except UnknownCheckpoint as error:
                raise ConfigError(str(error)) from None
        logger.info("looking for a checkpoint on the hub", extra=fields(name=name))
        progress = JobProgress()
        try:
            return resolve_checkpoint(name, flag, download_bar(name, progress)).absolute()
        finally:
            progress.close()

    return functools.cache(fetch)


def head_of(config: EngineSettings) -> str:
    """The checkpoint that the settings ask to draft with; "" for none, as for lookup, which has none."""
    return "" if config.no_draft or config.draft == NGRAM else config.draft


def with_directories(config: C, fetch: Fetch) -> C:
    """`config` with the directories of its hub ids. Clients still name the model by the id or its last part.

    Raises what `fetch` raises, also for the directory of a head, and ConfigError for a head without a config.
    """
    changed: dict[str, Any] = {}
    if isinstance(config, ModelSettings) and is_hub_id(config.model):
        changed["model"] = str(fetch(config.model, "--model"))
        changed["served_model"] = ",".join(config.served_names)
    if isinstance(config, EngineSettings) and head_of(config):
        found = fetch(config.draft, "--draft")
        if not (found / "config.json").is_file():
            raise ConfigError(f"--draft {config.draft!r} has no config.json; give the directory of a head")
        if is_hub_id(config.draft):
            changed["draft"] = str(found)
    return dataclasses.replace(config, **changed)
