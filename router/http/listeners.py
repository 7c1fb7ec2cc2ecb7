"""The listening sockets of the HTTP API: the clients' port, which other routers may share, and the router's
own port."""

import socket

from ...cluster.config.roles import RouterConfig
from ...cluster.errors import StartupError
from ...cluster.net.endpoints import bracketed
from ...cluster.net.sockets import check_bind_address

SEND_BUFFER = 128 << 10  # bytes that the kernel buffers for a slow client; its default is megabytes


def open_listeners(
    config: RouterConfig, *, trusted_network: bool
) -> tuple[socket.socket, socket.socket | None]:
    """The clients' port and, with --own-port, the router's own.

    Raises ConfigError for an address open to others, StartupError for a port that is taken.
    """
    shared = _listen(
        config.host, config.port, "--port", trusted_network=trusted_network, is_shared=config.share_port
    )
    if not config.own_port:
        return shared, None
    try:
        return shared, _listen(
            config.host, config.own_port, "--own-port", trusted_network=trusted_network, is_shared=False
        )
    except Exception:
        shared.close()
        raise


def _listen(host: str, port: int, flag: str, *, trusted_network: bool, is_shared: bool) -> socket.socket:
    """A listening socket; a shared one is only bound."""
    check_bind_address(f"tcp://{bracketed(host)}:{port}", trusted_network)
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
        reason = error.strerror or str(error)
        raise StartupError(f"cannot listen on {host} port {port}: {reason}; choose another {flag}") from None
