"""`baton doctor`: finds problems of a host or cluster before they cause failures, and names a remedy for
each.

    baton doctor --config /etc/baton/baton.toml --keys /etc/baton/keys        this host
    baton doctor --url http://router:8000                                     and the cluster that it belongs
                                                                              to
    baton doctor --serve-pull tcp://10.0.0.2:7999 --trusted-network           one end of a measured link
    baton doctor --pull tcp://10.0.0.2:7999 --least 2.5                       the other end

The exit code is 0 without faults, 1 with at least one fault, 2 for a wrong setting. Warnings do not change
it.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...cluster.config.fields import Setting, check_fields, read_command_line, setting
from ...cluster.distribution import DISTRIBUTION
from ...cluster.errors import BatonError, ConfigError
from ...cluster.net.transport_names import nixl_version, rdma_devices
from ...engine.hub import NGRAM
from .client import KEY_VARIABLE, ChatClient
from .command import run_command
from .findings import (
    FAIL,
    Finding,
    check_cache_budgets,
    check_certificate,
    check_clock,
    check_distribution,
    check_fabric,
    check_gpu,
    check_keys,
    check_limits,
    check_link,
    check_pairing,
    check_paths,
    check_ports,
    check_shm,
)
from .host_processes import check_checkpoints, read_host
from .pull_test import measure, serve

PROG = "baton doctor"
SUMMARY = "Find what would keep baton from serving on this host."
ANSWER_S = 5.0
EXIT_FOUND = 1


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Doctor."""

    config: str = setting(
        "",
        Setting(
            help="TOML file of `baton up` or of the roles, which is read as they read it", metavar="FILE"
        ),
    )
    model: str = setting(
        "", Setting(help="checkpoint directory or hub id; empty: that of --config", metavar="DIR")
    )
    draft: str = setting(
        "",
        Setting(
            help=f"directory of a draft head, or {NGRAM}; empty: that of --config", metavar=f"DIR|{NGRAM}"
        ),
    )
    device: str = setting("auto", Setting(help="where the model shall run", choices=("auto", "cpu", "cuda")))
    keys: str = setting("", Setting(help="directory of keys; empty: links without keys", metavar="DIR"))
    roles: str = setting(
        "router,prefill,decode", Setting(help="roles of this host, separated by commas", metavar="ROLES")
    )
    url: str = setting(
        "", Setting(help="a running router, whose workers and clock are looked at", metavar="URL")
    )
    pull: str = setting(
        "", Setting(help="endpoint of --serve-pull elsewhere: measure the link", metavar="ENDPOINT")
    )
    least: float = setting(
        0.1, Setting(help="least that --pull must bring", unit="GB/s", minimum=0, maximum=10000)
    )
    serve_pull: str = setting(
        "", Setting(help="be the other end of --pull, for ten minutes", metavar="ENDPOINT")
    )
    trusted_network: bool = setting(
        False, Setting(help="allow --serve-pull on other addresses than loopback")
    )
    json: bool = setting(False, Setting(help="one JSON array of findings"))

    def __post_init__(self) -> None:
        check_fields(self)


def main(argv: Sequence[str]) -> int:
    """Runs `baton doctor` and returns its exit code."""

    def work() -> int:
        settings = read_command_line(DoctorConfig, argv, PROG, SUMMARY)
        return _run(DoctorConfig(**settings))  # type: ignore[arg-type]

    return run_command(PROG, work)


def examine(config: DoctorConfig) -> list[Finding]:
    """All findings. Raises ConfigError for invalid settings."""
    roles = [role for role in config.roles.split(",") if role]
    if unknown := set(roles) - {"router", "prefill", "decode"}:
        raise ConfigError(f"--roles {min(unknown)!r} is no role; write some of router,prefill,decode")
    host = read_host(config.config, roles, _overrides(config), os.environ)
    found = check_distribution(DISTRIBUTION)
    found += check_gpu(config.device) + check_limits() + check_shm()
    found += check_fabric(rdma_devices(), nixl_version())
    if config.config:
        found += check_ports(host.endpoints)
    found += check_cache_budgets(host.counted_workers) + check_checkpoints(host, os.environ)
    if config.keys:
        found += check_keys(Path(config.keys), roles, time.time())
    if config.url:
        found += _cluster(config.url)
    if config.pull:
        found += check_link(config.pull, measure, config.least * 1e9)
    return found


def _overrides(config: DoctorConfig) -> dict[str, str]:
    """The settings of workers that the doctor's own command line gives."""
    given = {"model": config.model, "draft": config.draft, "device": config.device.replace("auto", "")}
    return {name: value for name, value in given.items() if value}


def _run(config: DoctorConfig) -> int:
    if config.serve_pull:
        return _serve(config)
    found = examine(config)
    if config.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in found], indent=2) + "\n")
    else:
        sys.stdout.write("".join(_line(finding) for finding in found))
    sys.stdout.flush()
    return EXIT_FOUND if any(finding.level == FAIL for finding in found) else 0


def _serve(config: DoctorConfig) -> int:
    def tell(endpoint: str) -> None:
        sys.stdout.write(f"measure with: {PROG} --pull {endpoint}\n")
        sys.stdout.flush()

    num_blocks = serve(config.serve_pull, trusted_network=config.trusted_network, on_ready=tell)
    sys.stdout.write(f"{num_blocks} blocks went out\n")
    return 0


def _line(finding: Finding) -> str:
    remedy = f"\n               {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:<5}{finding.check:<10}{finding.text}{remedy}\n"


def _cluster(url: str) -> list[Finding]:
    client = ChatClient(url, api_key=os.environ.get(KEY_VARIABLE, ""), silence_s=ANSWER_S)
    try:
        status = client.get("/status")
        found = (
            check_clock(status["router"]["clock"], time.time()) + check_pairing(status) + check_paths(status)
        )
        end = client.certificate_end()
        return found if end is None else check_certificate(end, time.time()) + found
    except BatonError as error:
        text, _, remedy = str(error).partition("; ")
        return [Finding("pairing", FAIL, text, remedy or "correct --url, or look at the router's log")]
    except (KeyError, TypeError) as error:
        text = f"{url} has no /status as a router of this version has it ({error!r})"
        return [Finding("pairing", FAIL, text, "correct --url, or upgrade the router")]
