"""`baton keys secret NAME`: makes keys of all three roles inside a Kubernetes cluster and stores them as one
Secret.

Intended for a Job whose service account may only create Secrets. The command only creates, so it may run
again or twice at once: the API server accepts the first request (201), and existing keys stay (409). The keys
touch no disk but a temporary directory, which the Job keeps in memory.

The request is Kubernetes' own REST API: POST /api/v1/namespaces/{namespace}/secrets, with the token, the
certificate authority and the namespace from the folder of the pod's service account.
"""

import argparse
import base64
import json
import os
import re
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from ...cluster.errors import BatonError, ConfigError
from ...cluster.net.endpoints import bracketed
from ...cluster.security.keyring import ROLES

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 16
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

MakeKeys = Callable[[Path, list[str], str], object]


@dataclass(frozen=True, kw_only=True)
class ServiceAccount:
    """The address of the API server and the credentials for it. `token` is a secret."""

    url: str
    namespace: str
    token: str = field(repr=False)
    authority: Path


def account_of(folder: Path, env: Mapping[str, str]) -> ServiceAccount:
    """The service account of the current pod. Raises ConfigError outside a pod."""
    host = env.get("KUBERNETES_SERVICE_HOST", "")
    port = env.get("KUBERNETES_SERVICE_PORT_HTTPS") or env.get("KUBERNETES_SERVICE_PORT") or "443"
    remedy = (
        "run it in a pod, or make keys with `baton keys init` and a Secret of their folder with "
        "`kubectl create secret`"
    )
    if not host:
        raise ConfigError(f"KUBERNETES_SERVICE_HOST is not set; {remedy}")
    try:
        token, namespace = (
            (folder / name).read_text(encoding="utf-8").strip() for name in ("token", "namespace")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder}: no service account ({error}); {remedy}") from None
    if NAME.fullmatch(namespace) is None:
        raise ConfigError(f"{folder / 'namespace'}: {namespace!r} is no namespace; {remedy}")
    return ServiceAccount(
        url=f"https://{bracketed(host)}:{port}", namespace=namespace, token=token, authority=folder / "ca.crt"
    )


def secret_of(name: str, folder: Path) -> dict[str, object]:
    """A Secret object whose entries are the files of `folder`."""
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(folder.iterdir())}
    labels = {"app.kubernetes.io/name": "baton", "app.kubernetes.io/component": "keys"}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}


def create(account: ServiceAccount, secret: Mapping[str, object]) -> bool:
    """Creates a Secret. False if one of this name exists, which stays unchanged. Raises BatonError."""
    url = f"{account.url}/api/v1/namespaces/{account.namespace}/secrets"
    headers = {"Authorization": f"Bearer {account.token}", "Content-Type": "application/json"}
    try:
        authority = ssl.create_default_context(cafile=str(account.authority))
        with (
            httpx.Client(timeout=TIMEOUT_S, verify=authority) as client,
            client.stream("POST", url, content=json.dumps(secret).encode(), headers=headers) as reply,
        ):
            if reply.is_success:
                return True
            return _refused(reply.status_code, next(reply.iter_bytes(MAX_ANSWER_BYTES), b""))
    except (OSError, httpx.HTTPError) as error:
        raise BatonError(
            f"{account.url} does not answer ({error}); is egress to the API server allowed?"
        ) from None


def _refused(code: int, body: bytes) -> bool:
    """Interprets an answer other than 2xx.

    The `reason` of the API's Status object distinguishes two kinds of 409.
    """
    try:
        status = json.loads(body)
        reason, message = status["reason"], str(status["message"])[:300]
    except (ValueError, KeyError, TypeError):
        reason, message = "", "no reason given"
    if code == 409 and reason == "AlreadyExists":
        return False
    remedy = "; the account needs the verb create for secrets" if code == 403 else ""
    raise BatonError(f"the API server answered {code}: {message}{remedy}")


def make_secret(name: str, account: ServiceAccount, make_keys: MakeKeys) -> str:
    """Makes keys and stores them as a Secret. Returns one line about the result. Raises BatonError."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "keys"
        make_keys(folder, list(ROLES), name)
        is_made = create(account, secret_of(name, folder))
    done = f"made, with keys of {', '.join(ROLES)}" if is_made else "exists, and was left as it is"
    return f"secret {account.namespace}/{name}: {done}"


def add_command(parser: argparse.ArgumentParser, make_keys: MakeKeys) -> None:
    """Adds the arguments and the function of `baton keys secret` to `parser`."""
    parser.add_argument("name", metavar="NAME", help="the Secret's name")
    parser.add_argument(
        "--account", type=Path, default=ACCOUNT, metavar="DIR", help="folder of the account (%(default)s)"
    )

    def act(options: argparse.Namespace) -> list[str]:
        if NAME.fullmatch(options.name) is None:
            raise ConfigError(
                f"{options.name!r} is no name of a Secret; take lower case letters, digits and '-'"
            )
        return [make_secret(options.name, account_of(options.account, os.environ), make_keys)]

    parser.set_defaults(action=act)
