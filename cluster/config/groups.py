"""Groups of settings, one frozen dataclass each. A role combines several groups.

The first docstring line of a group is its title in `--help`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ..net.transport_names import TRANSPORTS, transports_fault
from ..security.ciphers import AUTO, CHOICES
from .fields import SWITCH, Setting, about, check_fields, port_number, setting

DEFAULT_CONTROL = "tcp://127.0.0.1:7100"
MAX_NGRAM = 16
LOOKUP = "ngram"  # the --draft that needs no head
GROW, WHOLE = "grow", "whole"
RESERVES = (AUTO, GROW, WHOLE)
WINDOW_KV = (AUTO, "free", "keep")
LOG_LEVELS = ("debug", "info", "warning", "error")

CIPHER_SETTING = Setting(help="how KV blocks are protected; auto: sealed with --keys", choices=CHOICES)
BULK_PORT_SETTING = port_number(
    "port of sealed KV blocks; under up the first one of several; 0: any free one"
)
TRANSPORTS_SETTING = Setting(
    help="ways that KV blocks may take, the best common one is used; auto: all that this host has",
    metavar=f"{AUTO}|{','.join(TRANSPORTS)}",
    fault_of=transports_fault,
)
SLAB_SETTING = Setting(
    help="shared memory for KV blocks to decode workers of this host, and as much for NIXL where it is used; "
    "auto: 256 on CPU, some chunks on a GPU",
    unit="MiB",
    minimum=1,
    maximum=2**20,
    auto=0,
)
AUTO_CHUNK = -1  # 0 is taken: it asks for whole prompts
DEVICE_SLAB_SETTING = Setting(
    help="GPU memory for KV blocks to decode workers of this host, 640 MiB for each; auto: by the card",
    unit="MiB",
    minimum=1,
    maximum=2**20,
    auto=0,
)


MAX_FEATURE_LAYERS = 64  # the bound of a layout's list


def layers_fault(text: str) -> str:
    """The fault of the setting `text`, as the end of a sentence that begins with it; "" if valid."""
    ids = text.split(",") if text else []
    if not all(layer.isascii() and layer.isdigit() for layer in ids):
        return "is no list of layers: write their numbers from 0 on, such as 2,14,25"
    if len(ids) > MAX_FEATURE_LAYERS:
        return f"names {len(ids)} layers: write at most {MAX_FEATURE_LAYERS}"
    return ""


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """Configuration file.

    `explicit` maps each given setting to its source: "command line", "environment" or "file".
    """

    role: ClassVar[str] = ""
    summary: ClassVar[str] = ""

    config: str = setting(
        "", Setting(help="TOML file with a table per role, such as [prefill]", metavar="FILE")
    )
    explicit: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class LogSettings(RoleConfig):
    """Logs."""

    log_level: str = setting(
        "info", Setting(help="least important line to log; debug adds tracebacks", choices=LOG_LEVELS)
    )
    log_format: str = setting(
        "text", Setting(help="text, or one JSON object, per record", choices=("text", "json"))
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(RoleConfig):
    """Model."""

    model: str = field(
        metadata=about(
            Setting(help="checkpoint directory in Hugging Face format, or a hub id", metavar="DIR")
        )
    )
    served_model: str = setting(
        "",
        Setting(
            help="names that clients use, separated by commas; answers and metrics have the first; "
            "empty: the last part of --model, and a whole hub id"
        ),
    )
    prompt_embeds: bool = setting(
        False,
        Setting(
            help="take prompts as embeddings (`prompt_embeds` of /v1/completions); "
            "the router and all workers need it"
        ),
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the API."""
        given = tuple(name for part in self.served_model.split(",") if (name := part.strip()))
        path = Path(self.model)
        is_path = self.model.startswith((".", "/", "~")) or path.is_dir()
        is_id = self.model.count("/") == 1 and not is_path
        return given or (path.name, *((self.model,) if is_id else ()))

    @property
    def served_name(self) -> str:
        """The model's first name, in answers and metrics."""
        return self.served_names[0]


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(RoleConfig):
    """Network and process life."""

    keys: str = setting(
        "",
        Setting(
            help="directory of keys (`baton keys init`): the links between processes are CURVE", metavar="DIR"
        ),
    )
    trusted_network: bool = setting(
        False,
        Setting(
            help="allow binding other addresses than loopback without keys, and --kv-cipher crc32c with keys"
        ),
    )
    drain_timeout_s: float = setting(
        30.0,
        Setting(help="longest wait for running requests after SIGTERM", unit="s", minimum=0, maximum=3600),
    )
    watchdog_s: float = setting(
        15.0,
        Setting(
            help="a process hung so long writes its stacks and ends; 0: never",
            unit="s",
            minimum=0,
            maximum=3600,
        ),
    )
    stall_timeout_s: float = setting(
        60.0,
        Setting(
            help="requests wait so long for a worker that is stopped, and that no other can replace; 0: a "
            "silent worker counts as lost at once",
            unit="s",
            minimum=0,
            maximum=600,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EngineSettings(RoleConfig):
    """Engine."""

    draft: str = setting(
        "",
        Setting(
            help=f"directory or hub id of a draft head, of which prefill reads the config only; {LOOKUP}: no "
            "head, drafts are looked up in the request's own tokens",
            metavar=f"DIR|{LOOKUP}",
        ),
    )
    no_draft: bool = setting(False, Setting(help="serve without speculation, even when --draft names a head"))
    device: str = setting("auto", Setting(help="where the model runs", choices=("auto", "cpu", "cuda")))
    dtype: str = setting(
        "auto",
        Setting(
            help="type of weights and KV cache; auto: bfloat16 where the device has it",
            choices=("auto", "float32", "bfloat16"),
        ),
    )
    quantize: str = setting(
        "none",
        Setting(
            help="round the matrices of a checkpoint in floats as they are loaded, to 8-bit floats with a "
            "scale per output; the same for workers that pair",
            choices=("none", "fp8"),
        ),
    )
    kv_dtype: str = setting(
        "auto",
        Setting(
            help="type of the KV cache: that of --dtype, or 8-bit floats with the checkpoint's "
            "scales, which take "
            "half the memory; the same for workers that pair",
            choices=("auto", "fp8_e4m3"),
        ),
    )
    graphs: str = setting(
        "auto", Setting(help="capture forwards at start and replay them; auto: on a GPU", choices=SWITCH)
    )
    graph_self_test: bool = setting(
        True, Setting(help="compare each graph with the eager path before serving")
    )
    deterministic: bool = setting(
        False,
        Setting(
            help="compute each token in a fixed order of sums, so that bfloat16 answers do not depend on "
            "drafts, batches or chunks; slower"
        ),
    )
    tp: int = setting(
        1,
        Setting(
            help="GPUs of one host that share the model of one worker: its attention heads, MLPs and "
            "vocabulary are cut; on a CPU as many processes",
            minimum=1,
            maximum=64,
        ),
    )
    ep: bool = setting(
        False,
        Setting(
            help="GPUs that share a model of experts have whole experts each, otherwise a part of the width "
            "of every expert; with --tp or --dp-attention"
        ),
    )
    page_size: int = setting(
        0,
        Setting(
            help="tokens per KV page, the same for workers that pair; auto: 16",
            unit="tokens",
            minimum=1,
            maximum=4096,
            auto=0,
        ),
    )
    pages: int = setting(
        0,
        Setting(
            help="KV pages in the pool; 0: as many as --kv-memory-mb holds", minimum=0, maximum=2**31 - 1
        ),
    )
    count_experts: bool = setting(
        False,
        Setting(
            help="counts the rows that each expert of a mixture-of-experts model computes: worker events "
            "expert_rows_N in /metrics; takes some three launches a layer and forward"
        ),
    )
    return_routed_experts: bool = setting(
        False,
        Setting(
            help="keeps the experts that each token of a mixture-of-experts model takes, for requests with "
            "return_routed_experts; takes a launch a layer and forward"
        ),
    )
    window_kv: str = setting(
        AUTO,
        Setting(
            help="KV behind the windows of a model that has them: freed and not handed over, or kept as that "
            "of other layers; auto: freed, unless the worker has lower tiers; the same for workers that pair",
            choices=WINDOW_KV,
        ),
    )
    window_pages: int = setting(
        0,
        Setting(
            help="KV pages of the layers with windows, where what is behind the windows is freed; auto: so "
            "many that requests of 4096 tokens use up both kinds of pages together",
            minimum=0,
            maximum=2**31 - 1,
            auto=0,
        ),
    )
    kv_memory_mb: int = setting(
        0,
        Setting(
            help="memory of the KV pool; auto: 1024 on CPU, what --gpu-memory-share leaves on a GPU",
            unit="MiB",
            minimum=0,
            maximum=2**24,
            auto=0,
        ),
    )
    gpu_memory_share: float = setting(
        0.0,
        Setting(
            help="share of the GPU's memory for this process: weights, KV, graphs and workspace; auto: 0.9",
            minimum=0.01,
            maximum=1,
            auto=0,
        ),
    )
    max_context: int = setting(
        0,
        Setting(
            help="longest prompt plus output; auto: as the model and a GPU's KV pool allow",
            unit="tokens",
            minimum=0,
            maximum=2**31 - 1,
            auto=0,
        ),
    )
    prefix_cache: bool = setting(
        True, Setting(help="keep the KV of finished prompts for requests that share a prefix")
    )
    host_cache_gib: float = setting(
        -1.0,
        Setting(
            help="host memory of this worker for prefixes that leave the KV pool, pinned on a GPU; 0: none; "
            "auto: none",
            unit="GiB",
            minimum=0,
            maximum=2**16,
            auto=-1,
        ),
    )
    disk_cache: str = setting(
        "",
        Setting(
            help="directory for prefixes that leave the KV pool, and the memory of --host-cache-gib; they "
            "survive a restart, and tell what prompts say; empty: none",
            metavar="DIR",
        ),
    )
    disk_cache_gib: float = setting(
        32.0,
        Setting(help="of --disk-cache: space of each worker", unit="GiB", minimum=0.001, maximum=2**20),
    )
    threads: int = setting(
        0, Setting(help="CPU threads for torch; 0: all cores, which 'up' divides", minimum=0, maximum=1024)
    )
    lease_s: float = setting(
        5.0,
        Setting(
            help="a hand-off without progress for this long is given up", unit="s", minimum=0.1, maximum=600
        ),
    )
    kv_cipher: str = setting(AUTO, CIPHER_SETTING)
    transports: str = setting(AUTO, TRANSPORTS_SETTING)


@dataclass(frozen=True, kw_only=True)
class FirstTokenSettings(RoleConfig):
    """First tokens."""

    slo_ttft_ms: float = setting(
        0.0,
        Setting(
            help="objective for the time from a request to its first token: prompts are computed in the "
            "order and the parts with which most of them meet it, 0: in order of arrival",
            unit="ms",
            minimum=0,
            maximum=600000,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(RoleConfig):
    """Prompt processing."""

    chunk_size: int = setting(
        AUTO_CHUNK,
        Setting(
            help="prompt tokens per forward; auto: 256 on CPU, by card and model on a GPU; "
            "0: the whole prompt",
            unit="tokens",
            minimum=0,
            maximum=2**20,
            auto=AUTO_CHUNK,
        ),
    )
    max_batch: int = setting(
        0,
        Setting(
            help="most requests in one forward; auto: 8 on CPU, by the chunk on a GPU",
            minimum=1,
            maximum=4096,
            auto=0,
        ),
    )
    feature_layers: str = setting(
        "",
        Setting(
            help="layer outputs to offer to the heads of decode workers, "
            "beside those that --draft names; empty: no others",
            metavar="ID[,ID...]",
            fault_of=layers_fault,
        ),
    )
    slab_mb: int = setting(0, SLAB_SETTING)
    device_slab_mb: int = setting(0, DEVICE_SLAB_SETTING)
    kv_bulk_port: int = setting(0, BULK_PORT_SETTING)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(RoleConfig):
    """Decoding and drafting."""

    max_running: int = setting(
        0,
        Setting(
            help="most requests decoded at once; auto: 16 on CPU, by the KV pool on a GPU",
            minimum=1,
            maximum=4096,
            auto=0,
        ),
    )
    reserve: str = setting(
        "auto",
        Setting(
            help="KV pages of a request: grow: those of its prompt and next steps, and more as its tokens "
            "come; whole: those of all its max_tokens from the start; auto: grow",
            choices=RESERVES,
        ),
    )
    dp_attention: int = setting(
        1,
        Setting(
            help="GPUs of one host that share the experts of a model, each with requests, KV cache and "
            "attention of its own, as a decode worker of its own for routers; on a CPU as many processes; "
            "--tp may be the same number",
            minimum=1,
            maximum=64,
        ),
    )
    spec_steps: int = setting(3, Setting(help="levels of drafts before each verify", minimum=1, maximum=16))
    spec_topk: int = setting(
        1,
        Setting(
            help="children of each draft that is expanded; 1: a chain, more: a tree", minimum=1, maximum=16
        ),
    )
    spec_tokens: int = setting(
        0,
        Setting(
            help="tokens verified at once, the likeliest of the tree and the newest; 0: 1 + steps * topk",
            minimum=0,
            maximum=256,
        ),
    )
    overlap: str = setting(
        "auto",
        Setting(
            help="launch each decode step before the one before it was read, "
            "so that the device never waits; auto: on a GPU",
            choices=SWITCH,
        ),
    )
    spec_adaptive: str = setting(
        "auto",
        Setting(
            help="draft fewer tokens, or none, while load or poor acceptance make drafting too "
            f"expensive; auto: on a GPU, and with --draft {LOOKUP}",
            choices=SWITCH,
        ),
    )
    ngram_min: int = setting(
        2,
        Setting(
            help=f"of --draft {LOOKUP}: fewest last tokens that must have come before",
            unit="tokens",
            minimum=1,
            maximum=MAX_NGRAM,
        ),
    )
    ngram_max: int = setting(
        5,
        Setting(
            help=f"of --draft {LOOKUP}: most last tokens that are compared; the longest agreement is taken",
            unit="tokens",
            minimum=1,
            maximum=MAX_NGRAM,
        ),
    )
    ngram_window: int = setting(
        8192,
        Setting(
            help=f"of --draft {LOOKUP}: newest tokens of a request that are searched",
            unit="tokens",
            minimum=2 * MAX_NGRAM,
            maximum=2**20,
        ),
    )
    aggregated: bool = setting(
        False,
        Setting(
            help="a decode worker that computes prompts of any length itself, between its decode steps: it "
            "needs no prefill worker"
        ),
    )
    local_prefill_tokens: int = setting(
        0,
        Setting(
            help="of prompts that decode computes itself, between two of its steps; auto: 128 on CPU, on a "
            "GPU as many as it computes in about 45 ms",
            unit="tokens",
            minimum=1,
            maximum=8192,
            auto=0,
        ),
    )
    slo_itl_ms: float = setting(
        0.0,
        Setting(
            help="longest time between two tokens of a running stream while prompts are computed between its "
            "steps; their parts shrink to keep it, 0: parts of --local-prefill-tokens",
            unit="ms",
            minimum=0,
            maximum=60000,
        ),
    )
    offer_prefixes: bool = setting(
        True,
        Setting(
            help="let prefill workers pull the KV of prompts and answers that this worker has cached; needs "
            "--prefix-cache on and one rank"
        ),
    )
    prefix_slab_mb: int = setting(
        0,
        Setting(
            help="GPU memory through which prefill workers of this host pull prefixes, 384 MiB for each; 0: "
            "prefixes take memory of the host",
            unit="MiB",
            minimum=0,
            maximum=2**20,
        ),
    )
    record_drafts: str = setting(
        "",
        Setting(
            help="directory for samples of this worker's own traffic, to train a head with `baton draft "
            "train`: prompts and answers as token ids; empty: nothing is recorded",
            metavar="DIR",
        ),
    )
    record_shard_mb: int = setting(
        4, Setting(help="largest file of samples", unit="MiB", minimum=1, maximum=1024)
    )
    record_total_mb: int = setting(
        1024,
        Setting(
            help="all samples in the directory; the oldest files are deleted beyond it",
            unit="MiB",
            minimum=2,
            maximum=2**20,
        ),
    )
    pull_window: int = setting(
        8, Setting(help="blocks of a hand-off asked for and not yet received", minimum=1, maximum=64)
    )


@dataclass(frozen=True, kw_only=True)
class TraceSettings(RoleConfig):
    """Traces."""

    otlp_endpoint: str = setting(
        "",
        Setting(
            help="collector of OpenTelemetry traces, as OTLP over HTTP, such as http://127.0.0.1:4318; "
            "needs the packages of the extra otel; "
            "empty: none",
            metavar="URL",
        ),
    )
    trace_sample: float = setting(
        1.0,
        Setting(
            help="share of the requests that are traced, where the client does not say",
            minimum=0.0,
            maximum=1.0,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ScrapeSettings(RoleConfig):
    """Metrics."""

    metrics_host: str = setting("127.0.0.1", Setting(help="address of --metrics-port"))
    metrics_port: int = setting(
        0,
        port_number(
            "port of this worker's own /metrics, 'up' gives each further worker of a role the next "
            "one; 0: none, the "
            "router's tells of it"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ControlSettings(RoleConfig):
    """Router."""

    router: str = setting(
        DEFAULT_CONTROL,
        Setting(
            help="control endpoint of each router, comma-separated; dns+tcp://NAME:PORT: one at every "
            "address of the name",
            is_list=True,
        ),
    )
