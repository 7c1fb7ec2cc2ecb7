"""What an endpoint looks like: tcp://HOST:PORT or ipc:///PATH."""

SCHEMES = ("tcp", "ipc")
HIGHEST_PORT = 65535


def endpoint_fault(endpoint: str) -> str:
    """What is wrong with `endpoint`, as the end of a sentence that begins with it; "" when nothing is."""
    scheme, _, address = endpoint.partition("://")
    if scheme not in SCHEMES or not address or (scheme == "tcp" and not address.rpartition(":")[0]):
        return "is not an endpoint: write tcp://HOST:PORT or ipc:///PATH"
    return port_fault(endpoint)


def port_fault(endpoint: str) -> str:
    """What is wrong with the port of a tcp endpoint ("*" is any free one); libzmq takes any number and wraps it round."""
    scheme, _, address = endpoint.partition("://")
    port = address.rpartition(":")[2]
    is_number = port.isascii() and port.isdigit() and int(port) <= HIGHEST_PORT
    if scheme != "tcp" or port == "*" or is_number:
        return ""
    return f"has no valid port: write a number from 0 to {HIGHEST_PORT}"
