"""Derives command line, TOML table and environment variables from a config dataclass.

A setting is declared once, as a field made by `setting` (or, without a default, by
`field(metadata=about(...))`). Values come from four places; the first that names a setting wins:

    command line                 --chunk-size 64
    environment                  BATON_PREFILL_CHUNK_SIZE=64
    the role's table in TOML     [prefill] chunk_size = 64
    default of the field

Types are str, int, float and bool. A boolean `x` reads `--x`, `--x on`, `--x off`; one that is on by default
also reads `--no-x`. A choice of auto, on and off reads what a boolean reads, and `auto`. A number with an
`auto` reads that word, too. Every error is a ConfigError that names the value, the place it came from and the
remedy.
"""

import argparse
import dataclasses
import difflib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from ..errors import ConfigError
from ..net.endpoints import endpoint_fault, endpoints_fault

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

T = TypeVar("T", str, int, float, bool)
Value = str | int | float | bool

METADATA_KEY = "baton"
TRUE_WORDS = ("on", "true", "yes", "1")
FALSE_WORDS = ("off", "false", "no", "0")
AUTO_WORD = "auto"
SWITCH = (AUTO_WORD, "on", "off")  # the choices of a boolean that may also be left to the program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Description of a setting: help text, unit, bounds and form. Type and default are those of the field."""

    help: str
    unit: str = ""
    metavar: str = ""  # placeholder of the value in --help; empty: derived from the type
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    is_endpoint: bool = False  # tcp://host:port or ipc:///path
    is_list: bool = False  # a comma-separated list of endpoints
    auto: int | None = None  # the number that the word `auto` stands for; it is allowed outside of the bounds
    # returns the fault of a text as the end of a sentence; "" for a valid one
    fault_of: Callable[[str], str] | None = None

    @property
    def is_switch(self) -> bool:
        """Whether the choices are auto, on and off."""
        return self.choices == SWITCH


def port_number(help: str) -> Setting:
    """The description of a TCP port; `help` says what 0 means."""
    return Setting(help=help, minimum=0, maximum=65535)


NO_FORM = Setting(help="")  # of a value that has no further form than its type


def setting(default: T, description: Setting) -> T:
    """A dataclass field with a default."""
    value: T = dataclasses.field(default=default, metadata=about(description))
    return value


def about(description: Setting) -> dict[str, Setting]:
    """The metadata that makes a dataclass field a setting."""
    return {METADATA_KEY: description}


def settings_of(cls: type) -> dict[str, Field[Any]]:
    """The fields of `cls` that are settings, by name, in order."""
    return {field.name: field for field in dataclasses.fields(cls) if METADATA_KEY in field.metadata}


def describe(field: Field[Any]) -> Setting:
    """The Setting of a setting's field."""
    description = field.metadata[METADATA_KEY]
    assert isinstance(description, Setting)
    return description


def types_of(cls: type) -> dict[str, type]:
    """The type of each setting of `cls`."""
    hints = get_type_hints(cls)
    return {name: hints[name] for name in settings_of(cls)}


def flag_of(name: str) -> str:
    """The command line flag of a setting: `chunk_size` -> `--chunk-size`."""
    return "--" + name.replace("_", "-")


def as_text(value: Value, description: Setting = NO_FORM) -> str:
    """A value in the form that `parse_text` reads."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return AUTO_WORD if description.auto is not None and value == description.auto else str(value)


def did_you_mean(name: str, known: Iterable[str], spelling: str = "'{}'") -> str:
    """A hint such as `; did you mean 'chunk_size'?`, or "". `spelling` writes a name as the source does.

    Names are without the dashes of flags, which would make any two alike.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {spelling.format(close[0])}?" if close else ""


def nowhere(name: str) -> str:
    """The default for `elsewhere`: no other role owns the name."""
    return ""


# --- values -------------------------------------------------------------------------------------------------


