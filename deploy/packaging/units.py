"""`baton deploy systemd`: writes the units of one host with the user's settings.

    etc/systemd/system/baton-router.service       Type=notify, watched, drained on stop, hardened
    etc/systemd/system/baton-prefill@.service     instance: index of its GPU
    etc/systemd/system/baton-decode@.service      likewise
    etc/systemd/system/baton.target               all of this host
    etc/systemd/system/baton-router-secrets.path  with TLS or API keys: reloads replaced files into the router
    etc/systemd/system/baton-router-secrets.service
    etc/baton/baton.toml                          the settings, a table per role
    etc/baton/prefill-0.env                       settings of a single instance
    etc/baton/README                              instructions

Secrets stay in root's files. Keys of the links are loaded for their process at its start (`LoadCredential=`).
TLS files and API keys are copied for the router at its start and whenever they change.
"""

import argparse
import ipaddress
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from ...cluster.config.fields import Value, flag_of, settings_of
from ...cluster.config.groups import DEFAULT_CONTROL, NetworkSettings, RoleConfig
from ...cluster.config.load import load_config
from ...cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig
from ...cluster.errors import ConfigError
from ...cluster.net.endpoints import endpoint_fault
from ...engine.hub import NGRAM
from ..cli.command import run_command

PROG = "baton deploy systemd"
TEMPLATES = Path(__file__).parent / "systemd"
ETC, UNITS = "/etc/baton", "/etc/systemd/system"
CONFIG = f"{ETC}/baton.toml"
# The manager's limit. The process's own watchdog fires earlier and writes its stacks; it tells a hang from a
# pause, which the manager cannot. So the manager waits longer than a router does for a stopped worker.
WATCHDOG_S = 90
OWN_WATCHDOG_S = 12.0
LAST_WORDS_S = 15  # seconds from the end of a drain to SIGKILL
WORKERS: tuple[type[RoleConfig], ...] = (PrefillConfig, DecodeConfig)
SECRETS = ("api_keys", "tls_cert", "tls_key")  # files of the router that only root needs to read
SECRETS_UNIT, SECRETS_DIR = "baton-router-secrets", "%t/baton-router-secrets"
# seconds from the first change of such a file to its copy, since certificate and key are replaced separately
SETTLE_S = 2
COPY = r"""/bin/sh -euc '\
  owner=$$(stat -Lc %%u %t/baton-router); \
  install -d -m 0711 "$$0"; \
  while [ $$# -gt 0 ]; do \
    cmp -s "$$2" "$$0/$$1" || { install -m 0400 -o "$$owner" "$$2" "$$0/.$$1"; mv "$$0/.$$1" "$$0/$$1"; }; \
    shift 2; \
  done' \
 """  # arguments: target directory, then name and file of each secret
PLACEHOLDER = re.compile(r"@[A-Z_]+@")
# characters not allowed in a unit's paths: specifiers, variables, quotes, blanks
UNSAFE = re.compile(r"[^\x21-\x7e]|[%$\"'\\]")


@dataclass(frozen=True, kw_only=True)
class HostUnits:
    """The processes of one host and their settings."""

    command: str  # absolute path of `baton`
    tables: Mapping[str, Mapping[str, Value]]  # by role
    prefill: tuple[int, ...] = (0,)  # GPU indices
    decode: tuple[int, ...] = (1,)
    has_router: bool = True
    kv_bind: str = (
        ""  # tcp://ADDRESS:PORT of the first prefill worker; empty: a socket in its runtime directory
    )
    keys: str = f"{ETC}/keys"  # empty: no keys
    allow: tuple[str, ...] = ()  # allowed networks besides localhost
    router_memory: str = "4G"
    worker_memory: str = "90%"
    secrets: Mapping[str, str] = field(default_factory=dict)  # router setting -> file


def render(host: HostUnits) -> dict[str, str]:
    """The contents of all files by absolute path.

    Raises ConfigError for settings that a unit cannot express.
    """
    _check(host)
    files = {
        CONFIG: _toml(host),
        f"{UNITS}/baton.target": _fill("baton.target", MEMBERS=" ".join(members(host)), ETC=ETC),
    }
    if host.has_router:
        files[f"{UNITS}/baton-router.service"] = _router(host)
    if host.has_router and host.secrets:
        files |= _takeover(host)
    for cls in WORKERS:
        files[f"{UNITS}/baton-{cls.role}@.service"] = _worker(host, cls.role)
    files.update(_instance_files(host))
    files[f"{ETC}/README"] = _readme(host)
    return files


