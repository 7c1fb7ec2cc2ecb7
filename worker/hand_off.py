"""The ends of the KV plane of a worker: one for each of its ranks, which rank 0 joins.

Both roles and all ranks open their ends here, from the same settings. The ends of other ranks listen on the
ports behind rank 0's, or on any free ports where rank 0 does.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import zmq

from ..cluster.config.roles import DecodeConfig, PrefillConfig, WorkerConfig
from ..cluster.errors import StartupError
from ..cluster.net.endpoints import endpoint_behind, reached_at
from ..cluster.net.sockets import Socket
from ..cluster.net.transport_names import CUDA_SLAB, SHM, ZMQ_BLOCKS, may_be_open, transports_of
from ..cluster.process.failpoints import Reach, reach_of, unarmed
from ..cluster.process.process import EXIT_CRASHED
from ..cluster.process.running_clock import RunningClock
from ..cluster.protocol.kv_messages import block_bytes_of
from ..cluster.protocol.messages import Layout
from ..cluster.security.ciphers import ciphers_of
from ..cluster.security.keyring import Keyring, load_keyring, split_key, with_key
from ..engine.engine import Engine
from ..kvtransfer.protocol.layout import KVLayout
from ..kvtransfer.protocol.rank_pairs import Shard
from ..kvtransfer.ranks.agent import RankAgent
from ..kvtransfer.ranks.channel import Channel, RankLost, SocketChannel
from ..kvtransfer.ranks.messages import BeginRank, decode_command, encode
from ..kvtransfer.ranks.ranked_transport import RankedTransport
from ..kvtransfer.transport import ListeningTransport, PollableTransport
from ..kvtransfer.transports.registry import ReceiverSetup, SenderSetup, open_receiver, open_sender
from ..kvtransfer.transports.two_way import TwoWayTransport
from .identity import planes_of

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
POLL_S = 0.01
# The ways of prefixes from decode to prefill, the first one where decode has memory for it. NIXL is for
# prompts only.
PREFIX_TRANSPORTS = (CUDA_SLAB, SHM, ZMQ_BLOCKS)
# sites of the main ends, by their names in the ends for prefixes
SITES = {"sender:": "offer:", "receiver:": "pull:"}


@dataclass(frozen=True, kw_only=True)
class EndFacts:
    """What an end needs beside the worker's settings. `layout`: of all ranks; `engine`: that of this rank."""

    instance: str
    layout: Layout
    engine: Engine
    keyring: Keyring | None
    ciphers: Sequence[str]
    transports: Sequence[str]
    clock: Callable[[], float]
    reach: Reach

    @property
    def shard(self) -> Shard:
        """This rank."""
        return Shard(self.engine.group.rank, self.engine.group.size)


def transports_for(config: WorkerConfig, ciphers: Sequence[str], engine: Engine) -> tuple[str, ...]:
    """The transports that settings and device allow. Raises ConfigError as `transports_of`."""
    return transports_of(
        config.transports,
        has_gpu=engine.pool.device.type == "cuda",
        may_be_open=may_be_open(ciphers, trusted_network=config.trusted_network),
    )


def sender_end(config: PrefillConfig, facts: EndFacts, context: zmq.Context[Socket]) -> ListeningTransport:
    """A prefill rank's end; binds its port for blocks. Raises as `open_sender`."""
    engine, rank = facts.engine, facts.shard.rank
    setup = SenderSetup(
        bind=endpoint_behind(config.kv_bind, rank),
        instance=facts.instance,
        layout=facts.layout,
        planes=planes_of(engine.pool, engine.features if rank == 0 else None),
        context=context,
        keyring=facts.keyring,
        ciphers=facts.ciphers,
        bulk_port=config.kv_bulk_port + rank if config.kv_bulk_port else 0,
        trusted_network=config.trusted_network,
        lease_s=config.lease_s,
        stall_s=config.stall_timeout_s,
        clock=facts.clock,
        slab_bytes=engine.sizes.slab_bytes,
        device_slab_bytes=engine.sizes.device_slab_bytes,
        reach=facts.reach,
        shard=facts.shard,
    )
    return open_sender(facts.transports, setup)


