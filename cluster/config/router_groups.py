"""Groups of settings of the router, one frozen dataclass each."""

from dataclasses import dataclass

from .fields import Setting, port_number, setting
from .groups import RoleConfig
from .host_names import hosts_fault
from .origins import origins_fault

PREFILL_POLICIES = ("cache-aware", "least-loaded", "round-robin", "power-of-two")
UNKNOWN_FIELDS = ("refuse", "ignore")
GENERATION_CONFIGS = ("model", "none")
TOOL_PARSERS = (
    "auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "deepseek_v3", "harmony", "mistral",
)  # fmt: skip
REASONING_PARSERS = ("auto", "none", "think", "harmony", "mistral", "seed_oss")
CHAT_AUTO = -1  # --chat-max-tokens auto
DECODE_POLICIES = ("session", "least-loaded", "round-robin", "power-of-two")

# --prefix-pulls: whether prefill gets what decode has generated
MEASURED, ALWAYS, NEVER = "auto", "always", "off"
PULL_MODES = (MEASURED, ALWAYS, NEVER)

# --worker-metrics: which workers' series a router exports
SHOW_PORTLESS, SHOW_ALL, SHOW_NONE = "auto", "all", "none"
WORKER_METRICS = (SHOW_PORTLESS, SHOW_ALL, SHOW_NONE)


@dataclass(frozen=True, kw_only=True)
class HttpSettings(RoleConfig):
    """HTTP endpoint."""

    host: str = setting("127.0.0.1", Setting(help="address that clients reach"))
    port: int = setting(8000, port_number("port that clients reach; 0: any free one"))
    queue_timeout_s: float = setting(
        30.0,
        Setting(
            help="a request that waits longer for a free worker gets 429", unit="s", minimum=0, maximum=3600
        ),
    )
    request_timeout_s: float = setting(
        600.0,
        Setting(
            help="a request that takes longer ends with an error; 0: no limit",
            unit="s",
            minimum=0,
            maximum=86400,
        ),
    )
    local_prefill: bool = setting(
        True,
        Setting(
            help="let decode workers compute prompts while no prefill worker serves; off: "
            "such requests get 503"
        ),
    )
    allowed_origins: str = setting(
        "",
        Setting(
            help="origins of web pages that may call the API, such as https://app.example.com; *: all; "
            "empty: no page of another origin reads an answer (CORS)",
            metavar="ORIGIN[,ORIGIN...]|*",
            fault_of=origins_fault,
        ),
    )
    allowed_hosts: str = setting(
        "",
        Setting(
            help="names that requests may have in Host besides those of this host and --host, such as "
            "llm.example.com; *: all; empty: all, but without API keys and at a loopback address none",
            metavar="NAME[,NAME...]|*",
            fault_of=hosts_fault,
        ),
    )
    access_log: bool = setting(
        True, Setting(help="log a line for each request: who, what, status, tokens, times, workers")
    )
    max_body_mb: int = setting(4, Setting(help="largest request body", unit="MiB", minimum=1, maximum=1024))
    prompt_embeds_mb: int = setting(
        0,
        Setting(
            help="most prompt embeddings of a request, times its choices; auto: 4 bytes for each element of "
            "a whole context",
            unit="MiB",
            minimum=1,
            maximum=1024,
            auto=0,
        ),
    )
    chat_max_tokens: int = setting(
        CHAT_AUTO,
        Setting(
            help="output of a chat that does not ask for a length; 0: what is left of the context; auto: "
            "that, or 1024 where a decode worker reserves pages for whole answers (--reserve whole)",
            unit="tokens",
            minimum=0,
            maximum=2**31 - 1,
            auto=CHAT_AUTO,
        ),
    )
    share_port: bool = setting(
        False,
        Setting(
            help="let other routers of this host listen on the same port; "
            "each needs a --control-bind of its own"
        ),
    )
    own_port: int = setting(
        0,
        port_number(
            "port at which this router answers and no other, "
            "to scrape and watch it also where --port is shared; 'up' "
            "gives each further router the next one, and with 0 each of several a free one; 0: none"
        ),
    )
    probe_port: int = setting(
        0,
        port_number(
            "port of /health and /ready for the kubelet and other probes: plain HTTP, no key, and "
            "nothing else; 'up' gives each further router the next one; 0: none, --port answers them too"
        ),
    )
    probe_host: str = setting("", Setting(help="address of --probe-port; empty: that of --host"))
    worker_metrics: str = setting(
        SHOW_PORTLESS,
        Setting(
            help="workers whose series /metrics has; auto: those without a --metrics-port of their own, so "
            "that none is scraped twice; of several routers, 'up' lets the first one have them",
            choices=WORKER_METRICS,
        ),
    )
    max_connections: int = setting(
        0,
        Setting(
            help="most connections of clients; 0: 10000, or what descriptors allow", minimum=0, maximum=2**20
        ),
    )
    keep_alive_s: float = setting(
        75.0,
        Setting(
            help="a connection of a client that asks nothing more is closed after this time; keep it above "
            "the time for which a proxy in front reuses connections",
            unit="s",
            minimum=1,
            maximum=86400,
        ),
    )
    canary_s: float = setting(
        10.0,
        Setting(
            help="ready means that a request passed from prefill to decode within this time; where no "
            "client's does, a tiny "
            "one of the router's own is sent; 0: ready means that a pair is registered",
            unit="s",
            minimum=0,
            maximum=3600,
        ),
    )
    worker_timeout_s: float = setting(
        1.8, Setting(help="a worker silent for this long counts as lost", unit="s", minimum=1.0, maximum=600)
    )


