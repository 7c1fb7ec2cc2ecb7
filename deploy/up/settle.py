"""From the settings of `baton up` to its workers. `baton doctor` uses the same functions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ...cluster.config.groups import RoleConfig
from ...cluster.config.link_checks import check_links
from ...cluster.config.load import is_given
from ...cluster.config.roles import UpConfig
from ...cluster.errors import ConfigError
from ..capacity.worker_sizes import need_of_roles
from .children import LOCAL_PREFILL_QUEUED_MAX, merged_configs, role_configs, wish_of
from .dealing import Deal, deal, deal_without_gpus
from .gpu_list import Gpu, restrict
from .local_checkpoints import Fetch, head_of, with_directories

# Of a prompt that decode computes for prefill: what a part of a prompt alone has at most.
HELP_TOKENS = 8192


def check_children(
    config: UpConfig, env: Mapping[str, str], directory: Path, settled: Deal | None = None
) -> list[RoleConfig]:
    """The settings of every process, checked without a download or a GPU. Raises ConfigError.

    `settled` None: the workers of a host without GPUs.
    """
    settled = settled or deal_without_gpus(wish_of(config))
    children = [child for _, child in merged_configs(config, env, directory, settled)]
    for child in children:
        check_links(child)
    return children


def settle(
    config: UpConfig,
    env: Mapping[str, str],
    gpus_of: Callable[[Mapping[str, str]], tuple[Gpu, ...]],
    fetch: Fetch,
) -> Deal:
    """The workers, and their GPUs if the host has some that may be used.

    Raises ConfigError for a model that does not fit and for settings that contradict each other, and the
    errors of `fetch` for a checkpoint that is not there.
    """
    wish = wish_of(config)
    prefill, decode = role_configs(config, env)
    wanted = [child for child, count in ((prefill, wish.prefill), (decode, wish.decode)) if count]
    for child in wanted:  # refuses what is no checkpoint
        fetch(child.model, "--model")
        if head_of(child):
            fetch(head_of(child), "--draft")
    on_gpu = frozenset(child.role for child in wanted if child.device != "cpu")
    if len({child.num_ranks for child in wanted if child.role in on_gpu}) > 1:
        raise ConfigError(
            f"prefill takes {prefill.num_ranks} GPUs (--tp) and decode {decode.num_ranks} (--tp, "
            "--dp-attention), and `baton up` deals GPUs by one number; give both the same, or start the "
            "workers one by one"
        )
    if not on_gpu and config.gpus:
        raise ConfigError(f"--gpus {config.gpus}: --device cpu uses no GPU; leave one of them out")
    gpus = restrict(gpus_of(env), config.gpus) if on_gpu else ()
    ranks = next((child.num_ranks for child in wanted if child.role in on_gpu), 1)
    if not gpus:
        return deal_without_gpus(wish)
    need = need_of_roles(with_directories(prefill, fetch), with_directories(decode, fetch))
    return _with_help(deal(gpus, need, replace(wish, on_gpu=on_gpu, ranks=ranks)), config)


def _with_help(settled: Deal, config: UpConfig) -> Deal:
    """Where each role has GPUs of its own, decode computes prompts while those of prefill are behind."""
    roles, is_shared = {place.role for place in settled.places}, any(p.memory_share for p in settled.places)
    if len(roles) < 2 or is_shared or is_given(config, LOCAL_PREFILL_QUEUED_MAX) or not config.local_prefill:
        return settled
    note = (
        f"Decode computes a prompt of up to {HELP_TOKENS} new tokens itself where its wait on prefill would "
        "be longer than the delay of all running streams (--local-prefill-queued-max 0: never)."
    )
    return replace(settled, local_prefill_queued_max=HELP_TOKENS, notes=(*settled.notes, note))
