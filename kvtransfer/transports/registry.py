"""The registry of KV transports: name -> factories of both ends, the best transport first.

Start-up calls only `open_sender` and `open_receiver`. A new transport needs one entry here and one name in
`cluster.net.transport_names`. Each end serves the names in its entry's `serves` and agrees with each peer on
the best name that both ends have. A failing transport falls back to the next name.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from ...cluster.errors import ConfigError
from ...cluster.net.sockets import Socket
from ...cluster.net.transport_names import CUDA_SLAB, NIXL, SHM, ZMQ_BLOCKS
from ...cluster.process.failpoints import Reach, unarmed
from ...cluster.protocol.messages import Layout
from ...cluster.security.keyring import Keyring
from ..protocol.rank_pairs import WHOLE, Shard
from ..protocol.session import LEASE_S, WINDOW
from ..transport import ListeningTransport, Planes, PollableTransport
from .cuda_slab import DEVICE_SLAB_BYTES, SLAB_FLAG
from .shm import SLAB_BYTES
from .zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender


@dataclass(frozen=True, kw_only=True)
class EndSetup:
    """The settings of either end.

    `ciphers`: accepted ways to protect blocks, the best first. `lease_s`: seconds without progress until a
    room ends. `clock`: monotonic seconds of the thread that polls.
    """

    instance: str
    layout: Layout
    planes: Planes
    context: zmq.Context[Socket]
    keyring: Keyring | None = None
    ciphers: Sequence[str] = ()
    lease_s: float = LEASE_S
    clock: Callable[[], float] = time.monotonic
    reach: Reach = unarmed
    shard: Shard = WHOLE


@dataclass(frozen=True, kw_only=True)
class SenderSetup(EndSetup):
    """The settings of prefill's end.

    `bind`: address for decode workers. `bulk_port`: port of sealed blocks, 0: any. `slab_bytes` and
    `device_slab_bytes`: limits of all memory of the host and of the device that is shared with decode workers
    of this host. `stall_s`: as in `SenderSession`. `peer_role`, `flag`, `slab_flag`: as in `ZmqBlocksSender`.
    """

    bind: str
    bulk_port: int = 0
    trusted_network: bool = False
    stall_s: float = 0.0
    slab_bytes: int = SLAB_BYTES
    device_slab_bytes: int = DEVICE_SLAB_BYTES
    peer_role: str = "decode"
    flag: str = "--kv-bind"
    slab_flag: str = SLAB_FLAG


@dataclass(frozen=True, kw_only=True)
class ReceiverSetup(EndSetup):
    """The settings of decode's end. `window`: blocks in flight per prefill worker. `peer_role`: that of the
    keys of peers.
    """

    window: int = WINDOW
    peer_role: str = "prefill"


@dataclass(frozen=True)
class Transport:
    """One way to move blocks. `serves`: its own name, then the names to which its ends fall back."""

    name: str
    serves: tuple[str, ...]
    sender: Callable[[SenderSetup, Sequence[str]], ListeningTransport]
    receiver: Callable[[ReceiverSetup, Sequence[str]], PollableTransport]


def open_sender(
    names: Sequence[str], setup: SenderSetup, transports: Sequence[Transport] | None = None
) -> ListeningTransport:
    """Prefill's end: the best of `transports` (default: `registered()`) whose name is in `names`.

    Raises ConfigError if no name is registered or the address may not be bound, StartupError if binding
    fails.
    """
    chosen = _best(names, transports)
    end = chosen.sender(setup, _served(names, chosen))
    end.reach = setup.reach
    return end


def open_receiver(
    names: Sequence[str], setup: ReceiverSetup, transports: Sequence[Transport] | None = None
) -> PollableTransport:
    """Decode's end: the best of `transports` (default: `registered()`) whose name is in `names`.

    Raises ConfigError if no name is registered.
    """
    chosen = _best(names, transports)
    end = chosen.receiver(setup, _served(names, chosen))
    end.reach = setup.reach
    return end


def registered() -> tuple[Transport, ...]:
    """All transports, the best first, with the names of `cluster.net.transport_names.TRANSPORTS`."""
    return (
        # slabs beside the messages of zmq_blocks
        Transport(CUDA_SLAB, (CUDA_SLAB, SHM, NIXL, ZMQ_BLOCKS), _zmq_sender, _zmq_receiver),
        Transport(SHM, (SHM, NIXL, ZMQ_BLOCKS), _zmq_sender, _zmq_receiver),
        Transport(NIXL, (NIXL, ZMQ_BLOCKS), _zmq_sender, _zmq_receiver),
        Transport(ZMQ_BLOCKS, (ZMQ_BLOCKS,), _zmq_sender, _zmq_receiver),
    )


def _best(names: Sequence[str], transports: Sequence[Transport] | None) -> Transport:
    known = registered() if transports is None else transports
    for transport in known:
        if transport.name in names:
            return transport
    raise ConfigError(
        f"transports {','.join(names)}: none of them is known; use some of {[t.name for t in known]}"
    )


def _served(names: Sequence[str], transport: Transport) -> tuple[str, ...]:
    return tuple(name for name in transport.serves if name in names)


def _zmq_sender(setup: SenderSetup, names: Sequence[str]) -> ZmqBlocksSender:
    return ZmqBlocksSender(
        setup.bind,
        setup.instance,
        setup.layout,
        setup.planes,
        context=setup.context,
        keyring=setup.keyring,
        ciphers=setup.ciphers,
        bulk_port=setup.bulk_port,
        trusted_network=setup.trusted_network,
        lease_s=setup.lease_s,
        stall_s=setup.stall_s,
        clock=setup.clock,
        transports=names,
        slab_bytes=setup.slab_bytes,
        device_slab_bytes=setup.device_slab_bytes,
        shard=setup.shard,
        peer_role=setup.peer_role,
        flag=setup.flag,
        slab_flag=setup.slab_flag,
    )


def _zmq_receiver(setup: ReceiverSetup, names: Sequence[str]) -> ZmqBlocksReceiver:
    return ZmqBlocksReceiver(
        setup.instance,
        setup.layout,
        setup.planes,
        context=setup.context,
        keyring=setup.keyring,
        ciphers=setup.ciphers,
        window=setup.window,
        lease_s=setup.lease_s,
        clock=setup.clock,
        transports=names,
        shard=setup.shard,
        peer_role=setup.peer_role,
    )
