"""Config, command line and environment of each child of `baton up`."""

import dataclasses
import logging
import os
import random
import socket
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...cluster.config.fields import Value, as_text, describe, flag_of, settings_of
from ...cluster.config.groups import RoleConfig
from ...cluster.config.load import (
    COMMAND_LINE,
    check_own_port,
    ignored_settings,
    known_variables,
    load_config,
    to_argv,
)
from ...cluster.config.roles import (
    DecodeConfig,
    PrefillConfig,
    RouterConfig,
    UpConfig,
    WorkerConfig,
    offers_prefixes,
)
from ...cluster.config.router_groups import SHOW_NONE
from ...cluster.config.tier_checks import has_tiers
from ...cluster.errors import ConfigError, StartupError
from ...cluster.process.log import PACKAGE
from ...cluster.process.process import OPERATOR_VARIABLE, PARENT_VARIABLE
from ...cluster.process.sd_notify import without_manager
from ...cluster.security.ciphers import AUTO
from ...engine.hub import NGRAM
from .dealing import Deal, Place, Wish, deal_without_gpus
from .gpu_list import VISIBLE, ordered
from .supervise import ChildSpec

logger = logging.getLogger(__name__)

PATHS = (
    "model",
    "draft",
    "keys",
    "api_keys",
    "tls_cert",
    "tls_key",
    "record_drafts",
)  # settings that may be relative paths

PROG = "baton up"
LOWEST_PORT, LAST_PORT = 20_000, 65535  # the range from which a child's port is chosen
PORTS_TRIED = 16
GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # for IPv6 as well
ROUTER = "router"  # the name of that child
SHARE = "gpu_memory_share"  # the setting that divides a GPU between workers
LOCAL_PREFILL_QUEUED_MAX = "local_prefill_queued_max"

Command = Callable[[str, Sequence[str]], list[str]]


def role_command(role: str, flags: Sequence[str]) -> list[str]:
    """The command line of a role.

    -P keeps the current directory off sys.path, since its folders may shadow packages.
    """
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe, "-m", f"{PACKAGE}.{role}", *flags]


def child_configs(
    config: UpConfig, env: Mapping[str, str], directory: Path, settled: Deal | None = None
) -> list[tuple[str, RoleConfig]]:
    """The config of every child by name, the routers first, with endpoints in `directory` or on free ports.

    `settled` None: workers as on a host without GPUs. Raises ConfigError for an invalid setting.
    """
    children = merged_configs(config, env, directory, settled or deal_without_gpus(wish_of(config)))
    for warning in dict.fromkeys(text for _, child in children for text in ignored_settings(child)):
        logger.warning("%s", warning)
    return children


def merged_configs(
    config: UpConfig, env: Mapping[str, str], directory: Path, settled: Deal
) -> list[tuple[str, RoleConfig]]:
    """As `child_configs`, without warnings."""
    _check_prompts_are_computed(config, settled)
    is_ipc = config.transport == "ipc"
    controls = _controls(config.routers, directory if is_ipc else None)
    threads = _threads(config, env, settled)
    plan: list[tuple[str, type[RoleConfig], dict[str, Value]]] = []
    for i, endpoint in enumerate(controls):
        name = f"{ROUTER}-{i}" if i else ROUTER
        wiring: dict[str, Value] = {"control_bind": endpoint, "share_port": config.routers > 1}
        if i and "worker_metrics" not in config.explicit:
            wiring["worker_metrics"] = SHOW_NONE  # the first router has the series of the workers
        plan.append((name, RouterConfig, wiring))
    control = ",".join(controls)
    for i in range(settled.prefill):
        kv = f"ipc://{directory}/kv-{i}" if is_ipc else "tcp://127.0.0.1:0"
        plan.append((f"prefill-{i}", PrefillConfig, {"router": control, "kv_bind": kv}))
    computes_prompts: dict[str, Value] = {} if settled.prefill else {"aggregated": True}
    for i in range(settled.decode):
        wiring = {"router": control, **computes_prompts}
        if is_ipc and offers_prefixes(config):
            wiring["prefix_bind"] = f"ipc://{directory}/prefix-{i}"
        plan.append((f"decode-{i}", DecodeConfig, wiring))
    children = [
        (name, child_config(cls, config, env, wiring, threads, dealt_to(name, cls, settled)))
        for name, cls, wiring in plan
    ]
    children = _on_one_port(children)
    for port in ("kv_bulk_port", "metrics_port", "own_port", "probe_port"):
        children = _with_ports(children, port)
    return _with_own_ports(_with_one_kind_of_pages(children))


