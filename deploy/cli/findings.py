"""The checks of `baton doctor`. Each check returns findings, and each finding of a fault has a remedy.

A check receives its inputs as arguments, so that tests can simulate a faulty host. An `OK` finding names the
checked property.
"""

import importlib.metadata
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]
from packaging.requirements import InvalidRequirement, Requirement

from ...cluster.config.roles import DecodeConfig, PrefillConfig
from ...cluster.config.tier_checks import GIB, check_disk, free_disk
from ...cluster.distribution import install_command
from ...cluster.errors import BatonError, ConfigError
from ...cluster.net.transport_names import CUDA_SLAB
from ...cluster.security.keyring import read_key, read_peers
from ...engine.auto_sizes import Card
from ...engine.hub import is_hub_id
from ..capacity.checkpoints import faults_of, feature_layers, identity_of, read_config
from ..capacity.worker_sizes import worker_sizes

OK, WARN, FAIL = "ok", "warn", "fail"
MIN_FILES = 4096  # open files of a router with a thousand streams, and a margin
MIN_ADDRESS_SPACE = 1 << 30  # bytes: the router's libraries, and a template worker's 512 MiB beside them
MIN_SHM_BYTES = 64 << 20
MAX_SKEW_S = 5.0
STALE_S = 2.0
KEY_WARN_S = 7 * 86400.0
COMMAND_S = 10.0


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is "" unless there is a fault."""

    check: str
    level: str
    text: str
    remedy: str = ""


def well(check: str, text: str) -> list[Finding]:
    """A list of one OK finding."""
    return [Finding(check, OK, text)]


def check_distribution(
    name: str, requires: Callable[[str], list[str] | None] = importlib.metadata.requires
) -> list[Finding]:
    """Checks the dependencies that the installed distribution `name` states.

    A source tree on PYTHONPATH states none.
    """
    try:
        requirements = requires(name)
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install -e DIR, with DIR the source tree, so that its dependencies can be checked"
        return [Finding("versions", WARN, f"{name} is not installed; dependencies are not checked", remedy)]
    return check_versions(requirements or [])


def check_versions(
    requirements: Sequence[str], version_of: Callable[[str], str] = importlib.metadata.version
) -> list[Finding]:
    """Checks that every dependency is installed in a supported version."""
    found = []
    num_wanted = 0
    for text in requirements:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        num_wanted += 1
        try:
            version = version_of(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(
                Finding("versions", FAIL, f"{wanted.name} is not installed", f"pip install '{text}'")
            )
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            remedy = f"pip install '{wanted.name}{wanted.specifier}'"
            found.append(
                Finding("versions", FAIL, f"{wanted.name} {version} is not {wanted.specifier}", remedy)
            )
    return found or well("versions", f"{num_wanted} dependencies as required")


def check_gpu(device: str, run: Callable[[Sequence[str]], str] | None = None) -> list[Finding]:
    """Checks that device cuda has GPUs, and that several GPUs are joined by NVLink."""
    ask = run or output_of
    listed = ask(
        ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader"]
    )
    gpus = [line.strip() for line in listed.splitlines() if line.strip()]
    if not gpus:
        if device == "cuda":
            remedy = "install the driver and check nvidia-smi, or serve with --device cpu"
            return [Finding("gpu", FAIL, "nvidia-smi lists no GPU", remedy)]
        return well("gpu", "none; models run on the CPU")
    found = well("gpu", "; ".join(gpus))
    if len(gpus) > 1 and "GB/s" not in ask(["nvidia-smi", "nvlink", "--status"]):
        remedy = "expect hand-offs at the speed of PCIe, or check the bridges with nvidia-smi topo -m"
        found.append(Finding("gpu", WARN, f"{len(gpus)} GPUs and no NVLink between them", remedy))
    return found


def check_ports(endpoints: Mapping[str, str]) -> list[Finding]:
    """Checks that no other process listens on `endpoints` (setting -> tcp://HOST:PORT)."""
    found = []
    for setting, endpoint in endpoints.items():
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        try:
            with socket.create_server(
                (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            ):
                pass
        except (OSError, ValueError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            remedy = f"stop what has it (ss -ltnp sport = :{port}), or choose another {setting}"
            found.append(Finding("ports", FAIL, f"{setting} {endpoint}: {reason}", remedy))
    return found or well("ports", ", ".join(endpoints.values()) or "none to listen on")


def check_limits(
    limits: Callable[[int], tuple[int, int]] = resource.getrlimit,
) -> list[Finding]:
    """Checks the limits on open files and address space, and that core dumps, which would hold prompts and
    keys, are off."""
    found = _address_space_findings(limits(resource.RLIMIT_AS)[0])
    files = limits(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        remedy = "ulimit -n 65536, or LimitNOFILE=65536 in the unit"
        found.append(Finding("limits", FAIL, f"at most {files} open files", remedy))
    if limits(resource.RLIMIT_CORE)[0] != 0:
        remedy = "ulimit -c 0, or LimitCORE=0 in the unit"
        found.append(Finding("limits", WARN, "a crash would write a core file with prompts and keys", remedy))
    return found or well("limits", f"{files} open files, no cores")


def _address_space_findings(size: int) -> list[Finding]:
    """`size` is the limit in bytes, or RLIM_INFINITY."""
    remedy = "ulimit -v unlimited, or LimitAS=infinity in the unit"
    if size == resource.RLIM_INFINITY:
        return []
    text = f"at most {size >> 20} MiB of address space per process"
    if size < MIN_ADDRESS_SPACE:
        return [Finding("limits", FAIL, f"{text}: chat templates of the router run out of memory", remedy)]
    text = f"{text}: prefill and decode map weights, KV cache and, with CUDA, all memory of the GPU"
    return [Finding("limits", WARN, text, remedy)]


def check_shm(path: Path = Path("/dev/shm")) -> list[Finding]:
    """Checks the size of /dev/shm, which NCCL and torch need. baton's slabs are memfds and do not use it."""
    try:
        size = shutil.disk_usage(path).total
    except OSError as error:
        return [Finding("shm", WARN, f"{path}: {error.strerror or error}", f"mount -t tmpfs tmpfs {path}")]
    if size < MIN_SHM_BYTES:
        remedy = f"mount -o remount,size=1G {path}; in a container --shm-size 1g or a memory-backed volume"
        return [Finding("shm", WARN, f"{path} has {size >> 20} MiB, of which NCCL runs out", remedy)]
    return well("shm", f"{path} has {size >> 20} MiB")


def check_fabric(rdma: Sequence[str], nixl: str) -> list[Finding]:
    """Names what this host has for KV blocks between hosts.

    `rdma`: its devices for RDMA. `nixl`: the version of the installed wheel, "" without one.
    """
    if not rdma:
        installed = f"NIXL {nixl} is installed, but " if nixl else ""
        return well("fabric", f"{installed}no device for RDMA: KV blocks between hosts are messages over tcp")
    devices = ", ".join(sorted(rdma)[:8])
    if not nixl:
        text = f"RDMA by {devices} is not used: KV blocks between hosts are messages over tcp"
        return [Finding("fabric", WARN, text, f"{install_command('nixl')}; workers need --trusted-network")]
    return well("fabric", f"NIXL {nixl} with RDMA by {devices}; workers with --trusted-network use it")


def check_keys(directory: Path, roles: Sequence[str], now: float) -> list[Finding]:
    """Checks that this host's keys are private and that its roles admit each other.

    `now`: seconds since the epoch.
    """
    found = []
    for role in roles:
        try:
            read_key(directory, role)
        except ConfigError as error:
            found.append(
                Finding("keys", FAIL, str(error).rpartition("; ")[0], str(error).rpartition("; ")[2])
            )
    try:
        peers = read_peers(directory)
    except ConfigError as error:
        return [*found, Finding("keys", FAIL, str(error).rpartition("; ")[0], str(error).rpartition("; ")[2])]
    for role in ("router", "prefill", "decode"):
        valid = [peer for peer in peers if peer.role == role and peer.is_valid(now)]
        if not valid:
            remedy = f"baton keys add {directory} KEY --role {role} --name NAME"
            found.append(Finding("keys", FAIL, f"{directory} admits no {role}", remedy))
        ends = [peer.not_after.timestamp() for peer in valid if peer.not_after is not None]
        if valid and len(ends) == len(valid) and max(ends) - now < KEY_WARN_S:
            remedy = f"baton keys add {directory} NEWKEY --role {role} --name {valid[0].name}"
            found.append(
                Finding(
                    "keys", WARN, f"the last {role} key ends within {KEY_WARN_S / 86400:.0f} days", remedy
                )
            )
    return found or well("keys", f"{directory}: {', '.join(roles)}; {len(peers)} admitted")


def check_absent(name: str) -> Finding:
    """The finding for a checkpoint that is not on this host."""
    if is_hub_id(name):
        text = f"{name} is not on this host; it is downloaded at the first start"
        return Finding("model", WARN, text, f"download it now where the hub is reached: hf download {name}")
    return Finding(
        "model", FAIL, f"{name} is no directory", "name a checkpoint directory or a hub id (owner/name)"
    )


def check_model(model: Path, draft: Path | None) -> list[Finding]:
    """Checks that the checkpoint's files are complete, and that the head fits the model."""
    try:
        config = read_config(model)
        found = [Finding("model", FAIL, fault, "copy the checkpoint again") for fault in faults_of(model)]
        if draft is not None:
            found += _head_findings(config, read_config(draft), model, draft)
    except ConfigError as error:
        return [_finding("model", "", error)]
    return found or well(
        "model", f"{model}: whole, identity {identity_of(model)} (equal on every host that serves it)"
    )


def _finding(name: str, where: str, error: ConfigError) -> Finding:
    """The finding of an error whose remedy stands behind its last semicolon, or behind its last colon."""
    text = str(error)
    mark = "; " if "; " in text else ": "
    said, _, remedy = text.rpartition(mark)
    return Finding(name, FAIL, f"{where}{said}", remedy)


def check_sizes(
    card: Card, model: Path, draft: Path | None, settings: PrefillConfig | DecodeConfig
) -> list[Finding]:
    """The sizes that a worker with these settings chooses on `card`, or why it would not start there."""
    try:
        sizes = worker_sizes(card, model, draft, settings)
    except ConfigError as error:
        return [_finding("sizes", f"{settings.role} on {card}: ", error)]
    return well("sizes", f"{settings.role} on {card}: {sizes}")


def check_cache_budgets(workers: Sequence[tuple[PrefillConfig | DecodeConfig, int]]) -> list[Finding]:
    """The budgets of the KV cache's lower tiers, by settings and number of their workers, against what this
    host has free."""
    host = sum(count * max(0.0, each.host_cache_gib) for each, count in workers)
    found: list[Finding] = []
    if host:
        free = psutil.virtual_memory().available / GIB
        text = f"prefixes in host memory: {host:g} GiB of {free:.1f} GiB that are free"
        remedy = "lower --host-cache-gib, or start fewer workers"
        found += [Finding("cache", FAIL, text, remedy)] if host > free else well("cache", text)
    disks: dict[str, float] = {}
    for each, count in workers:
        if each.disk_cache:
            disks[each.disk_cache] = disks.get(each.disk_cache, 0.0) + count * each.disk_cache_gib
    for directory, wanted in sorted(disks.items()):
        try:
            check_disk(Path(directory), wanted)
        except ConfigError as error:
            text, _, remedy = str(error).rpartition("; ")
            found.append(Finding("cache", FAIL, text, remedy))
        else:
            room = free_disk(Path(directory)) / GIB
            found += well("cache", f"prefixes in {directory}: {wanted:g} GiB of {room:.1f} GiB that are free")
    return found


def _head_findings(
    config: Mapping[str, Any], head: Mapping[str, Any], model: Path, draft: Path
) -> list[Finding]:
    found = []
    for key in ("hidden_size", "vocab_size"):
        wanted = head.get(f"target_{key}") or head.get(key)  # a head may be narrower than its target
        if wanted is not None and wanted != config.get(key):
            text = f"{draft} was trained for {key} {wanted}, {model} has {config.get(key)}"
            found.append(
                Finding("model", FAIL, text, "name the head of this model with --draft, or write --no-draft")
            )
    # Some heads name the inputs of layers, which are numbered one higher than the outputs.
    beyond = [layer for layer in feature_layers(head) if layer > int(config.get("num_hidden_layers", 0))]
    if beyond:
        text = f"{draft} reads layer {beyond[0]}, {model} has {config.get('num_hidden_layers')}"
        found.append(
            Finding("model", FAIL, text, "name the head of this model with --draft, or write --no-draft")
        )
    return found


def check_clock(router: float, here: float) -> list[Finding]:
    """Compares the router's clock with this host's, since keys and certificates end by it.

    Seconds since the epoch.
    """
    skew = here - router
    if abs(skew) > MAX_SKEW_S:
        text = f"this host's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the router's"
        return [Finding("clock", FAIL, text, "timedatectl set-ntp true, on both hosts")]
    return well("clock", "within a few seconds of the router's")


def check_certificate(end: float, now: float) -> list[Finding]:
    """Checks the end of the router's certificate. Both times are seconds since the epoch."""
    text = f"the router's certificate ends in {(end - now) / 86400:.1f} days"
    if end - now < KEY_WARN_S:
        remedy = (
            "see why it was not renewed; --tls-cert and --tls-key may be replaced while the router serves"
        )
        return [Finding("tls", WARN, text, remedy)]
    return well("tls", text)


def check_paths(status: Mapping[str, Any]) -> list[Finding]:
    """Names the ways that hand-offs took, with their rates, from a router's /status.

    Warns where two GPUs of one host did not use device memory.
    """
    workers = [worker for worker in status.get("workers", []) if worker.get("state") == "serving"]
    on_gpus = [worker for worker in workers if worker.get("device", "").startswith("cuda")]
    near = {worker["host"] for worker in on_gpus if worker["role"] == "prefill"}
    found = []
    for worker in workers:
        paths: Mapping[str, float] = worker.get("paths") or {}
        if not paths:
            continue
        rates = ", ".join(f"{path} at {rate:.2f} GB/s" for path, rate in paths.items())
        text = f"decode {worker['instance'][:8]} on {worker['host']}: {rates}"
        has_slab = any(CUDA_SLAB in path.split("+") for path in paths)  # a path may mix transports
        if worker in on_gpus and worker["host"] in near and not has_slab:
            remedy = "its log says why not device memory: look for 'blocks take another way'"
            found.append(Finding("hand-off", WARN, text, remedy))
        else:
            found.append(Finding("hand-off", OK, text))
    return found


def check_pairing(status: Mapping[str, Any]) -> list[Finding]:
    """Checks in a router's /status that workers of both roles serve, send heartbeats and can pair.

    Aggregated decode workers need no prefill worker.
    """
    workers = [worker for worker in status.get("workers", []) if worker.get("state") == "serving"]
    found = []
    is_aggregated = any(worker.get("aggregated") for worker in workers)
    for role in ("decode",) if is_aggregated else ("prefill", "decode"):
        if not any(worker["role"] == role for worker in workers):
            remedy = (
                f"start one: baton {role} --router ENDPOINT; is it there already, "
                "its log says why it is not welcome"
            )
            found.append(Finding("pairing", FAIL, f"no {role} worker serves", remedy))
    for worker in workers:
        if worker["heartbeat_age_s"] > STALE_S:
            name = f"{worker['role']} {worker['instance'][:8]} on {worker['host']}"
            text = f"{name} is silent for {worker['heartbeat_age_s']} s"
            found.append(
                Finding("pairing", FAIL, text, f"look at its log; baton drain {worker['instance'][:8]}")
            )
    prints = {
        role: {w["fingerprint"] for w in workers if w["role"] == role} for role in ("prefill", "decode")
    }
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        alone = prints[role] - prints[other]
        if prints[other] and alone:
            others = ", ".join(sorted(text[:8] for text in prints[other]))
            text = f"{role} with fingerprint {min(alone)[:8]} pairs with no {other} ({others})"
            remedy = "serve the same --model, --dtype, --page-size and --draft on both"
            found.append(Finding("pairing", FAIL, text, remedy))
    found += [
        Finding(
            "pairing",
            FAIL,
            f"prefill {pair['prefill'][:8]} and decode {pair['decode'][:8]} do not pair: {pair['reason']}",
            "serve the same weights on both; name the layers of every head with --feature-layers on prefill",
        )
        for pair in status.get("unpaired", [])
        if not pair["reason"].startswith("fingerprints")
    ]
    return found or well("pairing", f"{len(workers)} workers serve and pair")


def check_link(endpoint: str, measure: Callable[[str], Any], least: float) -> list[Finding]:
    """Checks that a pull from `endpoint` reaches `least` bytes per second."""
    try:
        link = measure(endpoint)
    except BatonError as error:
        return [
            Finding(
                "link",
                FAIL,
                str(error).partition(": ")[0],
                str(error).partition(": ")[2] or "check the address",
            )
        ]
    if link.bytes_per_s < least:
        text = f"{endpoint}: {link}, less than {least / 1e9:g} GB/s"
        remedy = (
            "check that the traffic takes the fast interface (ip route get), its MTU and its load; "
            "see baton plan"
        )
        return [Finding("link", FAIL, text, remedy)]
    return well("link", f"{endpoint}: {link}")


def output_of(command: Sequence[str]) -> str:
    """The output of a program; "" when it is missing or fails."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
