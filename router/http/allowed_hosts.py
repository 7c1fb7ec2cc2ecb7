"""The names in Host that a router answers to.

A page of any site can have its own name resolve to 127.0.0.1 (DNS rebinding). To the browser, a router there
is then the page's own origin: neither CORS nor `cors.is_foreign` stop it. Its requests have the name in Host,
which no page can change. A router that only this host reaches and that asks for no key therefore answers to
names of this host only.

    without --allowed-hosts   with API keys, or where other hosts can connect: every Host. Else as with no
                              NAMES
    --allowed-hosts NAMES     localhost, *.localhost, 127.0.0.0/8, ::1, the value of --host, and NAMES
    --allowed-hosts *         every Host

The port in a Host may be any: tunnels and published ports of containers change it.
"""

import ipaddress
import re

from ...cluster.config.origins import ANY
from ...cluster.config.roles import RouterConfig
from ...cluster.net.endpoints import bracketed
from ...cluster.net.sockets import is_loopback

HOST = re.compile(r"(?:\[(?P<address>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::[0-9]*)?")


class AllowedHosts:
    """The names of this host, and `names`."""

    def __init__(self, *names: str) -> None:
        self._names = frozenset({"localhost", "127.0.0.1", *(_plain(name) for name in names)})

    def __repr__(self) -> str:
        return f"AllowedHosts({', '.join(sorted(self._names))})"

    def admits(self, host: bytes) -> bool:
        """Whether the value of a Host field has an allowed name; its port may be any."""
        name = name_of(host.decode("latin-1"))
        return name in self._names or name.endswith(".localhost") or _is_own_address(name)


def allowed_hosts_of(config: RouterConfig) -> AllowedHosts | None:
    """The names that a router with these settings answers to; None for every Host."""
    if config.allowed_hosts == ANY:
        return None
    is_private = not config.api_keys and is_loopback(f"tcp://{bracketed(config.host)}:{config.port}")
    if not config.allowed_hosts and not is_private:
        return None
    return AllowedHosts(config.host, *[name for name in config.allowed_hosts.split(",") if name])


def name_of(host: str) -> str:
    """The name or address in the value of a Host field, in lower case; "" if it is malformed."""
    found = HOST.fullmatch(host.strip())
    return _plain(found["address"] or found["name"]) if found is not None else ""


def _plain(name: str) -> str:
    """A name without brackets and without the dot of its root."""
    return name.strip("[]").lower().removesuffix(".")


def _is_own_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
