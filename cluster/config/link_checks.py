"""Settings of addresses and of the protection of links that contradict each other.

`baton up` and `baton doctor` check the settings of every process here before one starts. Each process checks
again what it binds.
"""

from ..errors import ConfigError
from ..net.endpoints import advertise_fault, bracketed
from ..net.sockets import check_bind_address
from ..net.transport_names import check_nixl, may_be_open
from ..security.ciphers import ciphers_of
from .groups import NetworkSettings, RoleConfig
from .roles import DecodeConfig, PrefillConfig, RouterConfig, WorkerConfig, offers_prefixes

GUARDS = "or protect it with --api-keys FILE, --tls-cert FILE and --tls-key FILE, all three"


def check_links(config: RoleConfig) -> None:
    """Raises ConfigError for an address that is open to other hosts without protection, and for ciphers and
    transports that contradict other settings."""
    if not isinstance(config, NetworkSettings):
        return
    trusted, has_keys = config.trusted_network, bool(config.keys)
    if isinstance(config, RouterConfig):
        check_clients(config)
        check_bind_address(
            config.control_bind, trusted, has_keys=has_keys, named=f"--control-bind {config.control_bind}"
        )
    if isinstance(config, WorkerConfig):
        ciphers = ciphers_of(config.kv_cipher, has_keys=has_keys, trusted_network=trusted)
        check_nixl(config.transports, may_be_open=may_be_open(ciphers, trusted_network=trusted))
        if config.metrics_port:
            check_metrics_address(config.metrics_host, config.metrics_port, trusted_network=trusted)
    if isinstance(config, PrefillConfig):
        check_bind_address(config.kv_bind, trusted, has_keys=has_keys, named=f"--kv-bind {config.kv_bind}")
        if fault := advertise_fault(config.kv_bind, config.kv_advertise):
            raise ConfigError(fault)
    if isinstance(config, DecodeConfig) and offers_prefixes(config):
        bind = config.prefix_bind
        check_bind_address(bind, trusted, has_keys=has_keys, named=f"--prefix-bind {bind}")
        if fault := advertise_fault(bind, config.prefix_advertise, "prefix", "prefill"):
            raise ConfigError(fault)


def check_clients(config: RouterConfig) -> None:
    """Raises ConfigError when the clients' port is open to other hosts without API keys and TLS."""
    is_guarded = bool(config.api_keys and config.tls_cert and config.tls_key)
    check_client_address(config.host, config.port, trusted_network=config.trusted_network or is_guarded)


def check_client_address(host: str, port: int, *, trusted_network: bool) -> None:
    """As `check_clients`, for one listener."""
    endpoint = f"tcp://{bracketed(host)}:{port}"
    check_bind_address(endpoint, trusted_network, named=f"--host {host}", remedy=GUARDS)


def check_metrics_address(host: str, port: int, *, trusted_network: bool) -> None:
    """Raises ConfigError when the metrics port of a worker is open to other hosts."""
    endpoint = f"tcp://{bracketed(host)}:{port}"
    check_bind_address(endpoint, trusted_network, named=f"--metrics-host {host}")
