"""Explains failed TLS connections to the user of a command."""

import os
import ssl
from collections.abc import Mapping

AUTHORITY_VARIABLE = "SSL_CERT_FILE"  # read by OpenSSL, and so by all commands here
# X509_V_ERR_* codes of certificates that are self-signed or signed by an unknown authority
UNKNOWN_AUTHORITY = (18, 19, 20, 21, 27)
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


def tls_fault(url: str, error: Exception, env: Mapping[str, str] = os.environ) -> str:
    """One line about `url` with a remedy; "" for an error outside of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        fault = f"the certificate of {url} is not accepted ({reason})"
        return f"{fault}; {_authority(env) if error.verify_code in UNKNOWN_AUTHORITY else _remedy(reason)}"
    if not isinstance(error, ssl.SSLError):
        return ""
    if error.reason in NO_TLS:
        return f"{url} does not speak TLS; write http://"
    reason = str(error.reason or error).replace("_", " ").lower()
    return f"no TLS connection to {url} ({reason}); its own log may say more"


def _authority(env: Mapping[str, str]) -> str:
    given = env.get(AUTHORITY_VARIABLE, "")
    state = "which has not signed it" if os.access(given, os.R_OK) else "which cannot be read"
    now = f" (now {given}, {state})" if given else ""
    return (
        "name the PEM file of the authority that signed it in the environment variable "
        f"{AUTHORITY_VARIABLE}{now}"
    )


def _remedy(reason: str) -> str:
    if "mismatch" in reason:
        return "use the name that it was made for, or have one made for this name"
    return "its server needs another"
