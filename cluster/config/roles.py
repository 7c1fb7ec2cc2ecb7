"""The settings of each role, one frozen dataclass per role.

A role is a combination of the groups in `groups` and `router_groups` with a few settings of its own.
"""

from dataclasses import dataclass
from typing import ClassVar

from .fields import Setting, port_number, setting
from .groups import (
    DEFAULT_CONTROL,
    ControlSettings,
    DecodeSettings,
    EngineSettings,
    FirstTokenSettings,
    LogSettings,
    ModelSettings,
    NetworkSettings,
    PrefillSettings,
    RoleConfig,
    ScrapeSettings,
    TraceSettings,
)
from .router_groups import ClientSettings, FormatSettings, HttpSettings, PairingSettings, RequestSettings

AUTO_WORKERS = -1  # 0 is taken: it asks for no worker of a role


def gpus_fault(text: str) -> str:
    """The fault of a list of GPUs, as the end of a sentence that begins with it; "" if valid."""
    entries = text.split(",") if text else []
    if not all(entry and entry == entry.strip() for entry in entries):
        return "is no list of GPUs: write such as 0,1,4"
    twice = next((entry for at, entry in enumerate(entries) if entry in entries[:at]), "")
    return f"names GPU {twice} twice: name each once" if twice else ""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(
    ControlSettings,
    ModelSettings,
    EngineSettings,
    FirstTokenSettings,
    NetworkSettings,
    ScrapeSettings,
    TraceSettings,
    LogSettings,
):
    """Settings of both kinds of worker."""

    @property
    def num_ranks(self) -> int:
        """Processes of a worker, each on a GPU of its own if there are any."""
        return self.tp

    @property
    def tensor_ranks(self) -> int:
        """Those of them that share attention and dense MLPs."""
        return self.tp


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(PrefillSettings, WorkerConfig):
    """Prefill worker."""

    role: ClassVar[str] = "prefill"
    summary: ClassVar[str] = "Run a prefill worker: prompts in, KV caches and first tokens out."

    kv_bind: str = setting(
        "tcp://127.0.0.1:0",
        Setting(help="where decode workers pull KV blocks; port 0: any free one", is_endpoint=True),
    )
    kv_advertise: str = setting(
        "",
        Setting(
            help="where decode workers reach --kv-bind, behind NAT or in a pod; port 0: "
            "the bound one; empty: as bound",
            metavar="ENDPOINT",
        ),
    )
    max_queue: int = setting(
        256, Setting(help="most requests waiting for a forward", minimum=1, maximum=65536)
    )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(DecodeSettings, WorkerConfig):
    """Decode worker."""

    role: ClassVar[str] = "decode"
    summary: ClassVar[str] = "Run a decode worker: KV caches in, tokens out, with drafts."

    prefix_bind: str = setting(
        "tcp://127.0.0.1:0",
        Setting(help="where prefill workers pull prefixes; port 0: any free one", is_endpoint=True),
    )
    prefix_advertise: str = setting(
        "",
        Setting(
            help="where prefill workers reach --prefix-bind, behind NAT or in a pod; port 0: "
            "the bound one; empty: as bound",
            metavar="ENDPOINT",
        ),
    )
    prefix_bulk_port: int = setting(0, port_number("port of sealed blocks of prefixes; 0: any free one"))

    @property
    def num_ranks(self) -> int:
        """As `WorkerConfig.num_ranks`."""
        return max(self.tp, self.dp_attention)

    @property
    def tensor_ranks(self) -> int:
        """As `WorkerConfig.tensor_ranks`."""
        return self.tp if self.dp_attention == 1 else 1


@dataclass(frozen=True, kw_only=True)
class RouterConfig(
    HttpSettings,
    ClientSettings,
    RequestSettings,
    FormatSettings,
    PairingSettings,
    ModelSettings,
    NetworkSettings,
    LogSettings,
    TraceSettings,
):
    """Router."""

    role: ClassVar[str] = "router"
    summary: ClassVar[str] = "Run the router: one OpenAI-compatible endpoint in front of the workers."

    control_bind: str = setting(DEFAULT_CONTROL, Setting(help="where workers register", is_endpoint=True))
    max_queue: int = setting(
        256, Setting(help="most requests waiting for a free worker", minimum=1, maximum=65536)
    )


@dataclass(frozen=True, kw_only=True)
class UpConfig(
    ModelSettings,
    HttpSettings,
    ClientSettings,
    RequestSettings,
    FormatSettings,
    PairingSettings,
    EngineSettings,
    FirstTokenSettings,
    PrefillSettings,
    DecodeSettings,
    NetworkSettings,
    LogSettings,
    TraceSettings,
):
    """Cluster on this host."""

    role: ClassVar[str] = "up"
    summary: ClassVar[str] = (
        "Start a router, prefill workers and decode workers on this host and supervise them."
    )

    routers: int = setting(
        1, Setting(help="number of router processes behind one port", minimum=1, maximum=64)
    )
    prefill: int = setting(
        AUTO_WORKERS,
        Setting(
            help="number of prefill workers; 0: decode computes prompts itself; auto: chosen for the GPUs, 1 "
            "without any",
            minimum=0,
            maximum=64,
            auto=AUTO_WORKERS,
        ),
    )
    decode: int = setting(
        AUTO_WORKERS,
        Setting(
            help="number of decode workers; auto: chosen for the GPUs, 1 without any",
            minimum=1,
            maximum=64,
            auto=AUTO_WORKERS,
        ),
    )
    gpus: str = setting(
        "",
        Setting(
            help="GPUs to use, as CUDA_VISIBLE_DEVICES names them, else as nvidia-smi counts; empty: all",
            metavar="ID[,ID...]",
            fault_of=gpus_fault,
        ),
    )
    transport: str = setting(
        "ipc", Setting(help="how the processes reach each other", choices=("ipc", "tcp"))
    )


def offers_prefixes(config: DecodeConfig | UpConfig) -> bool:
    """Whether decode workers of these settings offer prefixes to prefill workers."""
    return config.offer_prefixes and config.prefix_cache and max(config.tp, config.dp_attention) == 1


ROLES: tuple[type[RoleConfig], ...] = (UpConfig, RouterConfig, PrefillConfig, DecodeConfig)
