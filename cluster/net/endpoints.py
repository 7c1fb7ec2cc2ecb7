"""Syntax of endpoints: tcp://HOST:PORT or ipc:///PATH."""

SCHEMES = ("tcp", "ipc")
DISCOVERED = "dns+tcp://"  # in a list: every address of the name, which is resolved periodically
HIGHEST_PORT = 65535
WILDCARDS = ("0.0.0.0", "[::]", "*")


def bracketed(host: str) -> str:
    """`host` in the form before a port: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def endpoint_fault(endpoint: str) -> str:
    """The fault of `endpoint`, as the end of a sentence that begins with it; "" if it is valid."""
    scheme, _, address = endpoint.partition("://")
    if scheme not in SCHEMES or not address or (scheme == "tcp" and not address.rpartition(":")[0]):
        return "is not an endpoint: write tcp://HOST:PORT or ipc:///PATH"
    return port_fault(endpoint)


def endpoints_of(text: str) -> tuple[str, ...]:
    """The endpoints of a comma-separated list."""
    return tuple(endpoint.strip() for endpoint in text.split(","))


def endpoints_fault(text: str) -> str:
    """As `endpoint_fault`, for a comma-separated list without duplicates, in which dns+tcp:// names are
    allowed."""
    endpoints = endpoints_of(text)
    for endpoint in endpoints:
        if fault := endpoint_fault(
            endpoint.removeprefix("dns+") if endpoint.startswith(DISCOVERED) else endpoint
        ):
            return fault if len(endpoints) == 1 else f"names {endpoint!r}, which {fault}"
        if endpoints.count(endpoint) > 1:
            return f"names {endpoint} twice: name each router once"
    return ""


def port_fault(endpoint: str) -> str:
    """The fault of a tcp endpoint's port; "" if valid. "*" means any free port.

    libzmq would accept any number and wrap it around.
    """
    scheme, _, address = endpoint.partition("://")
    port = address.rpartition(":")[2]
    is_number = port.isascii() and port.isdigit() and int(port) <= HIGHEST_PORT
    if scheme != "tcp" or port == "*" or is_number:
        return ""
    return f"has no valid port: write a number from 0 to {HIGHEST_PORT}"


def endpoint_behind(endpoint: str, number: int) -> str:
    """The endpoint of rank `number` of a worker whose rank 0 has the valid `endpoint`.

    The ports of ranks follow each other; any port stays any port. A path gets the number.
    """
    head, _, port = endpoint.rpartition(":")
    if number == 0 or port in ("0", "*"):
        return endpoint
    return f"{head}:{int(port) + number}" if endpoint.startswith("tcp://") else f"{endpoint}.{number}"


def is_wildcard(endpoint: str) -> bool:
    """Whether `endpoint` means all addresses of a host, which is valid for listening but not for
    connecting."""
    scheme, _, address = endpoint.partition("://")
    return scheme == "tcp" and address.rpartition(":")[0] in WILDCARDS


def reached_at(bound: str, advertised: str) -> str:
    """The address for peers of a listener at `bound`: `advertised` if given, with port 0 replaced by the
    bound port."""
    if not advertised:
        return bound
    host, _, port = advertised.rpartition(":")
    is_any = advertised.startswith("tcp://") and port == "0"
    return f"{host}:{bound.rpartition(':')[2]}" if is_any else advertised


def advertise_fault(bind: str, advertised: str, plane: str = "kv", peers: str = "decode") -> str:
    """The reason why peers cannot reach a listener bound to `bind` and advertised as `advertised`; "" if they
    can. `plane`: the first word of both flags; `peers`: the role of those who call."""
    flag = f"--{plane}-advertise"
    if not advertised:
        remedy = f"name the address that they reach with {flag} tcp://HOST:0"
        listens = f"--{plane}-bind {bind} listens on all addresses"
        fault = f"{listens}, none of which {peers} workers can call: {remedy}"
        return fault if is_wildcard(bind) else ""
    if fault := endpoint_fault(advertised):
        return f"{flag}: {advertised!r} {fault}"
    if is_wildcard(advertised):
        return f"{flag}: {advertised!r} is no address that {peers} workers can call: name this host's"
    if advertised.startswith("tcp://") and advertised.endswith(":0") and not bind.startswith("tcp://"):
        return f"{flag}: {advertised!r} has the bound port, and --{plane}-bind {bind} has none: name a port"
    return ""
