"""`baton keys`: makes the keys of a host and manages the list of admitted peers.

    baton keys init DIR                              makes a key pair per role, each admitted by the others:
                                                     for `baton up --keys DIR`
    baton keys init DIR --role prefill --name p0     the same for one role on a host of its own; prints the
                                                     public key
    baton keys add DIR KEY --role prefill --name p0  admits the key on another host
    baton keys secret NAME                           makes keys in a Kubernetes cluster by a Job: see
                                                     `key_secret`

`baton keys api` makes the API keys of clients; see `api_keys`.

To replace a key, run `rotate` on its host and `add` with the new key on the others, then restart the process.
Both keys are admitted for the length of the window. To revoke a key at once, run `remove` on the hosts that
admit it.
"""

import argparse
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ...cluster.errors import ConfigError
from ...cluster.process.process import EXIT_OK
from ...cluster.security.keyring import (
    KEY_BYTES,
    PEERS,
    ROLES,
    Peer,
    end_of,
    make_key,
    read_key,
    read_peers,
    write_key,
    write_peers,
)
from ..cli.command import run_command
from .api_keys import add_commands
from .key_secret import add_command as add_secret_command

PROG = "baton keys"
WINDOW_H = 24.0
NOBODY_ELSE = 0o700

Action = Callable[[argparse.Namespace], list[str]]


def main(argv: list[str]) -> int:
    """Runs `baton keys`. Returns 0 on success, 2 for a wrong argument, file or directory."""
    return run_command(PROG, lambda: _run(argv))


def init(directory: Path, roles: list[str], name: str) -> list[Peer]:
    """Makes the directory and a key pair per role, all admitted on this host. Raises ConfigError."""
    keys = [make_key(role, name) for role in roles]
    made = [_peer(key.role, key.name, key.public) for key in keys]
    try:
        directory.mkdir(mode=NOBODY_ELSE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot be made ({error.strerror or error}); choose another DIR"
        ) from None
    if directory.stat().st_mode & 0o022:
        raise ConfigError(f"{directory}: is writable by others; chmod 700 {directory}")
    for role in roles:
        if (directory / f"{role}.key").exists():
            raise ConfigError(
                f"{directory}: has a {role} key already; replace it with `{PROG} rotate {directory}`"
            )
    peers = read_peers(directory) if (directory / PEERS).exists() else []
    write_peers(directory, [*peers, *made])
    for key in keys:
        write_key(directory, key)
    return made


def add(directory: Path, public: str, role: str, name: str, window_s: float, now: float) -> Peer:
    """Admits a key.

    Other keys of the same role and name expire after `window_s` seconds. Raises ConfigError.
    """
    peer = _peer(role, name, public.lower())
    peers = read_peers(directory)
    if any(known.public == peer.public for known in peers):
        raise ConfigError(f"{directory}: lists this key already; see `{PROG} list {directory}`")
    write_peers(directory, [*_ending(peers, peer, window_s, now), peer])
    return peer


def rotate(directory: Path, roles: list[str], window_s: float, now: float) -> list[Peer]:
    """Makes a new key pair for each role.

    The old keys stay admitted here for `window_s` seconds. Raises ConfigError.
    """
    made = []
    for role in roles:
        key = make_key(role, read_key(directory, role).name)
        peer = _peer(role, key.name, key.public)
        write_peers(directory, [*_ending(read_peers(directory), peer, window_s, now), peer])
        # written after the list, so that the host never has only a key that is not admitted
        write_key(directory, key)
        made.append(peer)
    return made


def remove(directory: Path, public: str) -> Peer:
    """Revokes a key on this host. Raises ConfigError for an unknown key."""
    peers = read_peers(directory)
    gone = [peer for peer in peers if peer.public == public.lower()]
    if not gone:
        raise ConfigError(f"{directory}: does not list this key; see `{PROG} list {directory}`")
    write_peers(directory, [peer for peer in peers if peer not in gone])
    return gone[0]


def own_roles(directory: Path) -> list[str]:
    """The roles with a key pair in the directory."""
    return [role for role in ROLES if (directory / f"{role}.key").exists()]


def _ending(peers: list[Peer], successor: Peer, window_s: float, now: float) -> list[Peer]:
    """The valid peers, with an expiry time on the keys that `successor` replaces."""
    end = end_of(window_s, now)
    kept = []
    for peer in peers:
        if peer.user == successor.user and (peer.not_after is None or peer.not_after > end):
            peer = msgspec.structs.replace(peer, not_after=end)
        if peer.is_valid(now):
            kept.append(peer)
    return kept


