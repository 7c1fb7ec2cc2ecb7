"""The HEALTHCHECK of the container image: `python -m baton.deploy.packaging.alive URL...`.

Exits with 0 when the process answers 200, else with 1 and prints the reason. Several URLs describe one
process of unknown role; the first URL that accepts a connection decides. A router answers at its port, a
worker at --metrics-port.

Only the standard library is imported, since the check runs every few seconds: `http.client` starts in 47 ms
of CPU, httpx in 107 ms.
"""

import http.client
import ssl
import sys
import urllib.parse
from collections.abc import Sequence

TIMEOUT_S = 3.0
TLS_WANTED = '"tls_wanted"'  # error code of a router with TLS that refuses plain HTTP


def ask(url: str) -> tuple[int, str]:
    """GETs `url`. Returns the status and the beginning of the body.

    Uses TLS for https://, and also after a router refused plain HTTP, which it counts as a failed handshake.
    The certificate is not checked, since the process is on this host. Raises OSError or
    http.client.HTTPException without an answer.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https":
        status, words = _get(
            http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S), parts.path
        )
        if status != 400 or TLS_WANTED not in words:
            return status, words
    context = ssl._create_unverified_context()
    secured = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, timeout=TIMEOUT_S, context=context
    )
    return _get(secured, parts.path)


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    try:
        connection.request("GET", path or "/")
        answer = connection.getresponse()
        return answer.status, answer.read(200).decode("utf-8", "replace").strip()
    finally:
        connection.close()


def main(argv: Sequence[str]) -> int:
    """Runs the check and returns Docker's exit code: 0 healthy, 1 unhealthy."""
    line = "no URL given"
    for url in argv:
        try:
            status, words = ask(url)
        except ConnectionRefusedError:
            line = f"nobody listens at {', '.join(argv)}"
            continue
        except (OSError, http.client.HTTPException, ValueError) as error:
            sys.stdout.write(f"{url}: {error or type(error).__name__}\n")
            return 1
        sys.stdout.write(f"{url}: {status} {words}\n")
        return 0 if status == 200 else 1
    sys.stdout.write(f"{line}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