def receiver_end(config: DecodeConfig, facts: EndFacts, context: zmq.Context[Socket]) -> PollableTransport:
    """A decode rank's end. Raises as `open_receiver`."""
    setup = ReceiverSetup(
        instance=facts.instance,
        layout=facts.layout,
        planes=planes_of(facts.engine.pool, None),
        context=context,
        keyring=facts.keyring,
        ciphers=facts.ciphers,
        window=config.pull_window,
        lease_s=config.lease_s,
        clock=facts.clock,
        reach=facts.reach,
        shard=facts.shard,
    )
    return open_receiver(facts.transports, setup)


def with_prefix_pulls(
    sender: ListeningTransport, config: PrefillConfig, facts: EndFacts, context: zmq.Context[Socket]
) -> PollableTransport:
    """Prefill's end `sender` together with one that pulls prefixes from decode workers.

    Raises as `open_receiver`.
    """
    setup = ReceiverSetup(
        instance=facts.instance,
        layout=prefix_layout(facts.layout),
        planes=planes_of(facts.engine.pool, None),
        context=context,
        keyring=facts.keyring,
        ciphers=facts.ciphers,
        lease_s=config.lease_s,
        clock=facts.clock,
        reach=renamed(facts.reach),
        peer_role="decode",
    )
    receiver = open_receiver(prefix_transports(facts.transports), setup)
    return TwoWayTransport(sender=sender, receiver=receiver, main=sender)


def prefix_end(config: DecodeConfig, facts: EndFacts, context: zmq.Context[Socket]) -> ListeningTransport:
    """The end of a decode worker that offers prefixes; binds its port. Raises as `open_sender`."""
    transports = prefix_transports(facts.transports)
    if not facts.engine.sizes.device_slab_bytes:
        transports = tuple(name for name in transports if name != CUDA_SLAB)
    if len(transports) < len(facts.transports):
        logger.info("prefixes go to prefill workers through %s only", ", ".join(transports))
    setup = SenderSetup(
        bind=config.prefix_bind,
        instance=facts.instance,
        layout=prefix_layout(facts.layout),
        planes=planes_of(facts.engine.pool, None),
        context=context,
        keyring=facts.keyring,
        ciphers=facts.ciphers,
        bulk_port=config.prefix_bulk_port,
        trusted_network=config.trusted_network,
        lease_s=config.lease_s,
        clock=facts.clock,
        device_slab_bytes=facts.engine.sizes.device_slab_bytes,
        reach=renamed(facts.reach),
        peer_role="prefill",
        flag="--prefix-bind",
        slab_flag="--prefix-slab-mb",
    )
    return open_sender(transports, setup)


def prefix_layout(layout: Layout) -> Layout:
    """The layout of pages that travel from decode to prefill: without features."""
    token_bytes = KVLayout(layout).kv_page_bytes // layout.page_size
    return msgspec.structs.replace(
        layout, feature_ids=[], feature_width=0, feature_dtype="", block_bytes=block_bytes_of(token_bytes)
    )


def prefix_transports(names: Sequence[str]) -> tuple[str, ...]:
    """Those of a worker's transports by which prefixes travel."""
    return tuple(name for name in names if name in PREFIX_TRANSPORTS)


def renamed(reach: Reach) -> Reach:
    """Failpoints of an end for prefixes, whose sites have names of their own."""

    def reach_renamed(site: str) -> None:
        kind, point = site.split(":")
        reach(SITES.get(f"{kind}:", f"{kind}:") + point)

    return reach if reach is unarmed else reach_renamed


def advertised_endpoint(advertise: str, endpoint: str, rank: int = 0) -> str:
    """The address for peers of the end of `rank` bound to `endpoint`, with its public key. `advertise`: the
    setting, "" for the bound address.
    """
    bound, key = split_key(endpoint)
    advertised = endpoint_behind(advertise, rank) if advertise else ""
    address = reached_at(bound, advertised)
    return with_key(address, key) if key else address