def members(host: HostUnits) -> list[str]:
    """The names of this host's units in the order of their start."""
    router = ["baton-router.service"] if host.has_router else []
    return router + [
        f"baton-{role}@{gpus[0]}.service" for role in ("prefill", "decode") for gpus in gpus_of(host, role)
    ]


def gpus_of(host: HostUnits, role: str) -> list[tuple[int, ...]]:
    """The GPUs of each worker of a role, as many at a time as it has ranks; the first one names its unit."""
    indices: tuple[int, ...] = getattr(host, role)
    size = _ranks(host, role)
    return [indices[at : at + size] for at in range(0, len(indices), size)]


def _ranks(host: HostUnits, role: str) -> int:
    table = host.tables.get(role, {})
    return max(int(str(table.get(setting, 1))) for setting in ("tp", "dp_attention"))


def write(files: Mapping[str, str], prefix: Path) -> list[Path]:
    """Writes each file below `prefix`. Raises ConfigError."""
    written = []
    for name, text in files.items():
        path = prefix / name.lstrip("/")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o644)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror or error}); choose another --prefix"
            ) from None
        written.append(path)
    return written


def _router(host: HostUnits) -> str:
    return _fill(
        "router.service",
        COMMON=_common(host, "router"),
        COMMAND=host.command,
        CONFIG=CONFIG,
        ETC=ETC,
        CREDENTIALS="\n".join(_key_lines(host, "router")),
        ROUTER_MEMORY=host.router_memory,
        SECRETS=_secrets(host),
        SECRETS_UNIT=f"Wants={SECRETS_UNIT}.path" if host.secrets else "",
    )


def _secrets(host: HostUnits) -> str:
    """The lines of the router's unit about secrets; "" without secrets."""
    if not host.secrets:
        return ""
    names = [
        f"Environment=BATON_ROUTER_{setting.upper()}={SECRETS_DIR}/{setting}" for setting in host.secrets
    ]
    copy = COPY + " ".join([SECRETS_DIR, *(f"{setting} {path}" for setting, path in host.secrets.items())])
    return "\n".join([*names, _fill("secrets.conf", COPY=copy).rstrip()])


def _takeover(host: HostUnits) -> dict[str, str]:
    """The units that copy replaced secrets for a running router."""
    paths = dict.fromkeys(path for file in host.secrets.values() for path in (str(Path(file).parent), file))
    watched = "\n".join(f"PathChanged={path}" for path in paths)
    return {
        f"{UNITS}/{SECRETS_UNIT}.path": _fill("secrets.path", ETC=ETC, WATCHED=watched),
        f"{UNITS}/{SECRETS_UNIT}.service": _fill("secrets.service", ETC=ETC, SETTLE_S=str(SETTLE_S)),
    }


def _worker(host: HostUnits, role: str) -> str:
    is_local = role == "prefill" and not host.kv_bind
    return _fill(
        "worker.service", COMMON=_common(host, role), COMMAND=host.command, CONFIG=CONFIG, ETC=ETC, ROLE=role,
        CREDENTIALS="\n".join(_key_lines(host, role)), WORKER_MEMORY=host.worker_memory,
        SOCKETS="Environment=BATON_PREFILL_KV_BIND=ipc://%t/baton-prefill-%i/kv" if is_local else "",
    )  # fmt: skip


def _common(host: HostUnits, role: str) -> str:
    drain_s = float(host.tables[role].get("drain_timeout_s", NetworkSettings.drain_timeout_s))
    return _fill(
        "common.conf", WATCHDOG_S=str(WATCHDOG_S), STOP_S=str(int(drain_s) + LAST_WORDS_S),
        ALLOW=" ".join(["localhost", *host.allow]),
    )  # fmt: skip


