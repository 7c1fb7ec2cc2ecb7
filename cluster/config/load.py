"""Builds the config of a role from command line, environment and TOML file, and turns a config back into
flags.

`load_config` merges the sources: flags override environment variables, which override the file, which
overrides defaults. `fields` describes how a single setting is read, `roles` lists the settings of each role.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..errors import ConfigError
from ..security.ciphers import CURVE
from .fields import (
    Value,
    as_text,
    check_keys,
    check_range,
    describe,
    did_you_mean,
    flag_of,
    read_command_line,
    read_environment,
    read_table,
    read_toml,
    settings_of,
)
from .groups import LOOKUP, DecodeSettings, EngineSettings, RoleConfig, TraceSettings
from .roles import (
    ROLES,
    DecodeConfig,
    PrefillConfig,
    RouterConfig,
    UpConfig,
    WorkerConfig,
    offers_prefixes,
)

logger = logging.getLogger(__name__)

INTERNAL_VARIABLES = ("BATON_PARENT_PID", "BATON_OPERATOR_TOKEN")  # see cluster/process/process
CLIENT_VARIABLES = ("BATON_API_KEY",)  # variables of `baton top` and `baton chat`
# see cluster/process/failpoints and engine/parallel/rank_cards
TEST_VARIABLES = ("BATON_FAULT", "BATON_ALLOW_FAULTS", "BATON_RANKS_PER_CARD")
PIPELINE = ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size")  # as other servers call it
COMMAND_LINE, ENVIRONMENT, FILE = "command line", "environment", "file"


C = TypeVar("C", bound=RoleConfig)


def load_config(
    cls: type[C],
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    prog: str = "",
    defaults: Mapping[str, Value] | None = None,
    warns: bool = True,
) -> C:
    """The config of one role from `argv` (without the program name), `env` and the file that `--config`
    names.

    `defaults` override the defaults of the fields. With `warns`, an unknown BATON_* variable and a setting
    without effect are logged as warnings; children of `up` do not repeat the latter. Raises ConfigError;
    exits the process with 0 on --help.
    """
    if warns:
        warn_unknown_variables(env)
    given = {
        COMMAND_LINE: read_command_line(cls, argv, prog or f"baton {cls.role}", cls.summary, _owner_of(cls)),
        ENVIRONMENT: read_environment(cls, _env_prefix(cls), env),
    }
    path = str(given[COMMAND_LINE].get("config", given[ENVIRONMENT].get("config", "")))
    given[FILE] = _read_file(cls, path) if path else {}
    values: dict[str, Value] = dict(defaults or {})
    explicit: dict[str, str] = {}
    for source in (FILE, ENVIRONMENT, COMMAND_LINE):  # later sources override earlier ones
        for name, value in given[source].items():
            check_range(value, describe(settings_of(cls)[name]), _label(cls, name, source, path))
            values[name], explicit[name] = value, source
    _check_required(cls, values)
    config = cls(**values, explicit=explicit)  # type: ignore[arg-type]
    if isinstance(config, DecodeSettings):
        check_drafting(config)
    if isinstance(config, RouterConfig):
        check_own_port(config)
    if warns and cls is not UpConfig and not any(variable in env for variable in INTERNAL_VARIABLES):
        for warning in ignored_settings(config):
            logger.warning("%s", warning)
    return config


def check_drafting(config: DecodeSettings) -> None:
    """Raises ConfigError when steps, topk and tokens of a draft, or the sizes of lookup, contradict each
    other.

    The engine would refuse them too, but later in the start.
    """
    if config.ngram_min > config.ngram_max:
        raise ConfigError(
            f"--ngram-min {config.ngram_min}: more than --ngram-max {config.ngram_max}; lower it, or raise "
            "--ngram-max"
        )
    if isinstance(config, EngineSettings) and _looks_up(config) and config.spec_topk > 1:
        raise ConfigError(
            f"--spec-topk {config.spec_topk}: --draft {LOOKUP} makes chains, no trees; write --spec-topk 1"
        )
    steps, topk, tokens = config.spec_steps, config.spec_topk, config.spec_tokens
    most = 1 + topk + (steps - 1) * topk * topk
    if tokens and not 1 + steps <= tokens <= most:
        raise ConfigError(
            f"--spec-tokens {tokens}: --spec-steps {steps} with --spec-topk {topk} needs {1 + steps} "
            "and makes at most "
            f"{most} tokens, the newest one included; write such a number, or 0"
        )


def _looks_up(config: EngineSettings) -> bool:
    return config.draft == LOOKUP and not config.no_draft


def check_own_port(config: RouterConfig) -> None:
    """Raises ConfigError when --own-port equals --port, which other routers may share, or --probe-port equals
    one of both."""
    if config.own_port and config.own_port == config.port:
        raise ConfigError(
            f"--own-port {config.own_port} is the --port of the clients; choose another --own-port"
        )
    if config.probe_port and config.probe_port in (config.port, config.own_port):
        which = "--port of the clients" if config.probe_port == config.port else "--own-port"
        raise ConfigError(f"--probe-port {config.probe_port} is the {which}; choose another --probe-port")


def ignored_settings(config: RoleConfig) -> list[str]:
    """One line per given setting that other settings make ineffective. `up` calls this for its children."""
    lines = []
    if isinstance(config, DecodeSettings) and isinstance(config, EngineSettings):
        given = [name for name in settings_of(DecodeSettings) if is_given(config, name)]
        drafting = [flag_of(name) for name in given if name.startswith("spec_")]
        lookup = [flag_of(name) for name in given if name.startswith("ngram_")]
        recording = [flag_of(name) for name in given if name.startswith("record_")]
        if not config.record_drafts:
            lines += [f"{flag} is ignored: without --record-drafts nothing is recorded" for flag in recording]
        if config.no_draft:
            lines += [
                f"{flag} is ignored: --no-draft serves without speculation" for flag in drafting + lookup
            ]
        elif config.draft != LOOKUP:
            lines += [f"{flag} is ignored: only --draft {LOOKUP} looks drafts up" for flag in lookup]
        if not config.draft and not config.no_draft:
            lines += [
                f"{flag} is ignored: nothing drafts without a head, name one with --draft"
                for flag in drafting
            ]
    if isinstance(config, EngineSettings) and config.pages and is_given(config, "kv_memory_mb"):
        lines.append("--kv-memory-mb is ignored: --pages sets the size of the KV pool")
    if isinstance(config, EngineSettings) and config.device == "cpu" and is_given(config, "gpu_memory_share"):
        lines.append("--gpu-memory-share is ignored: --device cpu uses no GPU")
    if isinstance(config, WorkerConfig) and is_given(config, "metrics_host") and not config.metrics_port:
        lines.append("--metrics-host is ignored: --metrics-port 0 opens no port")
    if isinstance(config, TraceSettings) and is_given(config, "trace_sample") and not config.otlp_endpoint:
        lines.append("--trace-sample is ignored: without --otlp-endpoint nothing is traced")
    if isinstance(config, PrefillConfig) and config.kv_bulk_port and not _has_bulk_port(config):
        lines.append(
            "--kv-bulk-port is ignored: KV blocks have a port of their own only with --keys, over tcp"
        )
    if isinstance(config, DecodeConfig):
        lines += _ignored_of_prefixes(config)
    if (
        isinstance(config, RouterConfig)
        and config.request_timeout_s
        and config.queue_timeout_s > config.request_timeout_s
    ):
        lines.append("--queue-timeout-s is ignored: --request-timeout-s ends a request before")
    if isinstance(config, RouterConfig) and not config.local_prefill:
        lines += [
            f"{flag} is ignored: with --local-prefill off decode computes no prompts"
            for flag, limit in (
                ("--local-prefill-max", config.local_prefill_max),
                ("--local-prefill-queued-max", config.local_prefill_queued_max),
            )
            if limit
        ]
    return lines


def _has_bulk_port(config: PrefillConfig | DecodeConfig) -> bool:
    bind = config.kv_bind if isinstance(config, PrefillConfig) else config.prefix_bind
    return bool(config.keys) and config.kv_cipher != CURVE and not bind.startswith("ipc://")


def _ignored_of_prefixes(config: DecodeConfig) -> list[str]:
    """Warnings about settings of prefixes that a decode worker offers, or does not."""
    given = [
        name
        for name in ("prefix_bind", "prefix_advertise", "prefix_bulk_port", "prefix_slab_mb")
        if name in config.explicit
    ]
    if not offers_prefixes(config):
        reasons = {
            "--offer-prefixes is off": not config.offer_prefixes,
            "--prefix-cache is off": not config.prefix_cache,
            "it has several ranks": config.num_ranks > 1,
        }
        why = next(reason for reason, holds in reasons.items() if holds)
        return [f"{flag_of(name)} is ignored: no prefix is offered while {why}" for name in given]
    if config.prefix_bulk_port and not _has_bulk_port(config):
        return [
            "--prefix-bulk-port is ignored: blocks of prefixes have a port of their own only with --keys, "
            "over tcp"
        ]
    return []


def is_given(config: RoleConfig, name: str) -> bool:
    """Whether some source gave the setting `name`, or a program set another value than its default."""
    return name in config.explicit or getattr(config, name) != settings_of(type(config))[name].default


def to_argv(config: RoleConfig) -> list[str]:
    """The flags that make `load_config` build `config` again, in any environment and without its file.

    Only settings that were given or differ from the default are named.
    """
    argv = []
    for name, described in settings_of(type(config)).items():
        value = getattr(config, name)
        if name == "config" or (value == described.default and name not in config.explicit):
            continue
        argv.append(f"{flag_of(name)}={as_text(value, describe(described))}")
    return argv


def known_variables() -> list[str]:
    """The environment variables of all roles."""
    return [_env_prefix(cls) + name.upper() for cls in ROLES for name in settings_of(cls)]


def warn_unknown_variables(env: Mapping[str, str]) -> None:
    """Logs one warning per BATON_* variable that is not a setting of any role and would be ignored."""
    known = known_variables()
    others = (*INTERNAL_VARIABLES, *CLIENT_VARIABLES, *TEST_VARIABLES)
    for variable in sorted(env):
        if variable.startswith("BATON_") and variable not in known and variable not in others:
            role, _, name = variable.removeprefix("BATON_").lower().partition("_")
            hint = next((_owner_of(cls)(name) for cls in ROLES if cls.role == role), "")
            hint = hint or did_you_mean(variable, known, "{}")
            logger.warning("environment variable %s is no setting of baton and is ignored%s", variable, hint)


def _env_prefix(cls: type[RoleConfig]) -> str:
    return f"BATON_{cls.role.upper()}_"


def _label(cls: type[RoleConfig], name: str, source: str, path: str) -> str:
    """The source of a value, as the first words of an error."""
    if source == COMMAND_LINE:
        return flag_of(name)
    if source == ENVIRONMENT:
        return f"environment variable {_env_prefix(cls)}{name.upper()}"
    return f"{path}, table [{cls.role}], key {name!r}"


def check_file(path: str) -> tuple[str, ...]:
    """The names of the tables of a file, after a check of every table and value. Raises ConfigError."""
    tables = _check_tables(path)
    for cls in ROLES:
        values = read_table(cls, tables.get(cls.role, {}), f"{path}, table [{cls.role}]")
        for name, value in values.items():
            check_range(value, describe(settings_of(cls)[name]), _label(cls, name, FILE, path))
    return tuple(tables)


def _read_file(cls: type[RoleConfig], path: str) -> dict[str, Value]:
    """This role's values from the file. The tables of other roles are only checked for unknown keys."""
    tables = _check_tables(path)
    return read_table(cls, tables.get(cls.role, {}), f"{path}, table [{cls.role}]")


