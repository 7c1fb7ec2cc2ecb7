"""`python -m baton.deploy.alive URL...`: the container image's HEALTHCHECK: 0 when the process answers 200, else 1 and why.

Several addresses stand for one process whose role is not known here: the first that takes a connection decides. A router
answers at its port, a worker at --metrics-port. Python and nothing of ours is imported, since it runs every few seconds.
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
