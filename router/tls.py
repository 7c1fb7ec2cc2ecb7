"""TLS of the HTTP endpoint."""

import ssl

from ..cluster.errors import ConfigError


def tls_context(certificate: str, key: str) -> ssl.SSLContext | None:
    """A server's context from two PEM files; None without. Raises ConfigError."""
    if bool(certificate) != bool(key):
        raise ConfigError("--tls-cert and --tls-key belong together: give both, or neither")
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
        fault = f"--tls-cert {certificate}, --tls-key {key}: cannot be used ({reason})"
        raise ConfigError(f"{fault}; give a PEM certificate chain and its key without password") from None
    return context