@dataclass(frozen=True, kw_only=True)
class ClientSettings(RoleConfig):
    """API keys and TLS."""

    api_keys: str = setting(
        "",
        Setting(
            help="file of API keys (`baton keys api add`), of which clients must give one", metavar="FILE"
        ),
    )
    limit_parts: int = setting(
        0,
        Setting(
            help="routers over which clients are spread: each enforces its part of the limits of a key; "
            "auto: --routers under up, else 1",
            minimum=1,
            maximum=1024,
            auto=0,
        ),
    )
    tls_cert: str = setting(
        "", Setting(help="certificate chain, PEM: HTTP is TLS; needs --tls-key", metavar="FILE")
    )
    tls_key: str = setting("", Setting(help="private key of --tls-cert, PEM", metavar="FILE"))


@dataclass(frozen=True, kw_only=True)
class RequestSettings(RoleConfig):
    """Requests."""

    unknown_fields: str = setting(
        "refuse",
        Setting(
            help="what becomes of a request with fields that the API does not have; refuse: 400 that names "
            "them all; ignore: it is served without them, and each name is logged",
            choices=UNKNOWN_FIELDS,
        ),
    )
    generation_config: str = setting(
        "model",
        Setting(
            help="sampling of requests that do not say it; model: as the model's generation_config.json has "
            "it; none: temperature 1 and nothing else",
            choices=GENERATION_CONFIGS,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class FormatSettings(RoleConfig):
    """Reasoning and tool calls."""

    tool_parser: str = setting(
        "auto",
        Setting(
            help="form of the model's tool calls; auto: by its chat template; "
            "none: calls are explained to it as text",
            choices=TOOL_PARSERS,
        ),
    )
    reasoning_parser: str = setting(
        "auto",
        Setting(
            help="form of the model's reasoning; auto: by its chat template; "
            "none: reasoning stays in the text",
            choices=REASONING_PARSERS,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class PairingSettings(RoleConfig):
    """Choice of workers."""

    prefill_policy: str = setting(
        "cache-aware",
        Setting(help="how a prefill worker is chosen among those that serve", choices=PREFILL_POLICIES),
    )
    decode_policy: str = setting(
        "session",
        Setting(
            help="how a decode worker is chosen; session: the one that holds the chat so far",
            choices=DECODE_POLICIES,
        ),
    )
    prefix_pulls: str = setting(
        MEASURED,
        Setting(
            help="prefill gets the part of a prompt that a decode worker holds, such as earlier answers, "
            "from there; auto: where measured times say that this is faster than to compute it",
            choices=PULL_MODES,
        ),
    )
    autoscale_roles: bool = setting(
        False,
        Setting(
            help="move workers between prefill and decode by their queue times, one at a time; for one router"
        ),
    )
    local_prefill_max: int = setting(
        0,
        Setting(
            help="decode computes a prompt itself if it lacks at most so many of its tokens, "
            "where measured times say "
            "that this is cheaper; 0: never",
            unit="tokens",
            minimum=0,
            maximum=2**31 - 1,
        ),
    )
    local_prefill_queued_max: int = setting(
        0,
        Setting(
            help="as --local-prefill-max, for a prompt that would wait for others on prefill; `baton up` "
            "defaults to 8192 where prefill and decode have GPUs of their own",
            unit="tokens",
            minimum=0,
            maximum=2**31 - 1,
        ),
    )
