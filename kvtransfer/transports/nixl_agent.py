"""One agent of NIXL, by the calls that baton makes of it. An agent belongs to one thread.

The wheel is optional (the extra `nixl`) and imported at the first agent. It has no types, so this
module is the only one that knows its names.

NIXL encrypts and authenticates nothing. Over tcp, UCX serves reads and writes of the whole process to whoever
reaches its ports, so a worker uses NIXL only where blocks may travel in the clear.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, cast

import torch

from ...cluster.distribution import install_command
from ...cluster.net.transport_names import nixl_modules
from ..memory.slab import SlabError

BACKEND = "UCX"
# Settings of the wheel's libraries, unless the operator sets them: a worker logs failures itself, and has its
# own handlers of signals.
QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_HANDLE_ERRORS": "none"}

Region = tuple[int, int]  # address and bytes


class NixlAgent(Protocol):
    """An agent. Its methods raise SlabError where NIXL refuses. Registrations, lists and reads are opaque."""

    name: str

    def register(self, region: Region) -> object:
        """Registers host memory for reads, by this agent or by others."""

    def deregister(self, registered: object) -> None:
        """Ends a registration: reads by others fail from now on, where the fabric checks keys."""

    def metadata(self, registered: object) -> bytes:
        """What another agent needs to read this registration, and no other one of this agent."""

    def add_remote(self, metadata: bytes) -> str:
        """Learns of another agent. Returns its name."""

    def remove_remote(self, name: str) -> None:
        """Forgets another agent and closes the connection to it."""

    def prepare(self, name: str, pieces: Sequence[Region]) -> object:
        """Prepares a list of descriptors, of agent `name`, or of this one if it is ""."""

    def release_list(self, prepared: object) -> None:
        """Releases a prepared list that no unfinished read uses."""

    def read(self, local: object, remote: object, into: Sequence[int], of: Sequence[int]) -> object:
        """Starts to read the pieces `of` of the list `remote` into the pieces `into` of `local`."""

    def is_done(self, read: object) -> bool:
        """Whether a read has ended well. Makes progress. Raises SlabError if it has failed, for good."""

    def release(self, read: object) -> None:
        """Releases a read that has ended. One that is under way cannot be stopped, and writes on."""

    def progress(self) -> None:
        """Serves peers: over tcp their reads are answered by this call."""


OpenAgent = Callable[[str], NixlAgent]
T = TypeVar("T")


class _Library(Protocol):
    """The module `_api` of a wheel, as far as it is used here."""

    def nixl_agent_config(self, *, enable_prog_thread: bool, backends: list[str]) -> object: ...

    def nixl_agent(self, name: str, config: object) -> "_LibraryAgent": ...


class _LibraryAgent(Protocol):
    def create_backend(self, name: str, settings: dict[str, str]) -> None: ...

    def register_memory(self, regions: Sequence[object], kind: str, backends: list[str]) -> object: ...

    def deregister_memory(self, registered: object, backends: list[str]) -> None: ...

    def get_partial_agent_metadata(self, of: object, with_address: bool, backends: list[str]) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...

    def remove_remote_agent(self, name: str) -> None: ...

    def prep_xfer_dlist(
        self, name: str, places: Sequence[object], kind: str, backends: list[str]
    ) -> object: ...

    def release_dlist_handle(self, prepared: object) -> None: ...

    def make_prepped_xfer(
        self, kind: str, local: object, into: list[int], remote: object, of: list[int], notice: bytes,
        backends: list[str],
    ) -> object: ...  # fmt: skip

    def transfer(self, read: object) -> str: ...

    def check_xfer_state(self, read: object) -> str: ...

    def release_xfer_handle(self, read: object) -> None: ...

    def get_new_notifs(self) -> object: ...


def open_nixl(name: str) -> NixlAgent:
    """An agent of the installed wheel. Raises SlabError if there is none or it cannot start."""
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    module, reason = None, f"it is not installed: {install_command('nixl')}"
    for candidate in nixl_modules(torch.version.cuda or ""):
        try:
            module = cast(_Library, importlib.import_module(f"{candidate}._api"))
            break
        except (ImportError, OSError) as error:
            reason = str(error)
    if module is None:
        raise SlabError(f"no NIXL: {reason}")
    try:
        return _WheelAgent(module, name)
    except Exception as error:
        raise SlabError(f"no NIXL agent: {_text(error)}") from None


class _WheelAgent:
    """A `NixlAgent` of the wheel.

    Without NIXL's progress thread, which would keep one core busy: the caller makes progress.
    """

    def __init__(self, library: _Library, name: str) -> None:
        self.name = name
        config = library.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = library.nixl_agent(name, config)
        self._agent.create_backend(BACKEND, {"ucx_error_handling_mode": "peer"})

    def __repr__(self) -> str:
        return f"NixlAgent({self.name[:8]})"

    def register(self, region: Region) -> object:
        return self._try(self._agent.register_memory, [(*region, 0, "")], "DRAM", [BACKEND])

    def deregister(self, registered: object) -> None:
        self._try(self._agent.deregister_memory, registered, [BACKEND])

    def metadata(self, registered: object) -> bytes:
        return bytes(self._try(self._agent.get_partial_agent_metadata, registered, True, [BACKEND]))

    def add_remote(self, metadata: bytes) -> str:
        name = self._try(self._agent.add_remote_agent, metadata)
        return name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)

    def remove_remote(self, name: str) -> None:
        self._try(self._agent.remove_remote_agent, name)

    def prepare(self, name: str, pieces: Sequence[Region]) -> object:
        places = [(*piece, 0) for piece in pieces]
        return self._try(self._agent.prep_xfer_dlist, name, places, "DRAM", [BACKEND])

    def release_list(self, prepared: object) -> None:
        self._try(self._agent.release_dlist_handle, prepared)

    def read(self, local: object, remote: object, into: Sequence[int], of: Sequence[int]) -> object:
        read = self._try(
            self._agent.make_prepped_xfer, "READ", local, list(into), remote, list(of), b"", [BACKEND]
        )
        try:
            self._checked(self._try(self._agent.transfer, read))
        except SlabError:
            with suppress(SlabError):
                self.release(read)
            raise
        return read

    def is_done(self, read: object) -> bool:
        return self._checked(self._try(self._agent.check_xfer_state, read))

    def release(self, read: object) -> None:
        self._try(self._agent.release_xfer_handle, read)

    def progress(self) -> None:
        self._try(self._agent.get_new_notifs)

    def _checked(self, state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise SlabError(f"a read ended in state {state!r}")
        return state == "DONE"

    def _try(self, call: Callable[..., T], *values: object) -> T:
        try:
            return call(*values)
        except Exception as error:
            raise SlabError(f"NIXL: {_text(error)}") from None


def _text(error: Exception) -> str:
    return f"{type(error).__name__} {error}"[:200]