def parse_text(text: str, kind: type, source: str, description: Setting = NO_FORM) -> Value:
    """`text` from the command line or the environment as a value of type `kind`. Raises ConfigError."""
    if kind is str:
        return _switch_word(text) if description.is_switch else text
    if description.auto is not None and text.strip().lower() == AUTO_WORD:
        return kind(description.auto)  # type: ignore[no-any-return]
    if kind is bool:
        word = text.strip().lower()
        if word in TRUE_WORDS or word in FALSE_WORDS:
            return word in TRUE_WORDS
        raise ConfigError(f"{source}: {text!r} is neither on nor off; write 'on' or 'off'")
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{source}: {text!r} is not {wanted}") from None


def _switch_word(text: str) -> str:
    """The choice that `text` means: words of booleans are read as on and off."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return "on"
    return "off" if word in FALSE_WORDS else text


def check_type(value: object, kind: type, source: str, description: Setting = NO_FORM) -> Value:
    """Checks a typed value, as from TOML.

    Accepts an int for a float, "on" and "off" for a bool, a bool for a choice of auto, on and off, and the
    word of a number with an `auto`. Raises ConfigError.
    """
    if description.is_switch and isinstance(value, (bool, str)):
        return _switch_word(as_text(value))
    if description.auto is not None and value == AUTO_WORD:
        return kind(description.auto)  # type: ignore[no-any-return]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is bool and isinstance(value, str):
        return parse_text(value, bool, source)
    if isinstance(value, (str, int, float, bool)) and type(value) is kind:
        return value
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
    raise ConfigError(f"{source}: {value!r} is of type {type(value).__name__}; write {names[kind]}")


def check_range(value: Value, description: Setting, source: str) -> None:
    """Raises ConfigError if `value` is outside the choices, bounds or form of its setting."""
    if description.choices and value not in description.choices:
        hint = did_you_mean(str(value), description.choices)
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(description.choices)}{hint}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (description.auto is None or value != description.auto):
        assert isinstance(value, (int, float))
        low, high = description.minimum, description.maximum
        unit = f" {description.unit}" if description.unit else ""
        if not math.isfinite(value):
            raise ConfigError(f"{source}: {value!r} is not a finite number")
        if low is not None and value < low:
            auto = "" if description.auto is None else f", or {AUTO_WORD}"
            raise ConfigError(f"{source}: {value!r} is below the smallest allowed, {low:g}{unit}{auto}")
        if high is not None and value > high:
            raise ConfigError(f"{source}: {value!r} is above the largest allowed, {high:g}{unit}")
    if description.is_endpoint and (fault := endpoint_fault(str(value))):
        raise ConfigError(f"{source}: {value!r} {fault}")
    if description.is_list and (fault := endpoints_fault(str(value))):
        raise ConfigError(f"{source}: {value!r} {fault}")
    if description.fault_of is not None and (fault := description.fault_of(str(value))):
        raise ConfigError(f"{source}: {value!r} {fault}")


def check_fields(config: object) -> None:
    """Checks every setting of a config that `load_config` did not make. Raises ConfigError."""
    types = types_of(type(config))
    for name, field in settings_of(type(config)).items():
        value = check_type(getattr(config, name), types[name], name)
        check_range(value, describe(field), name)


# --- places that values come from ---------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def build_parser(cls: type, prog: str, summary: str) -> argparse.ArgumentParser:
    """The command line of `cls`; help is grouped by the class in the MRO that owns the field, in MRO
    order."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [options]",
        description=summary,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=118),
    )
    types, owners = types_of(cls), _owners(cls)
    for owner in [owner for owner in cls.__mro__ if owner in owners.values()]:
        title = (owner.__doc__ or owner.__name__).splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        for name, field in settings_of(cls).items():
            if owners[name] is owner:
                _add_flag(group, name, field, types[name])
    return parser


def _owners(cls: type) -> dict[str, type]:
    owners: dict[str, type] = {}
    for owner in cls.__mro__:
        for name in inspect.get_annotations(owner):
            owners.setdefault(name, owner)
    return owners


