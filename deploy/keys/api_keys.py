"""`baton keys api`: the API keys of clients, in the file that `--api-keys` names.

    baton keys api add FILE --name alice             makes a key and prints it once; the file stores only its
                                                     hash
    baton keys api list FILE                         lists the keys with their owners and limits
    baton keys api revoke FILE ID                    revokes a key by the 8 digits of its id

Running routers apply changes within a second.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import msgspec

from ...cluster.errors import ConfigError
from ...cluster.security.api_keys import ApiKey, make_api_key, read_api_keys, write_api_keys
from ...cluster.security.keyring import end_of

PROG = "baton keys api"
LIMITS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute, of prompts and of outputs as asked for",
    "max_requests": "requests at once",
}


def add(path: Path, fields: dict[str, object]) -> tuple[str, ApiKey]:
    """Adds a new key to the file. Returns the key and its entry. Raises ConfigError."""
    secret, key_id, digest = make_api_key()
    try:
        key = msgspec.convert({"id": key_id, "sha256": digest, **fields}, ApiKey)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{error}; names are letters, digits, '.', '_' and '-', limits whole numbers from 0"
        ) from None
    keys = read_api_keys(path) if path.exists() else []
    if any(known.name == key.name and known.tenant != key.tenant for known in keys):
        raise ConfigError(
            f"{path}: {key.name!r} belongs to another tenant there; give the same --tenant, or another --name"
        )
    write_api_keys(path, [*keys, key])
    return secret, key


def revoke(path: Path, key_id: str) -> ApiKey:
    """Removes an entry from the file and returns it. Raises ConfigError for an unknown id."""
    keys = read_api_keys(path)
    gone = [key for key in keys if key.id == key_id]
    if not gone:
        raise ConfigError(f"{path}: has no key {key_id!r}; see `{PROG} list {path}`")
    write_api_keys(path, [key for key in keys if key not in gone])
    return gone[0]


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the subcommands of `baton keys api` to the parser."""

    def command(name: str, text: str) -> argparse.ArgumentParser:
        description = f"{text[0].upper()}{text[1:]}."
        made: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=description, allow_abbrev=False
        )
        made.add_argument("file", metavar="FILE", type=Path, help="what --api-keys names")
        return made

    made = command("add", "make a key and print it")
    made.set_defaults(action=_add)
    made.add_argument("--name", required=True, help="whose it is")
    made.add_argument(
        "--tenant", help="whose prompts may share cached prefixes with it (those of the same name)"
    )
    made.add_argument(
        "--priority", type=int, default=0, metavar="N", help="lower goes first, -100 to 100 (0)"
    )
    role = made.add_mutually_exclusive_group()
    role.add_argument(
        "--operator", action="store_true", help="it sees workers, metrics and everybody's requests, too"
    )
    role.add_argument(
        "--observer", action="store_true", help="it sees these and asks for nothing else: for a scraper"
    )
    made.add_argument(
        "--no-recording",
        action="store_true",
        help="workers with --record-drafts record no token of its tenant",
    )
    made.add_argument("--days", type=float, metavar="D", help="how long it is valid (for ever)")
    for name, text in LIMITS.items():
        made.add_argument(
            "--" + name.replace("_", "-"), type=int, default=0, metavar="N", help=f"{text}; 0: no limit (0)"
        )
    command("list", "show whose keys there are").set_defaults(action=_list)
    made = command("revoke", "admit a key no longer")
    made.set_defaults(action=_revoke)
    made.add_argument("id", metavar="ID", help="its first 8 digits, as list shows them")


def _add(options: argparse.Namespace) -> list[str]:
    fields = {"name": options.name, "tenant": options.tenant, "priority": options.priority}
    fields |= {"operator": options.operator, "observer": options.observer}
    fields |= {"no_recording": options.no_recording}
    fields |= {name: getattr(options, name) for name in LIMITS}
    if options.days is not None:
        if not 0 < options.days <= 36_525:
            raise ConfigError(f"--days: {options.days!r} is no number of days above 0 and up to 36525")
        fields["not_after"] = end_of(options.days * 86_400, time.time())
    secret, key = add(options.file, fields)
    return [secret, f"{key.id} {key.name}: the key is shown this once"]


def _list(options: argparse.Namespace) -> list[str]:
    return [_line(key, time.time()) for key in read_api_keys(options.file)]


def _revoke(options: argparse.Namespace) -> list[str]:
    key = revoke(options.file, options.id)
    return [f"{key.id} {key.name}: revoked"]


def _line(key: ApiKey, now: float) -> str:
    marks = [f"tenant {key.tenant}"] if key.tenant else []
    marks += [f"priority {key.priority}"] if key.priority else []
    marks += [
        f"{getattr(key, name)} {text.partition(',')[0]}"
        for name, text in LIMITS.items()
        if getattr(key, name)
    ]
    marks += [role for role in ("operator", "observer") if getattr(key, role)]
    marks += ["no recording"] if key.no_recording else []
    if key.not_after is not None:
        marks.append(f"{'until' if key.is_valid(now) else 'ended'} {key.not_after:%Y-%m-%d %H:%M:%S} UTC")
    return f"{key.id} {key.name:<16} {', '.join(marks)}".rstrip()