def _with_one_kind_of_pages(children: Sequence[tuple[str, RoleConfig]]) -> list[tuple[str, RoleConfig]]:
    """Workers with tiers keep whole pages, also behind windows. Others keep them, too, so that all pair."""
    is_kept = any(isinstance(child, WorkerConfig) and has_tiers(child) for _, child in children)
    return [
        (name, dataclasses.replace(child, window_kv="keep"))
        if is_kept and isinstance(child, WorkerConfig) and child.window_kv == AUTO
        else (name, child)
        for name, child in children
    ]


def _check_prompts_are_computed(config: UpConfig, settled: Deal) -> None:
    """Raises ConfigError when the settings forbid decode to compute prompts, and no prefill worker starts."""
    if not settled.prefill and "aggregated" in config.explicit and not config.aggregated:
        raise ConfigError(
            "--aggregated off: no prefill worker starts, so decode computes the prompts; leave it out, or "
            "write --prefill 1"
        )


def _controls(count: int, directory: Path | None) -> list[str]:
    """The control endpoints of the routers, where workers register."""
    if directory is None:
        return [f"tcp://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(count)]
    return [f"ipc://{directory}/control{f'-{i}' if i else ''}" for i in range(count)]


def _on_one_port(children: Sequence[tuple[str, RoleConfig]]) -> list[tuple[str, RoleConfig]]:
    """Makes all routers listen at the first router's address, also when its port was chosen here."""
    port = next(child.port for _, child in children if isinstance(child, RouterConfig))
    return [
        (name, dataclasses.replace(child, port=port) if isinstance(child, RouterConfig) else child)
        for name, child in children
    ]


def _with_ports(children: Sequence[tuple[str, RoleConfig]], setting: str) -> list[tuple[str, RoleConfig]]:
    """Numbers the ports of a role's children upwards from the given one.

    Raises ConfigError beyond the last port.
    """
    result: list[tuple[str, RoleConfig]] = []
    taken: Counter[str] = Counter()
    for name, child in children:
        first = getattr(child, setting, 0)
        if first:
            port = first + taken[child.role]
            if port + getattr(child, "dp_attention", 1) - 1 > LAST_PORT:
                raise ConfigError(f"{flag_of(setting)} {first} leaves no port for {name}; choose a lower one")
            changed: dict[str, Any] = {setting: port}
            child = dataclasses.replace(child, **changed)
            taken[child.role] += getattr(child, "dp_attention", 1)  # each such rank has its own
        result.append((name, child))
    return result


def _with_own_ports(children: Sequence[tuple[str, RoleConfig]]) -> list[tuple[str, RoleConfig]]:
    """Gives each of several routers an own port, a free one unless it is set.

    Raises ConfigError when an own port equals the clients' port.
    """
    routers = [child for _, child in children if isinstance(child, RouterConfig)]
    taken = {port for router in routers for port in (router.port, router.own_port, router.probe_port)}
    result: list[tuple[str, RoleConfig]] = []
    for name, child in children:
        if isinstance(child, RouterConfig):
            if len(routers) > 1:
                child = dataclasses.replace(child, limit_parts=child.limit_parts or len(routers))
            if len(routers) > 1 and not child.own_port:
                child = dataclasses.replace(child, own_port=_free_port_beside(taken, child.host))
                taken.add(child.own_port)
            check_own_port(child)
        result.append((name, child))
    return result


def role_configs(config: UpConfig, env: Mapping[str, str]) -> tuple[PrefillConfig, DecodeConfig]:
    """The settings of a worker of each role, without endpoints: each may have its own model and device.

    Raises ConfigError for an invalid setting.
    """
    prefill, decode = (child_config(cls, config, env, {}, 1) for cls in (PrefillConfig, DecodeConfig))
    (_, prefill), (_, decode) = _with_one_kind_of_pages([("prefill", prefill), ("decode", decode)])
    assert isinstance(prefill, PrefillConfig)
    assert isinstance(decode, DecodeConfig)
    return prefill, decode


def child_specs(
    children: Sequence[tuple[str, RoleConfig]],
    config: UpConfig,
    env: Mapping[str, str],
    directory: Path,
    command_of: Command,
    settled: Deal | None = None,
) -> list[ChildSpec]:
    """The specification of each child: its command line, and its environment with its GPU in `settled`."""
    settled = settled or deal_without_gpus(wish_of(config))
    threads = _threads(config, env, settled)
    return [
        ChildSpec(
            name=name,
            role=child.role,
            argv=tuple(command_of(child.role, to_argv(child))),
            env=child_environment(env, getattr(child, "threads", 1) or threads, settled.place_of(name))
            | _token_of(child, env)
            | _other_role(name, child, config, env, directory),
            cwd=str(directory),
        )
        for name, child in children
    ]


def _other_role(
    name: str, child: RoleConfig, config: UpConfig, env: Mapping[str, str], directory: Path
) -> dict[str, str]:
    """The variables with the settings that a worker has in the other role alone, in case that it changes."""
    if not isinstance(child, WorkerConfig):
        return {}
    cls: type[WorkerConfig] = DecodeConfig if isinstance(child, PrefillConfig) else PrefillConfig
    setting = "kv_bind" if cls is PrefillConfig else "prefix_bind"
    path = f"ipc://{directory}/{setting.removesuffix('_bind')}-{name}"
    is_wired = config.transport == "ipc" and (cls is PrefillConfig or offers_prefixes(config))
    wiring: dict[str, Value] = {setting: path} if is_wired else {}
    other, own = child_config(cls, config, env, wiring, 1), settings_of(type(child))
    return {
        f"BATON_{cls.role.upper()}_{key.upper()}": as_text(getattr(other, key), describe(field))
        for key, field in settings_of(cls).items()
        if key not in own and (key in other.explicit or getattr(other, key) != field.default)
    }


def wish_of(config: UpConfig) -> Wish:
    """The part of the settings that decides about workers and GPUs."""
    share = config.gpu_memory_share
    return Wish(prefill=config.prefill, decode=config.decode, memory_share=share)


def dealt_to(name: str, cls: type[RoleConfig], settled: Deal) -> dict[str, Value]:
    """The settings that were chosen for the host's GPUs: a worker's part of the memory of a GPU that others
    share, and what routers leave to decode.
    """
    if cls is RouterConfig:
        limit = settled.local_prefill_queued_max
        return {LOCAL_PREFILL_QUEUED_MAX: limit} if limit else {}
    place = settled.place_of(name)
    return {} if place is None or not place.memory_share else {SHARE: place.memory_share}


def child_config(
    cls: type[RoleConfig],
    config: UpConfig,
    env: Mapping[str, str],
    wiring: Mapping[str, Value],
    threads: int,
    dealt: Mapping[str, Value] = MappingProxyType({}),
) -> RoleConfig:
    """The config of one child (step 2 in `launcher`).

    No other source may override the endpoints in `wiring`. The settings in `dealt` replace those of `up`; the
    child's own sources may set others.
    """
    flags = [f"{flag_of(name)}={as_text(value)}" for name, value in wiring.items()]
    flags += [f"--config={config.config}"] if config.config else []
    defaults: dict[str, Value] = {}
    own = settings_of(cls)
    for name, described in settings_of(UpConfig).items():
        value = getattr(config, name)
        if name not in own or name == "config" or name in dealt:
            continue
        source = config.explicit.get(name, "" if value == described.default else COMMAND_LINE)
        if source == COMMAND_LINE:  # includes values that a program set on UpConfig itself
            flags.append(f"{flag_of(name)}={as_text(value, describe(described))}")
        else:
            defaults[name] = value
    defaults |= {name: value for name, value in dealt.items() if name in own}
    if "threads" in own and not config.threads:
        defaults["threads"] = threads
    known = set(known_variables())
    settings = {k: v for k, v in env.items() if k in known}
    child = load_config(cls, flags, settings, prog=PROG, defaults=defaults, warns=False)
    fixed: dict[str, Value] = {
        name: _absolute(getattr(child, name))
        for name in PATHS
        if name in own and (name, getattr(child, name)) != ("draft", NGRAM)
    }
    if isinstance(child, DecodeConfig) and child.record_drafts:  # it need not exist yet
        fixed["record_drafts"] = os.path.abspath(os.path.expanduser(child.record_drafts))
    if isinstance(child, WorkerConfig) and child.disk_cache:  # as above
        fixed["disk_cache"] = os.path.abspath(os.path.expanduser(child.disk_cache))
    if isinstance(child, RouterConfig):
        firsts = (child.own_port, child.probe_port)
        others = {first + i for first in firsts for i in range(config.routers)}
        fixed["port"] = child.port or _free_port_beside(others, child.host)
    return dataclasses.replace(child, **fixed)  # type: ignore[arg-type]


def child_environment(env: Mapping[str, str], threads: int, place: Place | None = None) -> dict[str, str]:
    """The environment of a child.

    baton's own settings are left out, because flags hold all of them. Idle threads sleep. Only the GPU of the
    child's place is visible."""
    if place is not None:
        env = {**ordered(env), VISIBLE: place.gpu.index}
    child = {name: value for name, value in without_manager(env).items() if not name.startswith("BATON_")}
    child["OMP_NUM_THREADS"] = str(threads)
    # spinning idle threads of one worker would take the cores of another
    child["OMP_WAIT_POLICY"] = "passive"
    child["PYTHONUNBUFFERED"] = "1"
    child[PARENT_VARIABLE] = str(os.getpid())
    return child


def _token_of(child: RoleConfig, env: Mapping[str, str]) -> dict[str, str]:
    """The token with which the launcher reads a router's status; {} for workers."""
    is_given = isinstance(child, RouterConfig) and OPERATOR_VARIABLE in env
    return {OPERATOR_VARIABLE: env[OPERATOR_VARIABLE]} if is_given else {}


def _threads(config: UpConfig, env: Mapping[str, str], settled: Deal) -> int:
    """The number of threads per worker.

    Prefill and decode seldom compute at the same moment, so each role may use all cores. `--threads`
    counts for each rank of a worker.
    """
    if config.threads:
        return config.threads
    asked = env.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = max(settled.prefill * config.tp, settled.decode * max(config.tp, config.dp_attention))
    return max(1, cores // processes)


def _absolute(path: str) -> str:
    """Makes an existing path absolute, since children run in another directory. A hub id stays unchanged.

    Symbolic links are not resolved, since a cache names their targets by digests.
    """
    expanded = os.path.expanduser(path)
    return os.path.abspath(expanded) if path and os.path.exists(expanded) else path


def free_port(host: str) -> int:
    """A free TCP port of `host`, outside the system's ephemeral range if possible.

    The system could give an ephemeral port to another process before the child listens. Raises StartupError.
    """
    own = range(LOWEST_PORT, _lowest_given())
    for port in random.sample(own, min(PORTS_TRIED, len(own))):
        with suppress(OSError):
            return _bound(host, port)
    try:
        return _bound(host, 0)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {host!r}: {error.strerror or error}; choose another --host"
        ) from None


def _free_port_beside(taken: Container[int], host: str) -> int:
    """A free port that is not in `taken`. Raises StartupError."""
    port = free_port(host)
    while port in taken:
        port = free_port(host)
    return port


def _bound(host: str, port: int) -> int:
    """Binds a socket and returns its port. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _lowest_given() -> int:
    """The lowest port of the system's ephemeral range; 0 if unknown."""
    with suppress(OSError, ValueError):
        return int(GIVEN_PORTS.read_text().split()[0])
    return 0