def _add_flag(group: argparse._ArgumentGroup, name: str, field: Field[Any], kind: type) -> None:
    description = describe(field)
    text = _help_line(field, description).replace("%", "%%")
    if kind is bool or description.is_switch:
        words = "|".join(description.choices) or "on|off"
        group.add_argument(flag_of(name), dest=name, nargs="?", const="on", metavar=words, help=text)
        if field.default is True:
            negated = flag_of("no_" + name)
            group.add_argument(negated, dest=name, action="store_const", const="off", help=argparse.SUPPRESS)
        return
    metavar = description.metavar or "|".join(description.choices) or _metavar(description, kind)
    group.add_argument(flag_of(name), dest=name, metavar=metavar, help=text)


def _metavar(description: Setting, kind: type) -> str:
    if description.is_endpoint or description.is_list:
        return "ENDPOINT" if description.is_endpoint else "ENDPOINT[,..]"
    return {str: "TEXT", int: "N", float: "X"}[kind]


def _help_line(field: Field[Any], description: Setting) -> str:
    if field.default is MISSING:
        return f"{description.help} (required)"
    if field.default == "":
        return description.help
    shown = as_text(field.default, description)
    unit = f" {description.unit}" if description.unit and field.default != 0 and shown != AUTO_WORD else ""
    return f"{description.help} (default {shown}{unit})"


def read_command_line(
    cls: type, argv: Sequence[str], prog: str, summary: str, elsewhere: Callable[[str], str] = nowhere
) -> dict[str, Value]:
    """The settings that `argv` names. Exits the process with 0 after --help. Raises ConfigError.

    `elsewhere` maps a name that `cls` lacks to a hint about its owner, or to "".
    """
    parser = build_parser(cls, prog, summary)
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        names = [flag_of(setting).removeprefix("--") for setting in settings_of(cls)]
        hint = elsewhere(name) or did_you_mean(flag.removeprefix("--"), names, "'--{}'")
        raise ConfigError(f"unknown argument {unknown[0]!r}{hint or f'; see {prog} --help'}")
    types, known = types_of(cls), settings_of(cls)
    return {
        name: parse_text(text, types[name], flag_of(name), describe(known[name]))
        for name, text in vars(found).items()
    }


def read_environment(cls: type, prefix: str, env: Mapping[str, str]) -> dict[str, Value]:
    """The settings from environment variables `<prefix><NAME>`. Raises ConfigError."""
    types = types_of(cls)
    values = {}
    for name, field in settings_of(cls).items():
        variable = prefix + name.upper()
        if variable in env:
            source = f"environment variable {variable}"
            values[name] = parse_text(env[variable], types[name], source, describe(field))
    return values


def read_table(
    cls: type, table: Mapping[str, object], source: str, elsewhere: Callable[[str], str] = nowhere
) -> dict[str, Value]:
    """The settings of one TOML table. Raises ConfigError, also for an unknown key."""
    types, known = types_of(cls), settings_of(cls)
    check_keys(cls, table, source, elsewhere)
    return {
        name: check_type(value, types[name], f"{source}, key {name!r}", describe(known[name]))
        for name, value in table.items()
    }


def check_keys(
    cls: type, table: Mapping[str, object], source: str, elsewhere: Callable[[str], str] = nowhere
) -> None:
    """Raises ConfigError for a key that is not a setting of `cls`."""
    known = [name for name in settings_of(cls) if name != "config"]
    for name in table:
        if name not in known:
            hint = elsewhere(name) or did_you_mean(name, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {name!r}{hint}")


def read_toml(path: str) -> dict[str, Mapping[str, object]]:
    """The tables of a TOML file by name. Raises ConfigError when it cannot be read."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config {path}: cannot be read ({error.strerror or error}); check the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not valid TOML: {error}") from None
    for name, table in document.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {name!r} stands outside of a table; put it under that of a role, such as [up] or "
                "[prefill]"
            )
    return dict(document)
