"""The HEALTHCHECK of the container image: `python -m baton.deploy.packaging.alive URL...`.

Exits with 0 when the process answers 200, else with 1 and prints the reason. Several URLs describe one process of unknown
role: the first that accepts a connection decides. A router answers at its port, a worker at --metrics-port.

Only the standard library is imported, since the check runs every few seconds: `http.client` starts in 47 ms of CPU, httpx
in 107 ms.
"""

import http.client
import ssl
import sys
import urllib.parse
from collections.abc import Sequence

TIMEOUT_S = 3.0
TLS_WANTED = '"tls_wanted"'  # the code by which a router with a certificate refuses plain HTTP


def ask(url: str) -> tuple[int, str]:
    """Status and the first words of the answer, over TLS for https:// and where that is wanted (which the router counts as a
    failed handshake). It is this process that is asked, so nobody's certificate is checked. Raises OSError or
    http.client.HTTPException for no answer.
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
    """The command; the exit code, as Docker wants it."""
    said = "no URL given"
    for url in argv:
        try:
            status, words = ask(url)
        except ConnectionRefusedError:
            said = f"nobody listens at {', '.join(argv)}"
            continue
        except (OSError, http.client.HTTPException, ValueError) as error:
            sys.stdout.write(f"{url}: {error or type(error).__name__}\n")
            return 1
        sys.stdout.write(f"{url}: {status} {words}\n")
        return 0 if status == 200 else 1
    sys.stdout.write(f"{said}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