def _key_lines(host: HostUnits, role: str) -> list[str]:
    if not host.keys:
        return []
    names = (f"{role}.key", "peers.json")
    return [f"LoadCredential={name}:{host.keys}/{name}" for name in names] + [
        f"Environment=BATON_{role.upper()}_KEYS=%d"
    ]


def _fill(template: str, **values: str) -> str:
    """Fills a template's placeholders. An empty value removes its line."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@\n" if not value else f"@{name}@", value)
    left = PLACEHOLDER.search(text)
    assert left is None, f"{template} keeps {left}"
    return text


def _toml(host: HostUnits) -> str:
    lines = [
        "# Settings of baton on this host; `baton ROLE --help` explains each. "
        "After a change restart the role's unit."
    ]
    for role, table in host.tables.items():
        lines += ["", f"[{role}]"]
        lines += [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def _instance_files(host: HostUnits) -> dict[str, str]:
    """The environment files of instances: a port of its own for each prefill worker, and several GPUs."""
    address, _, port = host.kv_bind.rpartition(":")
    files: dict[str, str] = {}
    for role in ("prefill", "decode"):
        for at, gpus in enumerate(gpus_of(host, role)):
            lines = []
            if role == "prefill" and host.kv_bind:
                lines.append(f"BATON_PREFILL_KV_BIND={address}:{int(port) + at}\n")
            if len(gpus) > 1:
                lines.append(f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))}\n")
            if lines:
                files[f"{ETC}/{role}-{gpus[0]}.env"] = "".join(lines)
    return files


def _readme(host: HostUnits) -> str:
    keys = (
        f"Keys are read from {host.keys}: baton keys init {host.keys}"
        if host.keys
        else "The links have no keys."
    )
    return (
        f"baton on this host: {' '.join(members(host))}\n\n{keys}\n\n"
        "systemctl daemon-reload\nsystemctl enable --now baton.target\nbaton doctor\n\n"
        "systemctl stop baton-decode@1    drains that worker, then ends it\n"
        "journalctl -u 'baton-*'          what they say\n"
    )


def _check(host: HostUnits) -> None:
    for path in (host.command, host.keys, *host.secrets.values()):
        if path and (UNSAFE.search(path) or not path.startswith("/")):
            raise ConfigError(
                f"{path!r} cannot stand in a unit; write an absolute path without blanks, quotes, %, $ and \\"
            )
    for memory in (host.router_memory, host.worker_memory):
        if not re.fullmatch(r"[0-9]+[KMGT%]?|infinity", memory):
            raise ConfigError(f"memory {memory!r} is not understood; write such as 4G, 90% or infinity")
    for role in ("prefill", "decode"):
        count, size = len(getattr(host, role)), _ranks(host, role)
        if count % size:
            raise ConfigError(
                f"--{role} names {count} GPUs, and each worker takes {size} ([{role}] tp, "
                "dp_attention): name a multiple"
            )
    shared = set(host.prefill) & set(host.decode)
    if not host.prefill and not host.decode and not host.has_router:
        raise ConfigError(
            "nothing would run on this host; name GPUs with --prefill or --decode, or leave out --no-router"
        )
    if shared and host.tables["prefill"].get("device") != "cpu":
        raise ConfigError(
            f"--prefill and --decode both name GPU {min(shared)}; give each worker a GPU of its own"
        )


# --- the command line ---------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str]) -> int:
    """Runs `baton deploy systemd`. Returns 0 when written, 2 for a wrong setting."""
    return run_command(PROG, lambda: _run(argv))


def host_of(argv: Sequence[str]) -> tuple[HostUnits, Path]:
    """The host that the command line describes, and the target prefix. Raises ConfigError."""
    options = _parser().parse_args(list(argv))
    flags = [f"--{name}={value}" for name in ("config", "model") if (value := getattr(options, name))]
    router = load_config(RouterConfig, [*flags, *_own_flags(RouterConfig, options)], {}, warns=False)
    workers = [load_config(cls, [*flags, *_own_flags(cls, options)], {}, warns=False) for cls in WORKERS]
    host = HostUnits(
        command=options.command or _own_command(),
        tables={config.role: _table(config) for config in [router, *workers]},
        prefill=_gpus(options.prefill, "--prefill"),
        decode=_gpus(options.decode, "--decode"),
        has_router=not options.no_router,
        kv_bind=_kv_bind(options.kv_bind),
        keys=options.keys,
        allow=tuple(_network(text) for text in options.allow),
        router_memory=options.router_memory,
        worker_memory=options.worker_memory,
        secrets={name: path for name in SECRETS if (path := getattr(router, name))},
    )
    return host, Path(options.prefix)


def _run(argv: Sequence[str]) -> int:
    host, prefix = host_of(argv)
    for path in write(render(host), prefix):
        sys.stdout.write(f"{path}\n")
    return 0


def _own_flags(cls: type[RoleConfig], options: argparse.Namespace) -> list[str]:
    flags = {"draft": options.draft, "router": options.router, "device": options.device}
    if not options.no_router:
        flags["control-bind"] = options.router  # the address of this host
    return [
        f"--{name}={value}"
        for name, value in flags.items()
        if value and name.replace("-", "_") in settings_of(cls)
    ]


def _table(config: RoleConfig) -> dict[str, Value]:
    """The given settings, without those that the units set themselves."""
    for name in ("keys", "kv_bind"):
        if name in config.explicit:
            raise ConfigError(f"[{config.role}] {name}: the units set it; write {flag_of(name)} instead")
    table = {name: getattr(config, name) for name in settings_of(type(config)) if name in config.explicit}
    if config.explicit.get("watchdog_s") is None:
        table["watchdog_s"] = OWN_WATCHDOG_S
    return {name: value for name, value in table.items() if name not in ("config", *SECRETS)}


def _own_command() -> str:
    beside = Path(sys.executable).parent / "baton"
    found = str(beside) if beside.exists() else shutil.which("baton")
    if not found:
        raise ConfigError("the command `baton` was not found; name it with --command /path/to/baton")
    return found


def _gpus(text: str, flag: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts) or len(
        set(parts)
    ) < len(parts):
        raise ConfigError(
            f"{flag} {text!r} is no list of GPU indices; write such as 0,1, or nothing for none"
        )
    return tuple(int(part) for part in parts)


def _kv_bind(text: str) -> str:
    if text and (not text.startswith("tcp://") or endpoint_fault(text) or text.endswith(":0")):
        raise ConfigError(f"--kv-bind {text!r} is no address of this host; write tcp://ADDRESS:PORT")
    return text


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ConfigError(f"--allow {text!r}: {error}; write a network such as 10.0.0.0/8") from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description="Write systemd units for this host.", allow_abbrev=False)
    add = parser.add_argument
    add("--prefix", metavar="DIR", required=True, help="the files go below it; / installs them")
    add("--model", metavar="DIR", default="", help="checkpoint directory, readable by everybody")
    add("--draft", metavar=f"DIR|{NGRAM}", default="", help=f"directory of a draft head, or {NGRAM}")
    add("--config", metavar="FILE", default="", help="TOML file with further settings, a table per role")
    add("--device", default="", metavar="auto|cpu|cuda", help="where the model runs")
    add(
        "--prefill", metavar="GPUS", default="0", help="GPU of each prefill worker of this host (%(default)s)"
    )
    add("--decode", metavar="GPUS", default="1", help="GPU of each decode worker of this host (%(default)s)")
    add("--no-router", action="store_true", help="the router runs elsewhere")
    add("--router", metavar="ENDPOINT", default="", help=f"where workers find it ({DEFAULT_CONTROL})")
    add(
        "--kv-bind",
        metavar="ENDPOINT",
        default="",
        help="address of the first prefill worker, for decode on other hosts",
    )
    add("--keys", metavar="DIR", default=f"{ETC}/keys", help="keys of this host (%(default)s); empty: none")
    add(
        "--allow",
        metavar="NETWORK",
        action="append",
        default=[],
        help="who else may be spoken to; may be repeated",
    )
    add("--command", metavar="PATH", default="", help="the baton command (this one)")
    add("--router-memory", metavar="SIZE", default="4G", help="most memory of the router (%(default)s)")
    add("--worker-memory", metavar="SIZE", default="90%", help="most memory of a worker (%(default)s)")
    return parser
