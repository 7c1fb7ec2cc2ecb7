"""The processes that a host's settings start, as `baton doctor` examines them. None is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cluster.config.groups import RoleConfig
from ...cluster.config.link_checks import check_links
from ...cluster.config.load import check_file, load_config
from ...cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig, UpConfig, WorkerConfig
from ...cluster.errors import BatonError
from ...cluster.net.endpoints import bracketed
from ...engine.hub import kept_checkpoint
from ..capacity.worker_sizes import find_card
from ..up.dealing import Deal
from ..up.gpu_list import find_gpus
from ..up.local_checkpoints import head_of
from ..up.settle import check_children, settle
from .findings import FAIL, OK, Finding, check_absent, check_model, check_sizes, output_of

PROG = "baton doctor"
NOWHERE = Path("/run/baton")  # of sockets that are not made
ROLES: tuple[type[RoleConfig], ...] = (RouterConfig, PrefillConfig, DecodeConfig)


@dataclass(frozen=True, kw_only=True)
class HostProcesses:
    """The settings of each process of this host. `up` is set where `baton up` starts them."""

    processes: tuple[RoleConfig, ...]
    up: UpConfig | None = None

    @property
    def workers(self) -> list[PrefillConfig | DecodeConfig]:
        """The processes that load a model."""
        return [each for each in self.processes if isinstance(each, (PrefillConfig, DecodeConfig))]

    @property
    def counted_workers(self) -> list[tuple[PrefillConfig | DecodeConfig, int]]:
        """The settings of each kind of worker, and the number of such workers on this host."""
        if self.up is None:
            return [(each, 1) for each in self.workers]
        counts = {PrefillConfig.role: self.up.prefill, DecodeConfig.role: self.up.decode}
        firsts = {each.role: each for each in reversed(self.workers)}
        return [(each, max(1, counts[role])) for role, each in firsts.items()]

    @property
    def endpoints(self) -> dict[str, str]:
        """The tcp endpoints on which the processes listen, by setting."""
        found: dict[str, str] = {}
        for process in self.processes:
            if isinstance(process, RouterConfig):
                host = bracketed(process.host)
                found["--port"] = f"tcp://{host}:{process.port}"
                found["--own-port"] = f"tcp://{host}:{process.own_port}"
                probed = bracketed(process.probe_host or process.host)
                found["--probe-port"] = f"tcp://{probed}:{process.probe_port}"
                found["--control-bind"] = process.control_bind
            if isinstance(process, PrefillConfig):
                found["--kv-bind"] = process.kv_bind
            if isinstance(process, WorkerConfig):
                endpoint = f"tcp://{bracketed(process.metrics_host)}:{process.metrics_port}"
                found[f"--metrics-port of {process.role}"] = endpoint
        return {name: at for name, at in found.items() if at.startswith("tcp://") and not at.endswith(":0")}


def read_host(
    path: str, roles: Sequence[str], overrides: Mapping[str, str], env: Mapping[str, str]
) -> HostProcesses:
    """The processes of `roles` that the file at `path` ("": none) and the flags `overrides` configure.

    A file with a table [up] is read as `baton up` does, with the workers of a host without GPUs. Other files
    configure the roles one by one, and each role reads its own. Raises ConfigError with the words that the
    process itself would use.
    """
    tables = check_file(path) if path else ()
    config = [f"--config={path}"] if path else []
    flags = [*config, *(f"--{name}={value}" for name, value in overrides.items())]
    if UpConfig.role in tables:
        up = load_config(UpConfig, flags, env, prog=PROG, warns=False)
        children = check_children(up, env, NOWHERE)
        return HostProcesses(processes=tuple(child for child in children if child.role in roles), up=up)
    found = []
    for cls in ROLES:
        if cls.role not in roles or (cls.role not in tables and "model" not in overrides):
            continue
        is_router = cls is RouterConfig
        given = [*config, *(f"--model={overrides[name]}" for name in ("model",) if name in overrides)]
        process = load_config(cls, given if is_router else flags, env, prog=PROG, warns=False)
        check_links(process)
        found.append(process)
    return HostProcesses(processes=tuple(found))


def check_checkpoints(host: HostProcesses, env: Mapping[str, str]) -> list[Finding]:
    """Checks the checkpoints of the workers, their places on GPUs, and the sizes that they would choose."""
    found = list(dict.fromkeys(finding for each in host.workers for finding in _checkpoints_of(each)))
    if any(finding.level != OK for finding in found):
        return found
    places = list[Finding]()
    workers = host.workers
    if host.up is not None:
        places, settled = _placement(host.up, env)
        if settled is not None:
            roles = {worker.role for worker in workers}
            children = check_children(host.up, env, NOWHERE, settled)
            dealt = HostProcesses(processes=tuple(child for child in children if child.role in roles))
            workers = dealt.workers
    sizes = [finding for worker in workers for finding in _sizes_of(worker)]
    return found + places + list(dict.fromkeys(sizes))


def _checkpoints_of(worker: PrefillConfig | DecodeConfig) -> list[Finding]:
    model, draft = kept_checkpoint(worker.model), head_of(worker)
    head = kept_checkpoint(draft) if draft else None
    missing = [name for name, path in ((worker.model, model), (draft, head)) if name and path is None]
    found = [check_absent(name) for name in missing]
    return found if model is None else found + check_model(model, head)


def _sizes_of(worker: PrefillConfig | DecodeConfig) -> list[Finding]:
    model, draft = kept_checkpoint(worker.model), head_of(worker)
    assert model is not None, "checked before"
    card = find_card(worker.device, output_of)
    return check_sizes(card, model, kept_checkpoint(draft) if draft else None, worker)


def _placement(up: UpConfig, env: Mapping[str, str]) -> tuple[list[Finding], Deal | None]:
    """How `up` would deal the GPUs, and the finding that says so; no finding without GPUs."""

    def fetch(name: str, flag: str) -> Path:
        path = kept_checkpoint(name)
        assert path is not None, "checked before"
        return path

    try:
        settled = settle(up, env, find_gpus, fetch)
    except BatonError as error:
        text, _, remedy = str(error).partition("; ")
        return [Finding("places", FAIL, text, remedy or "see docs/gpu.md")], None
    texts = [f"{place.worker} on GPU {place.gpu}" for place in settled.places]
    return ([Finding("places", OK, ", ".join(texts))] if texts else []), settled