def _check_tables(path: str) -> dict[str, Mapping[str, object]]:
    """The tables of a file, none of which is unknown or has an unknown key. Raises ConfigError."""
    tables = read_toml(path)
    roles = {known.role: known for known in ROLES}
    for name, table in tables.items():
        if name not in roles:
            hint = (
                did_you_mean(name, roles, "[{}]")
                or f"; known tables: {', '.join(f'[{role}]' for role in roles)}"
            )
            raise ConfigError(f"{path}: unknown table [{name}]{hint}")
        check_keys(roles[name], table, f"{path}, table [{name}]", _owner_of(roles[name]))
    return tables


def _owner_of(cls: type[RoleConfig]) -> Callable[[str], str]:
    """A function that hints at the single role that owns a name which `cls` lacks.

    For prefill the hint also explains why prefill lacks the setting.
    """

    def owner_of(name: str) -> str:
        if name in PIPELINE:
            return "; pipeline parallelism is not supported: --tp N runs a model on N GPUs of one host"
        owners = [role.role for role in ROLES if role is not UpConfig and name in settings_of(role)]
        if not owners or cls.role in owners:
            return ""
        is_decode = cls is PrefillConfig and name in settings_of(DecodeSettings)
        why = ", and a prefill worker decodes nothing and owns no decode graphs" if is_decode else ""
        if cls is UpConfig:
            why = (
                ", which `up` starts with what --config FILE has under "
                f"{' and '.join(f'[{owner}]' for owner in owners)}"
            )
        return f"; it is a setting of {' and '.join(f'`baton {owner}`' for owner in owners)}{why}"

    return owner_of


def _check_required(cls: type[RoleConfig], values: Mapping[str, Value]) -> None:
    if "model" in settings_of(cls) and not values.get("model"):
        variable = f"{_env_prefix(cls)}MODEL"
        raise ConfigError(
            f'no model given; write --model DIR, set {variable}, or put model = "DIR" under [{cls.role}]'
        )
