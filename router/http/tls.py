"""The TLS certificate of the HTTP API: two PEM files, which may be replaced while the router serves.

New connections use the current files; open connections keep their certificate. While the files are unusable
or do not match (one of two is already replaced), the last good pair stays in use.
"""

import logging
import ssl
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from cryptography import x509

from ...cluster.errors import ConfigError
from ...cluster.process.log import fields

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25  # seconds for which files count as unchanged
SOON_S = 7 * 86_400.0  # seconds before the end of a certificate from which a warning is logged
PEM_CERTIFICATE, PEM_KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"
LOCKED = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
Stamp = tuple[tuple[int, int, int] | None, ...]


class Certificate:
    """A server's chain and key. Raises ConfigError when they cannot be used.

    `monotonic` gives seconds for the reload interval, `clock` seconds since the epoch.
    """

    def __init__(
        self,
        chain: str,
        key: str,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._chain, self._key = chain, key
        self._monotonic, self._clock = monotonic, clock
        self._looked_at = monotonic()
        self._stamp = self._stamp_now()
        self._context = self._load()

    def __repr__(self) -> str:
        return f"Certificate({self._chain})"

    @property
    def context(self) -> ssl.SSLContext:
        """The context for a new connection. Reloads the files when they changed."""
        now = self._monotonic()
        if now - self._looked_at >= LOOK_AGAIN_S:
            self._looked_at = now
            self._look()
        return self._context

    def _look(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._context = self._load()
        except ConfigError as error:
            logger.warning("the TLS certificate stays as it was: %s", error)
        else:
            logger.info("TLS certificate replaced", extra=fields(file=self._chain))

    def _load(self) -> ssl.SSLContext:
        made = server_context(self._chain, self._key)
        self._warn_of_end()
        return made

    def _warn_of_end(self) -> None:
        """Logs a certificate that has expired or expires soon. It is still used, as configured."""
        try:
            found = x509.load_pem_x509_certificates(Path(self._chain).read_bytes())
            end = min(one.not_valid_after_utc for one in found)
            begin = max(one.not_valid_before_utc for one in found)
        except (OSError, ValueError):  # being replaced, or accepted by OpenSSL and not by this reader
            return
        now = datetime.fromtimestamp(self._clock(), timezone.utc)
        if begin > now:
            logger.warning(
                "--tls-cert %s is not valid yet: clients refuse it until %s", self._chain, _date(begin)
            )
        if (end - now).total_seconds() < SOON_S:
            verb = "has ended: clients refuse it" if end < now else "ends soon"
            logger.warning("--tls-cert %s %s (%s)", self._chain, verb, _date(end))

    def _stamp_now(self) -> Stamp:
        return tuple(_stamp_of(Path(path)) for path in (self._chain, self._key))


def certificate_of(chain: str, key: str) -> Certificate | None:
    """The certificate that the two settings name; None without settings. Raises ConfigError."""
    if bool(chain) != bool(key):
        raise ConfigError("--tls-cert and --tls-key belong together: give both, or neither")
    return Certificate(chain, key) if chain else None


def server_context(chain: str, key: str) -> ssl.SSLContext:
    """A context for TLS 1.2 and 1.3 from two PEM files. Raises ConfigError."""
    _check_content(chain, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client could request renegotiation endlessly
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(chain, key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"--tls-key {key} is not the key of the first certificate in --tls-cert {chain}: give the "
                "key that belongs "
                "to it; the server's own certificate stands first, those that signed it follow"
            ) from None
        fault = f"--tls-cert {chain}, --tls-key {key}: cannot be used ({_reason_of(error)})"
        raise ConfigError(f"{fault}; give a PEM certificate chain and its key") from None
    return context


def _check_content(chain: str, key: str) -> None:
    """Finds mistakes that OpenSSL reports without a useful message."""
    if PEM_CERTIFICATE not in _content("--tls-cert", chain):
        remedy = "give the chain as text that begins with -----BEGIN CERTIFICATE-----"
        raise ConfigError(f"--tls-cert {chain} holds no certificate in PEM; {remedy}")
    secret = _content("--tls-key", key)
    if PEM_KEY not in secret:
        raise ConfigError(
            f"--tls-key {key} holds no private key in PEM; give the one that --tls-cert was made with"
        )
    if any(mark in secret for mark in LOCKED):
        remedy = f"take it off with `openssl pkey -in {key} -out FILE`, and let nobody else read FILE"
        raise ConfigError(
            f"--tls-key {key} is locked with a passphrase, which nobody types at a start; {remedy}"
        )


def _content(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be read ({error.strerror}); give a PEM file that can"
        ) from None


def _reason_of(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):  # OpenSSL's reason in capitals, or none
        return str(error.reason or "damaged PEM").replace("_", " ").lower()
    return error.strerror or type(error).__name__


def _date(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
