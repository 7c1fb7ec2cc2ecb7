"""Prefill's side of the hand-off, without I/O: commands and messages in, effects out.

1. `offer` opens a room over pages whose KV is not computed yet.
2. Decode's Attach names the leading tokens that decode has. An Attach before the offer is kept for a while.
3. `advance` announces finished tokens.
4. Each Pull is answered by its block. `launched` lets blocks go unasked behind the prompt's last forward.
5. Release, Abort, `release` or the end of the lease closes the room and frees its pages.

A decode worker that is stopped makes no progress and keeps its connection. So at the end of a lease its
rooms stay until the worker is heard or its connection ends, for at most `stall_s`. Announcements ask it
meanwhile: a worker that runs answers one of a room that it lacks, and repeats requests for one that it has.

The first Attach says how many ranks decode has. Then the room has a part for each of them that pulls from
this rank; see `session`.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...cluster.errors import HandshakeRefused, LocalProtocolError
from ...cluster.net.transport_names import ZMQ_BLOCKS, common_transports
from ...cluster.protocol.kv_messages import PairUp
from ...cluster.protocol.messages import (
    PROTOCOL_MAJOR,
    Abort,
    Announce,
    Attach,
    KVHello,
    KVRefused,
    KVWelcome,
    Layout,
    Pull,
    Release,
)
from ...cluster.security.ciphers import AES_128_GCM, CRC32C, agree_cipher
from ..transport import Attached, Dropped, Offer, Released
from .layout import KVLayout, RoomStream, agree, feature_columns
from .rank_pairs import WHOLE, Shard, receivers_of
from .seal import KEY_BYTES, Sealer
from .session import (
    LEASE_S,
    REMIND_S,
    Effect,
    FillEarly,
    Lease,
    Notify,
    Peer,
    SendBlock,
    SenderRoom,
    SenderState,
    SendMessage,
    Tombstones,
    TransferCounters,
)

EARLY_S = 330.0  # longer than a router waits for a first token, so no queued prompt fails
STALLED_S = 2.0  # a decode worker with rooms is not silent for so long while it runs
MAX_EARLY = 4096
MAX_PEERS = 1024
MAX_REASON = 1024


@dataclass
class _Greeted:
    """A connection with a finished handshake."""

    heard_at: float  # time of its last message
    instance: str
    shard: Shard
    layout: KVLayout
    transports: tuple[str, ...]  # the common ones, best first
    cipher: str
    columns: tuple[int, ...] | None  # as in SendBlock
    is_near: bool


@dataclass(frozen=True)
class _Early:
    """An Attach that came before its offer."""

    peer: Peer
    attach: Attach
    expires_at: float


class SenderSession:
    """All rooms and peers of one prefill worker."""

    def __init__(
        self,
        instance: str,
        layout: Layout,
        *,
        ciphers: Sequence[str] = (CRC32C,),
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        lease_s: float = LEASE_S,
        stall_s: float = 0.0,
        early_s: float = EARLY_S,
        max_early: int = MAX_EARLY,
        max_peers: int = MAX_PEERS,
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        host: str = "",
        shard: Shard = WHOLE,
    ) -> None:
        """`shard`: this rank of the worker, whose ranks share `instance`.

        `stall_s`: longest time for which rooms wait behind the end of their lease for a silent decode
        worker whose connection stands."""
        self.instance = instance
        self.layout = KVLayout.of_rank(layout, shard)
        self.shard = shard
        self.rank_endpoints: tuple[str, ...] = ()  # of all ranks, for decode; rank 0 says them
        self.counters = TransferCounters()
        self._ciphers = tuple(ciphers)
        self._random_bytes = random_bytes
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._early_s = early_s
        self._max_early = max_early
        self._max_peers = max_peers
        self._transports = transports
        self._host = host
        self._rooms: dict[str, dict[int, SenderRoom]] = {}  # the parts of each, by decode's rank
        self._peers: OrderedDict[Peer, _Greeted] = OrderedDict()
        self._early: OrderedDict[tuple[str, int], _Early] = OrderedDict()  # by room and decode's rank
        self._max_rank = 0  # of decode's ranks that have greeted
        self._tombstones = Tombstones()

    def __repr__(self) -> str:
        return f"SenderSession(rooms={len(self._rooms)}, early={len(self._early)}, peers={len(self._peers)})"

    @property
    def num_rooms(self) -> int:
        """Open rooms."""
        return len(self._rooms)

    def is_open(self, room: str, epoch: int) -> bool:
        """Whether the attempt still owns its pages."""
        return bool(self._parts(room, epoch))

    # --- commands -------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> list[Effect]:
        """Opens a room. A newer attempt replaces an older one, which is Dropped.

        Raises LocalProtocolError if the pages do not fit the tokens, or the attempt was offered before.
        """
        stream = self.layout.stream(offer.num_tokens, 0)
        expected = stream.num_pages + stream.num_window_pages
        if offer.num_tokens < 1 or len(offer.pages) != expected:
            raise LocalProtocolError(
                f"{offer.num_tokens} tokens lie in {expected} pages, not in {len(offer.pages)}"
            )
        effects: list[Effect] = []
        for old in list(self._rooms.get(offer.room, {}).values())[:1]:
            if old.offer.epoch >= offer.epoch:
                raise LocalProtocolError(f"room {offer.room} is open at epoch {old.offer.epoch}")
            effects += self._drop(old, "a newer attempt was offered", now)
        self._rooms[offer.room] = {0: SenderRoom(offer, Lease(self._lease_s, now))}
        for key, early in self._early_of(offer.room, offer.epoch):
            del self._early[key]
            if early.peer in self._peers:
                effects += self._attach(early.peer, self._peers[early.peer], early.attach, now)
        return effects

    def launched(self, room: str, epoch: int, start: int, tokens: int) -> list[Effect]:
        """The forward that computes prompt tokens [start, tokens) was launched.

        Lets their blocks go unasked if they end the prompt: behind an earlier forward, decode has the time of
        the next one to pull. No-op for a room that has ended.
        """
        effects: list[Effect] = []
        for part in self._parts(room, epoch):
            if tokens == part.offer.num_tokens:
                part.underway = (start, tokens)
                effects += self._early_run(part, is_late=False)
        return effects

    def advance(
        self,
        room: str,
        epoch: int,
        tokens_ready: int,
        first_token: int | None,
        now: float,
        ready_at: float | None = None,
    ) -> list[Effect]:
        """Announces progress, made at `ready_at`; no-op for a room that has ended.

        Raises LocalProtocolError if `tokens_ready` shrinks or exceeds the prompt, or the first token comes
        too early.
        """
        effects: list[Effect] = []
        for part in self._parts(room, epoch):
            if not part.tokens_ready <= tokens_ready <= part.offer.num_tokens or part.is_final:
                raise LocalProtocolError(f"{tokens_ready} tokens ready do not follow {part}")
            if first_token is not None and tokens_ready != part.offer.num_tokens:
                raise LocalProtocolError(
                    f"the first token is known with {tokens_ready} tokens ready in {part}"
                )
            part.tokens_ready = tokens_ready
            part.first_token = first_token
            part.ready_at = now if ready_at is None else ready_at
            if part.underway is not None and tokens_ready >= part.underway[1]:
                part.underway = None
            part.lease.renew(now)
            if part.state is SenderState.ATTACHED:
                effects.append(self._announce(part, now))
        return effects

    def release(self, room: str, epoch: int, reason: str, now: float) -> list[Effect]:
        """Ends an attempt without an event, whether or not it was offered."""
        effects: list[Effect] = []
        parts = list(self._rooms.get(room, {}).values())
        if parts and parts[0].offer.epoch <= epoch:
            effects += self._end(room, reason, now)
        elif not parts and self._tombstones.find(room, epoch) is None:
            self._tombstones.bury(room, epoch, is_success=False, reason=reason, now=now)
        for key, early in self._early_of(room, epoch):
            del self._early[key]
            effects.append(self._abort(early.peer, room, early.attach.epoch, reason))
        return effects

    def close(self, now: float) -> list[Effect]:
        """Ends all rooms; returns the Aborts as effects."""
        effects: list[Effect] = []
        for room in list(self._rooms):
            effects += self._end(room, "prefill stops", now)
        for (room, _), early in list(self._early.items()):
            effects += self.release(room, early.attach.epoch, "prefill stops", now)
        self._peers.clear()
        return effects

    # --- events of the network and the clock ----------------------------------------------------------------

    def receive(self, peer: Peer, message: PairUp, now: float) -> list[Effect]:
        """Handles one message of `peer`."""
        if isinstance(message, KVHello):
            return self._greet(peer, message, now)
        greeted = self._peers.get(peer)
        if greeted is None or greeted.instance != message.instance:
            # a peer of an earlier process, or a reconnected one; it greets again when no answer comes
            self.counters.stale_instance += 1
            return []
        self._peers.move_to_end(peer)
        self._heard(greeted, now)
        if isinstance(message, Attach):
            return self._attach(peer, greeted, message, now)
        known = self._part_of(message.room, greeted.shard)
        if known is None or known.offer.epoch != message.epoch or not _may_speak(known, message):
            return self._answer_stranger(peer, greeted, message, known)
        known.peer = peer  # the same process may have reconnected
        if isinstance(message, Pull):
            return self._pull(known, message, now)
        if isinstance(message, Release):
            if not known.is_final:
                self.counters.unexpected += 1
                return []
            return self._release_part(known, now)
        reason = message.reason[:MAX_REASON] or "aborted by decode"
        known.peer = ""  # needs no Abort
        return self._drop(known, reason, now)

    def is_attached(self, room: str, epoch: int) -> bool:
        """Whether decode waits for the room's announcements."""
        return any(part.state is SenderState.ATTACHED for part in self._parts(room, epoch))

    def is_underway(self, room: str, epoch: int, tokens: int) -> bool:
        """Whether the forward that ends with the first `tokens` tokens was launched and not announced."""
        launched = [part.underway for part in self._parts(room, epoch) if part.underway is not None]
        return bool(launched) and tokens >= launched[0][1]

    def wants(self, item: SendBlock) -> bool:
        """Whether the attached peer still expects these blocks."""
        parts = self._parts(item.room, item.epoch)
        return any((part.peer, part.stream) == (item.peer, item.stream) for part in parts)

    def speaks(self, peer: Peer, instance: str, transport: str) -> bool:
        """Whether process `instance` has greeted over this connection and may use `transport` with us."""
        greeted = self._peers.get(peer)
        return greeted is not None and greeted.instance == instance and transport in greeted.transports

    def peer_gone(self, peer: Peer) -> None:
        """Forgets a closed connection. Its rooms wait for the same process until their lease ends."""
        self._peers.pop(peer, None)

    def tick(self, now: float) -> list[Effect]:
        """Ends overdue rooms and repeats announcements without an answer."""
        effects: list[Effect] = []
        for known in list(self._open_parts()):
            if not known.is_open:
                continue  # ended with another part of its room
            if known.waits_for_decode and known.lease.is_over(now):
                effects += self._end_lease(known, now)
            elif known.remind_at is not None and now >= known.remind_at:
                effects.append(self._announce(known, now))
        while self._early:
            key, early = next(iter(self._early.items()))
            if early.expires_at > now:
                break
            effects.append(self._evict_early(key))
        self._tombstones.sweep(now)
        return effects

    def next_deadline(self) -> float | None:
        """Monotonic time of the next `tick` that has work; None without one."""
        times: list[float] = []
        for known in self._open_parts():
            if known.waits_for_decode:
                is_asked = known.quiet_since >= known.lease.ends_at
                times.append(known.quiet_since + REMIND_S if is_asked else known.lease.ends_at)
            if known.remind_at is not None:
                times.append(known.remind_at)
        if self._early:
            times.append(next(iter(self._early.values())).expires_at)
        return min(times, default=None)

    # --- parts ----------------------------------------------------------------------------------------------

    def _open_parts(self) -> Iterator[SenderRoom]:
        """The parts of all rooms that decode has not released."""
        return (part for parts in self._rooms.values() for part in parts.values() if part.is_open)

    def _parts(self, room: str, epoch: int) -> list[SenderRoom]:
        """The parts of an attempt that decode has not released."""
        parts = self._rooms.get(room, {}).values()
        return [part for part in parts if part.is_open and part.offer.epoch == epoch]

    def _part_of(self, room: str, shard: Shard) -> SenderRoom | None:
        """The open part of a room for a rank of decode; the whole room before its first Attach."""
        parts = self._rooms.get(room, {})
        for part in parts.values():
            if part.is_open and part.shard in (None, shard):
                return part
        return None

    def _early_of(self, room: str, epoch: int) -> list[tuple[tuple[str, int], _Early]]:
        """The early attachments of all ranks to a room, up to an attempt."""
        keys = [(room, rank) for rank in range(self._max_rank + 1)]
        found = [(key, self._early[key]) for key in keys if key in self._early]
        return [(key, early) for key, early in found if early.attach.epoch <= epoch]

    def _heard(self, greeted: _Greeted, now: float) -> None:
        """Notes a message of a decode worker. After a long silence its leases begin anew: it was stopped."""
        if self._stall_s and now - greeted.heard_at >= STALLED_S:
            for known in self._open_parts():
                if known.peer_instance == greeted.instance and known.shard == greeted.shard:
                    known.lease.renew(now)
        greeted.heard_at = now

    def _end_lease(self, known: SenderRoom, now: float) -> list[Effect]:
        """Drops a room whose lease is over, or asks a decode worker that may be stopped."""
        greeted, ends_at = self._peers.get(known.peer), known.lease.ends_at
        is_silent = greeted is not None and greeted.heard_at <= ends_at and now < ends_at + self._stall_s
        if not is_silent:
            return self._drop(known, f"no progress for {self._lease_s:g} s", now)
        is_asked = ends_at <= known.quiet_since and now < known.quiet_since + REMIND_S
        return [] if is_asked else [self._announce(known, now)]

    def _greet(self, peer: Peer, hello: KVHello, now: float) -> list[Effect]:
        try:
            if hello.protocol != PROTOCOL_MAJOR:
                raise HandshakeRefused(f"KV protocols differ: ours {PROTOCOL_MAJOR}, theirs {hello.protocol}")
            common = agree(self.layout.wire, hello.layout)
            layout = KVLayout(common, sender=self.shard, receiver=self._shard_of(hello))
            cipher = agree_cipher(self._ciphers, hello.ciphers)
            transports = common_transports(
                self._transports, hello.transports, is_near=self._is_near(hello), is_clear=cipher == CRC32C
            )
        except HandshakeRefused as refusal:
            self.counters.refused_peers += 1
            return [SendMessage(peer, KVRefused(instance=self.instance, reason=str(refusal)))]
        except ValueError as error:
            self.counters.refused_peers += 1
            return [SendMessage(peer, KVRefused(instance=self.instance, reason=f"decode is {error}"))]
        columns = feature_columns(self.layout.wire, common)
        before = self._peers.get(peer)
        if before is not None and before.instance == hello.instance:
            self._heard(before, now)
        self._peers[peer] = _Greeted(
            now, hello.instance, layout.receiver, layout, transports, cipher, columns, self._is_near(hello)
        )
        self._max_rank = max(self._max_rank, layout.receiver.rank)
        self._peers.move_to_end(peer)
        while len(self._peers) > self._max_peers:
            self._peers.popitem(last=False)
        for known in self._open_parts():
            if known.peer_instance == hello.instance and known.shard == layout.receiver:
                known.peer = peer  # reminders of finished rooms go to the new connection
        welcome = KVWelcome(
            instance=self.instance,
            layout=common,
            transport=transports[0],
            cipher=cipher,
            num_ranks=self.shard.num_ranks,
            rank=self.shard.rank,
            rank_endpoints=self.rank_endpoints,
        )
        return [SendMessage(peer, welcome)]

    def _shard_of(self, hello: KVHello) -> Shard:
        """Raises ValueError for a rank that does not exist, HandshakeRefused for a peer without ranks."""
        if hello.num_ranks == 0 and self.shard.num_ranks > 1:
            raise HandshakeRefused(
                f"prefill has {self.shard.num_ranks} tensor-parallel ranks, and decode's release knows of no "
                "ranks: run the same release on every host"
            )
        return Shard(hello.rank, max(1, hello.num_ranks))

    def _is_near(self, hello: KVHello) -> bool:
        """Whether the peer runs on this host, as far as both hosts have an identity."""
        return hello.host == self._host != ""

    def _attach(self, peer: Peer, greeted: _Greeted, attach: Attach, now: float) -> list[Effect]:
        parts = self._rooms.get(attach.room, {})
        known = next(iter(parts.values()), None)
        if known is None or known.offer.epoch < attach.epoch:
            return self._keep_early(peer, greeted.shard, attach, now)
        if known.offer.epoch > attach.epoch:
            self.counters.stale_epoch += 1
            return [self._abort(peer, attach.room, attach.epoch, "a newer attempt is open")]
        effects: list[Effect] = []
        if known.shard is None:
            effects += self._deal(parts, known, greeted.shard.num_ranks, now)
        known = parts.get(greeted.shard.rank)
        if any(part.peer_instance not in ("", attach.instance) for part in parts.values()):
            self.counters.stale_instance += 1
            reason = "another decode worker is attached"
            return [*effects, self._abort(peer, attach.room, attach.epoch, reason)]
        if known is None or known.shard != greeted.shard or not known.is_open:
            self.counters.unexpected += 1
            shard = greeted.shard
            reason = f"rank {shard.rank} of decode's {shard.num_ranks} has nothing to pull here"
            return [*effects, self._abort(peer, attach.room, attach.epoch, reason)]
        try:
            stream = greeted.layout.stream(known.offer.num_tokens, attach.have)
        except LocalProtocolError as error:
            self.counters.unexpected += 1
            return [self._abort(peer, attach.room, attach.epoch, str(error))]
        if greeted.layout.has_features and attach.have < known.offer.bare_tokens:
            self.counters.unexpected += 1
            reason = f"tokens [{attach.have}, {known.offer.bare_tokens}) have no features here"
            abort = self._abort(peer, attach.room, attach.epoch, reason)
            return [*effects, abort, *self._drop(known, reason, now)]
        is_sealed = greeted.cipher == AES_128_GCM
        if known.stream != stream or (known.sealer is not None) != is_sealed:
            known.num_pulled = 0
            known.lease.renew(now)
            known.sealer = Sealer(self._random_bytes(KEY_BYTES)) if is_sealed else None
        known.peer, known.peer_instance, known.stream = peer, attach.instance, stream
        known.pages = self._pages_of(known.offer, stream)
        known.columns, known.is_near = greeted.columns, greeted.is_near
        known.move(SenderState.ATTACHED)
        return [*effects, self._announce(known, now), *self._early_run(known, is_late=True)]

    def _pages_of(self, offer: Offer, stream: RoomStream) -> tuple[int, ...]:
        """The pages of `stream`, then its window pages, of those that were offered."""
        have, count = (
            stream.have // self.layout.wire.page_size,
            -(-offer.num_tokens // self.layout.wire.page_size),
        )
        first = count + have + stream.window_first - self.layout.tail_of(offer.num_tokens)
        return offer.pages[have:count] + (offer.pages[first:] if stream.num_window_pages else ())

    def _deal(
        self, parts: dict[int, SenderRoom], room: SenderRoom, num_ranks: int, now: float
    ) -> list[Effect]:
        """Makes the parts of a room, now that the number of decode's ranks is known."""
        ranks = receivers_of(self.layout.wire.num_kv_heads, self.shard, num_ranks)
        if ranks:  # a rank whose KV heads decode takes from others keeps the whole room until it is released
            dealt = [
                replace(room, shard=Shard(rank, num_ranks), lease=Lease(self._lease_s, now)) for rank in ranks
            ]
            parts.clear()
            parts.update(zip(ranks, dealt, strict=True))
        if self.shard.num_ranks == 1:
            return []
        return [Notify(Attached(room=room.offer.room, epoch=room.offer.epoch, num_ranks=num_ranks))]

    def _keep_early(self, peer: Peer, shard: Shard, attach: Attach, now: float) -> list[Effect]:
        stone = self._tombstones.find(attach.room, attach.epoch)
        if stone is not None:
            return [self._abort(peer, attach.room, attach.epoch, f"the room is closed: {stone.reason}")]
        key = attach.room, shard.rank
        old = self._early.get(key)
        if old is not None and old.attach.epoch > attach.epoch:
            self.counters.stale_epoch += 1
            return [self._abort(peer, attach.room, attach.epoch, "a newer attempt is attached")]
        is_same = old is not None and old.attach.epoch == attach.epoch
        expires_at = old.expires_at if old is not None and is_same else now + self._early_s
        if not is_same:
            self._early.pop(key, None)
        self._early[key] = _Early(peer, attach, expires_at)
        alive = Announce(room=attach.room, epoch=attach.epoch, instance=self.instance, tokens_ready=0)
        effects: list[Effect] = [SendMessage(peer, alive)]
        if len(self._early) > self._max_early:
            effects.append(self._evict_early(next(iter(self._early))))
        return effects

    def _evict_early(self, key: tuple[str, int]) -> Effect:
        early = self._early.pop(key)
        return self._abort(early.peer, key[0], early.attach.epoch, "prefill got no such request")

    def _answer_stranger(
        self, peer: Peer, greeted: _Greeted, message: Pull | Release | Abort, known: SenderRoom | None
    ) -> list[Effect]:
        """Answers a message about a room that this peer has not attached."""
        key = message.room, greeted.shard.rank
        early = self._early.get(key)
        if isinstance(message, Abort) and early is not None and early.attach.epoch <= message.epoch:
            del self._early[key]
            return []
        if known is None:
            self.counters.unknown_room += 1
        elif known.offer.epoch != message.epoch:
            self.counters.stale_epoch += 1
        else:
            self.counters.stale_instance += 1
        if not isinstance(message, Pull):
            return []
        if known is not None and known.offer.epoch == message.epoch and known.state is SenderState.OFFERED:
            return []  # its Attach was lost; the peer repeats it
        return [self._abort(peer, message.room, message.epoch, "the room is not open here")]

    def _pull(self, known: SenderRoom, pull: Pull, now: float) -> list[Effect]:
        stream = known.stream
        assert stream is not None, "an attached room has a stream"
        if pull.block + pull.count > stream.ready_blocks(known.tokens_ready):
            self.counters.unexpected += 1
            return []
        for other in self._open_parts():
            if (other.peer_instance, other.shard) == (known.peer_instance, known.shard):
                other.lease.renew(now)  # decode pulls its oldest room first; the other rooms wait
        known.quiet_since = now
        known.num_pulled = max(known.num_pulled, pull.block + pull.count)
        return [self._block(known, stream, pull.block, pull.count)]

    def _early_run(self, known: SenderRoom, *, is_late: bool) -> list[Effect]:
        """The blocks that the launched forward completes."""
        stream = known.stream
        if known.underway is None or stream is None or known.sealer is not None:
            return []
        start, tokens = known.underway
        first = max(stream.ready_blocks(start), known.num_pulled)
        count = stream.ready_blocks(tokens) - first
        return [FillEarly(self._block(known, stream, first, count), is_late)] if count > 0 else []

    def _block(self, known: SenderRoom, stream: RoomStream, block: int, count: int) -> SendBlock:
        return SendBlock(
            peer=known.peer,
            room=known.offer.room,
            epoch=known.offer.epoch,
            block=block,
            count=count,
            size=stream.block_size(block, count),
            stream=stream,
            pages=known.pages,
            sealer=known.sealer,
            columns=known.columns,
        )

    def _announce(self, known: SenderRoom, now: float) -> SendMessage:
        known.quiet_since = now
        return SendMessage(
            known.peer,
            Announce(
                room=known.offer.room,
                epoch=known.offer.epoch,
                instance=self.instance,
                tokens_ready=known.tokens_ready,
                final=known.is_final,
                first_token=known.first_token or 0,
                key=known.sealer.key if known.sealer is not None else b"",
                ready_at=known.ready_at if known.is_near else 0.0,
            ),
        )

    def _drop(self, known: SenderRoom, reason: str, now: float) -> list[Effect]:
        """Ends all parts of a room."""
        offer = known.offer
        effects = self._end(offer.room, reason, now)
        return [*effects, Notify(Dropped(room=offer.room, epoch=offer.epoch, reason=reason))]

    def _end(self, room: str, reason: str, now: float) -> list[Effect]:
        """Ends all parts of a room without an event; the Aborts as effects."""
        effects: list[Effect] = []
        parts = self._rooms.pop(room)
        for part in parts.values():
            if part.is_open:
                effects += self._abort_peer(part, reason)
                part.move(SenderState.DROPPED)
        self._bury(next(iter(parts.values())).offer, reason, now, is_success=False)
        return effects

    def _release_part(self, known: SenderRoom, now: float) -> list[Effect]:
        """Decode's rank holds all of its part. The room is released with its last part."""
        known.move(SenderState.RELEASED)
        offer = known.offer
        if any(part.is_open for part in self._rooms[offer.room].values()):
            return []
        del self._rooms[offer.room]
        self._bury(offer, "released", now, is_success=True)
        return [Notify(Released(room=offer.room, epoch=offer.epoch))]

    def _abort_peer(self, known: SenderRoom, reason: str) -> list[Effect]:
        return [self._abort(known.peer, known.offer.room, known.offer.epoch, reason)] if known.peer else []

    def _abort(self, peer: Peer, room: str, epoch: int, reason: str) -> SendMessage:
        return SendMessage(
            peer, Abort(room=room, epoch=epoch, instance=self.instance, reason=reason[:MAX_REASON])
        )

    def _bury(self, offer: Offer, reason: str, now: float, *, is_success: bool) -> None:
        self._tombstones.bury(offer.room, offer.epoch, is_success=is_success, reason=reason, now=now)


def _may_speak(known: SenderRoom, message: Pull | Release | Abort) -> bool:
    """Whether the process may send this message.

    Only the attached process may, but any may Abort before the first Attach.
    """
    return known.peer_instance == message.instance or (
        known.peer_instance == "" and isinstance(message, Abort)
    )
