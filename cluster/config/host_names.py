"""The form of `--allowed-hosts`: names that clients may call a router by, or `*`."""

import re

from .origins import ANY

NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)
ADDRESS = re.compile(r"[0-9a-f:]*:[0-9a-f:.]*", re.IGNORECASE)  # of IPv6, without brackets


def hosts_fault(text: str) -> str:
    """The fault of a list of hosts, as the end of a sentence that begins with it; "" if valid."""
    if text in ("", ANY):
        return ""
    for host in text.split(","):
        if host == ANY:
            return "names * beside hosts: write * alone, or the hosts"
        if "*" in host:
            return f"holds {host!r}: write each name, or * alone for all"
        if fault := _host_fault(host):
            return fault
    return ""


def _host_fault(host: str) -> str:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if NAME.fullmatch(bare) or (ADDRESS.fullmatch(bare) and bare.count(":") > 1):
        return ""
    name, _, port = host.rpartition(":")
    if port.isdigit() and name:
        return f"holds {host!r}: leave out the port, it may be any"
    return f"holds {host!r}, which is no host: write such as llm.example.com, or * for all"
