"""The listening sockets of the HTTP API: the clients' port, which other routers may share, the router's own
port, and the port of probes."""

import os
import socket
from dataclasses import dataclass

from ...cluster.config.link_checks import check_client_address
from ...cluster.config.roles import RouterConfig
from ...cluster.errors import StartupError
from ...cluster.net.endpoints import bracketed
from ...cluster.net.sockets import check_bind_address

SEND_BUFFER = 128 << 10  # bytes that the kernel buffers for a slow client; its default is megabytes


@dataclass
class Listeners:
    """The open sockets of one router. None: the router has no such port."""

    clients: socket.socket
    own: socket.socket | None = None
    probes: socket.socket | None = None

    def close(self) -> None:
        """Closes all of them. Idempotent."""
        for listener in (self.clients, self.own, self.probes):
            if listener is not None:
                listener.close()


def open_listeners(config: RouterConfig, *, trusted_network: bool) -> Listeners:
    """The clients' port, with --own-port the router's own, with --probe-port that of probes.

    Raises ConfigError for an address open to others, StartupError for a port that is taken. Probes may come
    from any address, since their port tells two words and takes nothing.
    """
    host, probed = config.host, config.probe_host or config.host
    check_client_address(host, config.port, trusted_network=trusted_network)
    check_bind_address(f"tcp://{bracketed(probed)}:{config.probe_port}", trusted_network=True)
    opened = Listeners(_listen(host, config.port, "--port", is_shared=config.share_port))
    try:
        if config.own_port:
            opened.own = _listen(host, config.own_port, "--own-port")
        if config.probe_port:
            opened.probes = _listen(probed, config.probe_port, "--probe-port")
    except Exception:
        opened.close()
        raise
    return opened


def _listen(host: str, port: int, flag: str, *, is_shared: bool = False) -> socket.socket:
    """A listening socket; a shared one is only bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not is_shared:
            made = socket.create_server((host, port), family=family, backlog=1024)
        else:
            made = socket.socket(family)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                made.setsockopt(socket.SOL_SOCKET, option, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((host, port))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # accepted connections inherit it
        return made
    except OSError as error:
        # `create_server` writes the address into its error, too
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartupError(f"cannot listen on {host} port {port}: {reason}; choose another {flag}") from None
