"""Decode's side of the hand-off, without I/O: commands and messages in, effects out.

1. `pull` opens a room. The first pull from an endpoint greets the peer and settles the layout. A
   tensor-parallel prefill worker answers with the addresses of its ranks; the room is then pulled in parts,
   from the ranks that hold KV heads of this one.
2. Attach asks for announcements.
3. Announced blocks are pulled; see `peer_link`.
4. The shell checks each block: `expect` gives its place, then `landed` or `corrupt` reports the result.
5. When every block is in place and the first token is known, Release ends the room, or its part. A room is
   complete when all parts are, and lost with the first part that is.

A lease ends a room that makes no progress.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from ...cluster.errors import HandshakeRefused, LocalProtocolError, RemoteProtocolError
from ...cluster.net.transport_names import ZMQ_BLOCKS
from ...cluster.protocol.kv_messages import PairDown
from ...cluster.protocol.messages import (
    PROTOCOL_MAJOR,
    Abort,
    Announce,
    Block,
    KVHello,
    KVRefused,
    KVWelcome,
    Layout,
    Pull,
    Release,
)
from ...cluster.protocol.slab_messages import SlabBlock, SlabSoon
from ...cluster.security.ciphers import CRC32C
from ..transport import Complete, Landed, Lost, PullRequest
from .layout import KVLayout, RoomStream, Segment
from .peer_link import PeerLink
from .rank_pairs import WHOLE, Shard
from .session import (
    LEASE_S,
    MAX_REPULLS,
    SILENCE_S,
    WINDOW,
    CloseLink,
    Effect,
    Lease,
    Notify,
    Peer,
    ReceiverRoom,
    ReceiverState,
    SendMessage,
    Tombstones,
    TransferCounters,
    check_request,
)

IDLE_LINK_S = 30.0
MAX_ANNOUNCING_S = 60.0  # an older time of prefill is one of another clock
MAX_REASON = 1024

AnyBlock = Block | SlabBlock


def count_of(block: AnyBlock) -> int:
    """The number of blocks that a header stands for."""
    return block.count if isinstance(block, SlabBlock) else 1


class ReceiverSession:
    """All rooms and peers of one decode worker."""

    def __init__(
        self,
        instance: str,
        layout: Layout,
        *,
        ciphers: Sequence[str] = (CRC32C,),
        window: int = WINDOW,
        lease_s: float = LEASE_S,
        silence_s: float = SILENCE_S,
        idle_link_s: float = IDLE_LINK_S,
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        host: str = "",
        shard: Shard = WHOLE,
    ) -> None:
        """`host`: the identity of this host, "" if unknown. `shard`: this rank of the worker, whose ranks
        share `instance`.
        """
        self.instance = instance
        self.layout = KVLayout.of_rank(layout, shard)
        self.counters = TransferCounters()
        self._window = window
        self._lease_s = lease_s
        self._silence_s = silence_s
        self._idle_link_s = idle_link_s
        self._links: dict[Peer, PeerLink] = {}
        self._rooms: dict[str, dict[Peer, ReceiverRoom]] = {}  # the parts of each open room, by endpoint
        self._tombstones = Tombstones()
        # Nothing is due before; None: it has to be found. Whatever happens to a room puts its times off, and
        # only a new one brings earlier ones.
        self._due_at: float | None = None
        self._hello = KVHello(
            instance=instance,
            protocol=PROTOCOL_MAJOR,
            layout=layout,
            ciphers=tuple(ciphers),
            transports=tuple(transports),
            host=host,
            num_ranks=shard.num_ranks,
            rank=shard.rank,
        )

    def __repr__(self) -> str:
        return f"ReceiverSession(rooms={len(self._rooms)}, peers={len(self._links)})"

    @property
    def num_rooms(self) -> int:
        """Open rooms."""
        return len(self._rooms)

    def parts_of(self, room: str) -> list[ReceiverRoom]:
        """The parts of an open room."""
        return list(self._rooms.get(room, {}).values())

    def link_of(self, peer: Peer) -> PeerLink | None:
        """The link to the prefill worker at an endpoint; None when there is none."""
        return self._links.get(peer)

    # --- commands -------------------------------------------------------------------------------------------

    def pull(self, request: PullRequest, now: float) -> list[Effect]:
        """Opens a room. A newer attempt replaces an older one, which is Lost.

        Raises LocalProtocolError if pages or features do not fit the tokens, or the attempt was pulled
        before.
        """
        check_request(self.layout, request)
        effects: list[Effect] = []
        for old in self.parts_of(request.room)[:1]:
            if old.request.epoch >= request.epoch:
                raise LocalProtocolError(f"room {request.room} is open at epoch {old.request.epoch}")
            effects += self._lose(old, "TransferError", "a newer attempt was asked for", now)
        self._rooms[request.room] = {}
        return [*effects, *self._open(request, request.endpoint, None, now)]

    def release(self, room: str, epoch: int, reason: str, now: float) -> list[Effect]:
        """Ends an attempt without an event."""
        parts = self.parts_of(room)
        if not parts or parts[0].request.epoch > epoch:
            return []
        effects = self._end(parts[0], reason, now)
        for part in parts:
            effects += self._links[part.peer].fill(now) if part.peer in self._links else []
        return effects

    def close(self, now: float) -> list[Effect]:
        """Ends all rooms and links; returns the Aborts as effects."""
        effects: list[Effect] = []
        for parts in list(self._rooms.values()):
            effects += self._end(next(iter(parts.values())), "decode stops", now)
        self._links.clear()
        return effects

    # --- events of the network and the clock ----------------------------------------------------------------

    def receive(self, peer: Peer, message: PairDown, now: float) -> list[Effect]:
        """Handles one message of `peer`. Blocks go through `expect` instead."""
        link = self._links.get(peer)
        if link is None:
            self.counters.unexpected += 1
            return []
        link.heard(now)
        if isinstance(message, KVWelcome):
            return self._welcome(link, message, now)
        if isinstance(message, KVRefused):
            self.counters.refused_peers += 1
            link.instance, link.layout = "", None
            return self._lose_all(link, "HandshakeRefused", message.reason, now)
        room = link.rooms.get(message.room)
        if room is None or room.request.epoch != message.epoch:
            return self._answer_stranger(link, message, room)
        if room.request.peer_instance != message.instance:
            self.counters.stale_instance += 1
            return self._lose(room, "PeerLost", "prefill restarted", now)
        if isinstance(message, Abort):
            reason = message.reason[:MAX_REASON] or "aborted by prefill"
            return self._lose(room, "HandoffAborted", reason, now, is_told=True)
        return self._announced(link, room, message, now)

    def expect(self, peer: Peer, block: AnyBlock, size: int) -> tuple[Segment, ...] | None:
        """The segments for a block of `size` payload bytes; None if the block must be dropped."""
        stream = self.expect_run(peer, block, size)
        return None if stream is None or count_of(block) != 1 else stream.segments(block.block)

    def expect_run(self, peer: Peer, block: AnyBlock, size: int) -> RoomStream | None:
        """The stream of a run of blocks with `size` payload bytes; None if the run must be dropped."""
        count = count_of(block)
        link = self._links.get(peer)
        room = link.rooms.get(block.room) if link is not None else None
        if room is None or room.stream is None:
            self.counters.unknown_room += 1
        elif room.request.epoch != block.epoch:
            self.counters.stale_epoch += 1
        elif room.request.peer_instance != block.instance:
            self.counters.stale_instance += 1
        elif room.is_landed(block.block):
            self.counters.duplicate_blocks += 1
        elif room.are_in_flight(block.block, count) and (
            size == block.size == room.stream.block_size(block.block, count)
        ):
            return room.stream
        else:
            self.counters.unexpected += 1
        return None

    def came_unasked(self, peer: Peer, block: SlabBlock, now: float) -> None:
        """Counts a run of blocks that were not pulled so far as pulled, if it fits.

        Prefill fills slots for early runs behind the prompt's last forward, and sends them when it ends.
        """
        link, room = self._links.get(peer), self.attached_room(peer, block)
        if link is None or room is None or room.stream is None:
            return
        end = block.block + block.count
        is_new = block.block >= room.next_block and end <= room.stream.num_blocks
        if is_new and room.unasked.isdisjoint(range(block.block, end)):
            room.came_unasked(block.block, block.count, now)
            link.may_pull(room)

    def comes_soon(self, peer: Peer, message: SlabSoon) -> bool:
        """Whether to wait for the first early run of a room. A room's attempt is waited for once."""
        room = self.attached_room(peer, message)
        if room is None or room.is_awaited:
            return False
        room.is_awaited = True
        return True

    def attached_room(self, peer: Peer, message: SlabBlock | SlabSoon) -> ReceiverRoom | None:
        """The room of an unasked message, if it is of the room's attempt and process, and its layout is
        known.
        """
        link = self._links.get(peer)
        room = link.rooms.get(message.room) if link is not None else None
        if room is None or room.stream is None:
            return None
        request = room.request
        is_same = (request.epoch, request.peer_instance) == (message.epoch, message.instance)
        return room if is_same else None

    def landed(
        self, peer: Peer, block: AnyBlock, now: float, *, is_device: bool = False, is_nixl: bool = False
    ) -> list[Effect]:
        """Records that blocks accepted by `expect` or `expect_run` were checked and are in their pages."""
        link = self._links[peer]
        room = link.rooms[block.room]
        stream = room.stream
        assert stream is not None
        link.heard(now)
        before = self._landed_tokens(block.room)
        count = count_of(block)
        room.land(block.block, count)
        if isinstance(block, SlabBlock) and not is_device and not is_nixl:
            room.num_shm_blocks += count
        room.num_device_blocks += count if is_device else 0
        room.num_nixl_blocks += count if is_nixl else 0
        room.heard_at = link.progressed_at = now
        room.lease.renew(now)
        self.counters.blocks += count
        self.counters.bytes += block.size
        effects: list[Effect] = []
        tokens = self._landed_tokens(block.room)
        if tokens > before:
            effects.append(Notify(Landed(room=block.room, epoch=block.epoch, tokens=tokens)))
        return [*effects, *self._finish_if_complete(room, now), *link.fill(now)]

    def corrupt(self, peer: Peer, block: AnyBlock, now: float) -> list[Effect]:
        """Records that blocks accepted by `expect` or `expect_run` do not match their digest.

        They are pulled again, or the room ends.
        """
        self.counters.digest_mismatches += 1
        link = self._links[peer]
        room = link.rooms[block.room]
        if room.in_flight[block.block].num_repulls < MAX_REPULLS:
            self.counters.repulls += 1
            return [link.repull(room, block.block, now, count_of(block))]
        times = MAX_REPULLS + 1
        reason = f"block {block.block} was pulled {times} times and its last digest is wrong"
        return self._lose(room, "DigestMismatch", reason, now)

    def link_lost(self, peer: Peer, now: float) -> list[Effect]:
        """Handles a broken connection.

        Messages in flight are lost, and the next process to answer must greet again.
        """
        link = self._links.get(peer)
        if link is None or (not link.rooms and now >= link.idle_since + self._lease_s):
            return []  # an idle link greets again for a lease, because its last Release may be lost
        rooms = [room for room in link.rooms.values() if room.state is not ReceiverState.GREETING]
        self.counters.repulls += link.num_in_flight
        return [link.hello(now), *(question for room in rooms for question in link.ask_anew(room, now))]

    def tick(self, now: float) -> list[Effect]:
        """Ends overdue rooms and links, and repeats requests that got no answer."""
        effects: list[Effect] = []
        due_at = self.next_deadline()
        is_due = due_at is not None and now >= due_at
        for link in list(self._links.values()):
            effects += self._tick_link(link, now) if is_due else link.fill(now)
        if is_due:
            self._due_at = None
        self._tombstones.sweep(now)
        return effects

    def next_deadline(self) -> float | None:
        """Monotonic time before which no `tick` has work; None without rooms and links."""
        if self._due_at is None:
            self._due_at = self._earliest()
        return None if self._due_at == math.inf else self._due_at

    def _earliest(self) -> float:
        times = [math.inf]
        for link in self._links.values():
            for room in link.rooms.values():
                times += (link.lease_end(room, self._lease_s), link.ask_at(room))
            if link.rooms:
                times += [link.probe_at] if link.gone_at is None else [link.probe_at, link.gone_at]
            else:
                times.append(link.ends_at(self._idle_link_s, self._lease_s))
        return min(times)

    # --- parts ----------------------------------------------------------------------------------------------

    def _landed_tokens(self, room: str) -> int:
        """The token t: prompt tokens [have, t) are in place in all parts of an open room."""
        return min(part.landed_tokens for part in self._rooms[room].values())

    def _open(self, request: PullRequest, peer: Peer, rank: int | None, now: float) -> list[Effect]:
        """Opens a part of a room, to be pulled from `peer`; `rank` as in `ReceiverRoom`."""
        effects: list[Effect] = []
        link = self._links.get(peer)
        if link is None:
            link = PeerLink(peer, self._hello, window=self._window, silence_s=self._silence_s, now=now)
            self._links[peer] = link
            effects.append(link.hello(now))
        elif not link.rooms:
            link.heard(now)  # an idle link is not silent
        self._due_at = None
        room = ReceiverRoom(request, Lease(self._lease_s, now), peer, rank, heard_at=now)
        self._rooms[request.room][peer] = room
        link.add(room)
        if link.layout is not None:
            if link.instance == request.peer_instance:
                effects += self._start(link, room, now)
            else:
                effects.append(link.hello(now))  # a new process may own the endpoint
        return effects

    def _welcome(self, link: PeerLink, welcome: KVWelcome, now: float) -> list[Effect]:
        try:
            link.welcome(self.layout, welcome)
        except HandshakeRefused as refusal:
            self.counters.refused_peers += 1
            return self._lose_all(link, "HandshakeRefused", str(refusal), now)
        effects: list[Effect] = []
        for room in list(link.rooms.values()):
            if room.request.room not in link.rooms:
                continue  # ended with a part of another link
            if room.request.peer_instance != welcome.instance:
                self.counters.stale_instance += 1
                effects += self._lose(room, "PeerLost", "another prefill process answers", now, is_told=True)
            elif room.state is ReceiverState.GREETING:
                effects += self._start(link, room, now)
        return effects

    def _start(self, link: PeerLink, room: ReceiverRoom, now: float) -> list[Effect]:
        """Attaches a part to its rank of prefill. Rank 0 says which other ranks have parts of the room."""
        assert link.layout is not None
        sender, request = link.layout.sender, room.request
        if sender.rank != (room.rank or 0):
            reason = f"rank {sender.rank} of prefill answers in the place of rank {room.rank or 0}"
            return self._lose(room, "RemoteProtocolError", reason, now, is_told=True)
        sources = [sender.rank]
        if room.rank is None:
            room.rank, sources = 0, list(link.sources)
        effects: list[Effect] = []
        for rank in sources:
            if rank == sender.rank or request.room not in self._rooms:
                continue
            peer = link.rank_endpoints[rank]
            if peer in self._rooms[request.room]:
                reason = "two ranks of prefill have one address"
                return [*effects, *self._lose(room, "RemoteProtocolError", reason, now)]
            effects += self._open(request, peer, rank, now)
        if request.room not in link.rooms:
            return effects  # another part was lost at once
        if sender.rank not in sources:  # it only knew the way
            del self._rooms[request.room][link.endpoint]
            link.remove(room, now)
            return effects
        room.stream = link.layout.stream(request.num_tokens, request.have)
        room.move(ReceiverState.ATTACHING)
        return [link.attach(room, now), *effects]

    def _announced(self, link: PeerLink, room: ReceiverRoom, announce: Announce, now: float) -> list[Effect]:
        total = room.request.num_tokens
        if announce.tokens_ready > total or (announce.final and announce.tokens_ready != total):
            reason = f"prefill announced {announce.tokens_ready} of {total} tokens, final={announce.final}"
            return self._lose(room, "RemoteProtocolError", reason, now)
        if room.state is ReceiverState.GREETING:
            self.counters.unexpected += 1
            return []
        try:
            link.take_key(room, announce)
        except RemoteProtocolError as error:
            return self._lose(room, "RemoteProtocolError", str(error), now)
        if room.state is ReceiverState.ATTACHING:
            room.move(ReceiverState.PULLING)
        is_news = announce.tokens_ready > room.tokens_ready or (announce.final and room.first_token is None)
        if is_news and room.announced_at is None:
            room.announced_at = now
        if is_news:
            room.ready_at = _ready_at(room, announce, now)
        room.tokens_ready = max(room.tokens_ready, announce.tokens_ready)
        if announce.final:
            room.first_token = announce.first_token
        if is_news or not room.in_flight:
            room.lease.renew(now)  # with nothing to pull, an answering peer counts as progress
            room.heard_at = now  # a reminder must not postpone repeats of overdue blocks
        link.may_pull(room)
        return [*self._finish_if_complete(room, now), *link.fill(now)]

    def _answer_stranger(
        self, link: PeerLink, message: Announce | Abort, room: ReceiverRoom | None
    ) -> list[Effect]:
        """Answers a message about an attempt that is not open here: prefill need not keep the attempt."""
        if room is not None:
            self.counters.stale_epoch += 1
        else:
            self.counters.unknown_room += 1
        if isinstance(message, Abort):
            return []
        stone = self._tombstones.find(message.room, message.epoch)
        part = self._rooms.get(message.room, {}).get(link.endpoint)
        is_part_complete = part is not None and (part.request.epoch, part.state) == (
            message.epoch,
            ReceiverState.COMPLETE,
        )
        if is_part_complete or (stone is not None and stone.is_success and stone.epoch == message.epoch):
            release = Release(room=message.room, epoch=message.epoch, instance=self.instance)
            return [SendMessage(link.endpoint, release)]  # the first Release was lost
        reason = "the room is not open here"
        return [
            SendMessage(
                link.endpoint,
                Abort(room=message.room, epoch=message.epoch, instance=self.instance, reason=reason),
            )
        ]

    def _finish_if_complete(self, room: ReceiverRoom, now: float) -> list[Effect]:
        if not room.has_all or room.first_token is None or room.announced_at is None or room.ready_at is None:
            return []
        request, stream = room.request, room.stream
        assert stream is not None
        parts = self.parts_of(request.room)
        if any(part.complete and part.complete.first_token != room.first_token for part in parts):
            return self._lose(room, "RemoteProtocolError", "the ranks of prefill say other first tokens", now)
        room.complete = Complete(
            room=request.room,
            epoch=request.epoch,
            first_token=room.first_token,
            num_bytes=stream.total_bytes,
            num_blocks=stream.num_blocks,
            num_shm_blocks=room.num_shm_blocks,
            num_device_blocks=room.num_device_blocks,
            num_nixl_blocks=room.num_nixl_blocks,
            seconds=now - room.ready_at,
            pull_seconds=now - room.announced_at,
        )
        self._close(room, ReceiverState.COMPLETE, now)
        effects: list[Effect] = [
            SendMessage(room.peer, Release(room=request.room, epoch=request.epoch, instance=self.instance))
        ]
        done = [part.complete for part in parts if part.complete is not None]
        if len(done) == len(parts):
            del self._rooms[request.room]
            self._bury(request, "complete", now, is_success=True)
            effects.append(Notify(joined(done)))
        return effects

    def _tick_link(self, link: PeerLink, now: float) -> list[Effect]:
        effects: list[Effect] = []
        is_silent = bool(link.rooms) and now >= link.probe_at
        is_gone = link.gone_at is not None and now >= link.gone_at
        for room in list(link.rooms.values()):
            if room.request.room not in link.rooms:
                continue  # ended with a part of another link
            if is_gone:
                effects += self._lose(room, "PeerLost", "prefill does not answer", now)
            elif now >= link.lease_end(room, self._lease_s):
                reason = f"no progress for {self._lease_s:g} s in state {room.state.value}"
                effects += self._lose(room, "TransferTimeout", reason, now)
            elif now >= link.ask_at(room):
                is_silent = True
                questions = link.ask_again(room, now)
                self.counters.repulls += sum(isinstance(q.message, Pull) for q in questions)
                effects += questions
        if is_silent and not is_gone:
            effects.insert(0, link.hello(now))  # the answer also tells whether the process is still the same
        effects += link.fill(now)
        if not link.rooms and now >= link.ends_at(self._idle_link_s, self._lease_s):
            del self._links[link.endpoint]
            effects.append(CloseLink(link.endpoint))
        return effects

    def _lose_all(self, link: PeerLink, kind: str, reason: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for room in list(link.rooms.values()):
            if room.request.room in link.rooms:
                effects += self._lose(room, kind, reason[:MAX_REASON], now, is_told=True)
        return effects

    def _lose(
        self, room: ReceiverRoom, kind: str, reason: str, now: float, *, is_told: bool = False
    ) -> list[Effect]:
        """Ends a room as Lost, with all its parts; `is_told` when the peer of this part needs no Abort."""
        request = room.request
        effects = self._end(room, reason, now, is_told=is_told)
        return [*effects, Notify(Lost(room=request.room, epoch=request.epoch, kind=kind, reason=reason))]

    def _end(self, room: ReceiverRoom, reason: str, now: float, *, is_told: bool = False) -> list[Effect]:
        """Ends all parts of a room without an event; the Aborts as effects."""
        request = room.request
        effects: list[Effect] = []
        for part in self._rooms.pop(request.room).values():
            if part.state is not ReceiverState.COMPLETE:
                effects += [] if is_told and part is room else self._abort(part, reason)
                self._close(part, ReceiverState.LOST, now)
        self._bury(request, reason, now, is_success=False)
        return effects

    def _abort(self, room: ReceiverRoom, reason: str) -> list[Effect]:
        if room.state is ReceiverState.GREETING:
            return []
        request = room.request
        abort = Abort(
            room=request.room, epoch=request.epoch, instance=self.instance, reason=reason[:MAX_REASON]
        )
        return [SendMessage(room.peer, abort)]

    def _close(self, room: ReceiverRoom, state: ReceiverState, now: float) -> None:
        """Ends a part on its link."""
        room.move(state)
        self._links[room.peer].remove(room, now)

    def _bury(self, request: PullRequest, reason: str, now: float, *, is_success: bool) -> None:
        self._tombstones.bury(request.room, request.epoch, is_success=is_success, reason=reason, now=now)


def joined(parts: Sequence[Complete]) -> Complete:
    """The end of a room whose `parts` are complete: sums of bytes and blocks, and the longest times."""
    if len(parts) == 1:
        return parts[0]
    totals = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("num_bytes", "num_blocks", "num_shm_blocks", "num_device_blocks", "num_nixl_blocks")
    }
    return replace(
        parts[0],
        **totals,
        seconds=max(part.seconds for part in parts),
        pull_seconds=max(part.pull_seconds for part in parts),
    )


def _ready_at(room: ReceiverRoom, announce: Announce, now: float) -> float:
    """The time at which the announced tokens were ready, as far as decode can know.

    It is prefill's own if it shares this host's clock, else the time at which decode heard of them.
    """
    heard_at, room.unasked_at = now if room.unasked_at is None else room.unasked_at, None
    is_shared = max(0.0, heard_at - MAX_ANNOUNCING_S) < announce.ready_at <= heard_at
    return announce.ready_at if is_shared else heard_at
