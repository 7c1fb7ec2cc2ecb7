"""Audits a process: no data becomes code once peers are heard, and no call goes to the network.

Python imports this module at start when this folder is on PYTHONPATH. With AUDIT_REPORT in the environment it
adds an audit hook; each violation is a line of JSON in that file, and raises in the process that did it. The
process says by the audit event `baton.serving` that it has started; until then its libraries may compile code
and run helpers, as they do while they are imported. `tests/audit/watch.py` makes the environment and reads
the report.
"""

import ipaddress
import json
import os
import sys
from types import CodeType, FrameType

NETWORKS = tuple(filter(None, os.environ.get("AUDIT_NETWORKS", "").split(",")))  # count as local, too
SERVING = "baton.serving"
CODE = frozenset({"exec", "compile", "marshal.loads"})
COMMANDS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"}
)
UNPICKLING = "pickle.find_class"
NETWORK = frozenset({"socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"})
JUDGED = CODE | COMMANDS | NETWORK | {UNPICKLING, SERVING}

# Who may make code from text while serving, by the end of its file's name, and why that is not a peer's text.
MAKERS = {
    "/collections/__init__.py": "namedtuple: field names written in a module",
    "/dataclasses.py": "dataclass: field names written in a module",
    "/linecache.py": "a traceback of our own code",
    "/traceback.py": "a traceback of our own code",
    "/ast.py": "a traceback of our own code",
    "/jinja2/environment.py": "the chat template of the served model, in a sandbox",
}
IMPORTS = "<frozen importlib._bootstrap"
# Cython, built for the stable interface of Python 3.12, evaluates this to make traceback frames.
FRAME_SOURCE = "_getframe()"
FRAME_CODE = compile(FRAME_SOURCE, "", "eval")


class Violation(RuntimeError):
    """Raised in place of what must not happen."""


class Watch:
    """The hook and its state."""

    def __init__(self, report: str) -> None:
        self._report = report
        self._is_serving = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in JUDGED:
            return
        if event == SERVING:
            self._is_serving = True
        elif self._is_forbidden(event, arguments):
            self._tell(event, arguments)

    def _is_forbidden(self, event: str, arguments: tuple[object, ...]) -> bool:
        if event == UNPICKLING:
            return True
        if event in NETWORK:
            return not is_local(event, arguments)
        if not self._is_serving or is_cython_frame(event, arguments) or is_role_change(event, arguments):
            return False
        return event in COMMANDS or not is_made_by_a_maker(sys._getframe(2))

    def _tell(self, event: str, arguments: tuple[object, ...]) -> None:
        stack, frame = [], sys._getframe(2)
        while frame is not None and len(stack) < 12:
            stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        line = json.dumps(
            {"pid": os.getpid(), "event": event, "arguments": repr(arguments)[:300], "stack": stack}
        )
        with open(self._report, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        raise Violation(f"{event} in {stack[0] if stack else 'no frame'}")


def is_role_change(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether a worker that has left starts again in the other role, by its own interpreter."""
    if event != "os.exec" or arguments[0] != sys.executable:
        return False
    words = list(arguments[1])  # type: ignore[call-overload]
    return "-m" in words and words[words.index("-m") + 1] in ("baton.prefill", "baton.decode")


def is_cython_frame(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether a Cython module makes a frame for its traceback."""
    if event == "compile":
        return arguments[0] in (FRAME_SOURCE, FRAME_SOURCE.encode())
    code = arguments[0] if event == "exec" else None
    if not isinstance(code, CodeType):
        return False
    return (code.co_code, code.co_names) == (FRAME_CODE.co_code, FRAME_CODE.co_names)


def is_made_by_a_maker(frame: FrameType | None) -> bool:
    """Whether the frame that makes code is one of MAKERS, or belongs to the import of a module."""
    if frame is not None and frame.f_code.co_filename.endswith(tuple(MAKERS)):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTS):
            return True
        frame = frame.f_back
    return False


def is_local(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether an address that is connected to, or looked up, is of this host."""
    address = arguments[0] if event.startswith("socket.get") else arguments[1]
    if isinstance(address, tuple):
        address = address[0]
    if not isinstance(address, str) or address in ("", "localhost") or address.startswith(("/", "\0")):
        return True  # a unix socket, by path or abstract, or none
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_loopback or any(found in ipaddress.ip_network(network) for network in NETWORKS)


if os.environ.get("AUDIT_REPORT"):
    sys.addaudithook(Watch(os.environ["AUDIT_REPORT"]))