def _peer(role: str, name: str, public: str) -> Peer:
    """A checked peer. A struct's fields are checked only in decoding, so the peer is encoded and decoded."""
    try:
        return msgspec.convert({"role": role, "name": name, "public": public}, Peer)
    except msgspec.ValidationError as error:
        wanted = f"a key is {2 * KEY_BYTES} hex digits, a name is letters, digits, '.', '_' and '-'"
        raise ConfigError(f"role {role!r}, name {name!r}, key {public!r}: {error}; {wanted}") from None


# --- the command line ---------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    action: Action = options.action
    sys.stdout.write("".join(f"{line}\n" for line in action(options)))
    sys.stdout.flush()
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description="Keys of router, prefill and decode, and of clients.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, text: str, action: Action) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        made.add_argument("directory", metavar="DIR", type=Path, help="what --keys names")
        made.set_defaults(action=action)
        return made

    several: dict[str, Any] = {"dest": "roles", "action": "append", "choices": ROLES, "metavar": "ROLE"}
    window: dict[str, Any] = {
        "type": float,
        "default": WINDOW_H,
        "metavar": "H",
        "help": f"hours that older keys stay ({WINDOW_H:g})",
    }
    made = command("init", "make key pairs", _init)
    made.add_argument("--role", help="router, prefill or decode; may be repeated (all three)", **several)
    made.add_argument("--name", default=_host(), help="who this is (the host's name)")
    made = command("add", "admit a peer's key", _add)
    made.add_argument("public", metavar="KEY", help="its public key, as init or rotate printed it")
    made.add_argument(
        "--role", required=True, choices=ROLES, metavar="ROLE", help="router, prefill or decode"
    )
    made.add_argument("--name", required=True, help="who it is; its older keys end after the window")
    made.add_argument("--window-h", **window)
    made = command("rotate", "replace this host's key pairs", _rotate)
    made.add_argument("--role", help="whose; may be repeated (all that are here)", **several)
    made.add_argument("--window-h", **window)
    made = command("remove", "admit a key no longer", _remove)
    made.add_argument("public", metavar="KEY", help="the public key")
    command("list", "show who is admitted", _list)
    text = "make key pairs as a Secret of the Kubernetes cluster that this runs in"
    made = commands.add_parser(
        "secret", help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    add_secret_command(made, init)
    text = "the API keys of clients"
    clients = commands.add_parser("api", help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_commands(clients.add_subparsers(metavar="COMMAND", required=True))
    return parser


def _init(options: argparse.Namespace) -> list[str]:
    return _lines(init(options.directory, _once(options.roles) or list(ROLES), options.name))


def _add(options: argparse.Namespace) -> list[str]:
    window_s = _seconds(options.window_h)
    return _lines([add(options.directory, options.public, options.role, options.name, window_s, time.time())])


def _rotate(options: argparse.Namespace) -> list[str]:
    roles = _once(options.roles) or own_roles(options.directory)
    if not roles:
        raise ConfigError(
            f"{options.directory}: has no key to replace; make one with `{PROG} init {options.directory}`"
        )
    return _lines(rotate(options.directory, roles, _seconds(options.window_h), time.time()))


def _remove(options: argparse.Namespace) -> list[str]:
    return _lines([remove(options.directory, options.public)])


def _list(options: argparse.Namespace) -> list[str]:
    own = {read_key(options.directory, role).public for role in own_roles(options.directory)}
    return _lines(read_peers(options.directory), own, time.time())


def _lines(peers: list[Peer], own: set[str] | None = None, now: float = 0.0) -> list[str]:
    lines = []
    for peer in peers:
        marks = ["own"] if peer.public in (own or ()) else []
        if peer.not_after is not None:
            marks.append(
                f"{'until' if peer.is_valid(now) else 'ended'} {peer.not_after:%Y-%m-%d %H:%M:%S} UTC"
            )
        lines.append(f"{peer.role:<8} {peer.name:<16} {peer.public}  {', '.join(marks)}".rstrip())
    return lines


def _once(roles: list[str] | None) -> list[str]:
    return list(dict.fromkeys(roles or []))


def _seconds(hours: float) -> float:
    if not 0 <= hours <= 24 * 366:
        raise ConfigError(f"--window-h: {hours!r} is no number of hours from 0 to {24 * 366}")
    return hours * 3600


def _host() -> str:
    """This host's name in the form of a peer's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64].lstrip("._-") or "localhost"