def joined_ends(
    local: PollableTransport,
    links: Sequence[socket.socket],
    layout: Layout,
    *,
    is_decode: bool,
    clock: Callable[[], float],
    name_ranks: Callable[[Sequence[str]], None],
) -> RankedTransport:
    """Rank 0's `local` end, joined with those of the ranks behind `links`, which are told to open theirs.

    `name_ranks` gets the addresses of those. Returns when all serve. Raises StartupError if one does not.
    """
    channels: dict[int, Channel] = {rank: SocketChannel(link) for rank, link in enumerate(links, start=1)}
    joined = RankedTransport(
        local,
        channels,
        num_heads=layout.num_kv_heads,
        is_decode=is_decode,
        on_endpoints=name_ranks,
        clock=clock,
    )
    until = time.monotonic() + READY_TIMEOUT_S
    try:
        for channel in channels.values():
            channel.send(encode(BeginRank(layout)))
        while not joined.is_ready:
            joined.poll(0.0)
            for rank in joined.join.lost_ranks:
                raise StartupError(f"rank {rank} opens no sockets for the hand-off; its own line tells why")
            if time.monotonic() > until:
                raise StartupError(f"ranks open no sockets for the hand-off within {READY_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
    except RankLost as lost:
        raise StartupError(f"a rank opens no sockets for the hand-off: {lost}") from None
    return joined


class RankLink:
    """The link thread of a rank other than 0: its end of the KV plane. It ends the process when it fails."""

    def __init__(self, config: WorkerConfig, engine: Engine, instance: str, link: socket.socket) -> None:
        self._config, self._engine, self._instance = config, engine, instance
        self._channel = SocketChannel(link)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def __repr__(self) -> str:
        return f"<RankLink {self._engine.group!r}>"

    def start(self) -> None:
        """Starts the thread, which opens the end when rank 0 says so."""
        self._thread.start()

    def close(self) -> None:
        """Ends the rank's rooms and the thread."""
        self._stopping.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        context: zmq.Context[Socket] = zmq.Context()
        device = self._engine.pool.kv.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins on the first one
        try:
            layout = self._begin()
            if layout is not None:
                self._open(layout, context).run(self._stopping)
        except RankLost:
            return  # rank 0 has ended
        except Exception as error:
            logger.error("no hand-off on this rank: %s", error, exc_info=error)
            os._exit(EXIT_CRASHED)
        finally:
            context.term()

    def _begin(self) -> Layout | None:
        """The layout of all ranks, which rank 0 says first; None if this rank ends before."""
        while not self._stopping.is_set():
            for message in self._channel.receive():
                command = decode_command(message)
                assert isinstance(command, BeginRank), command
                return command.layout
            time.sleep(POLL_S)
        return None

    def _open(self, layout: Layout, context: zmq.Context[Socket]) -> RankAgent:
        config, engine = self._config, self._engine
        keyring = load_keyring(config.keys, config.role)
        ciphers = ciphers_of(
            config.kv_cipher, has_keys=bool(config.keys), trusted_network=config.trusted_network
        )
        clock = RunningClock(time.monotonic)
        facts = EndFacts(
            instance=self._instance,
            layout=layout,
            engine=engine,
            keyring=keyring,
            ciphers=ciphers,
            transports=transports_for(config, ciphers, engine),
            clock=clock,
            reach=reach_of(os.environ, rank=engine.group.rank),
        )
        endpoint = ""
        if isinstance(config, PrefillConfig):
            sender = sender_end(config, facts, context)
            endpoint = advertised_endpoint(config.kv_advertise, sender.endpoint, engine.group.rank)
            end: PollableTransport = sender
        else:
            assert isinstance(config, DecodeConfig)
            end = receiver_end(config, facts, context)
        rank, order = engine.group.rank, engine.pool.order
        return RankAgent(rank, end, self._channel, order, endpoint=endpoint, clock=clock)
