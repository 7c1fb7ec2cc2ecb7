"""Messages about shared memory, on the KV plane: only between peers that agreed on the transport "shm"."""

from typing import Annotated

from msgspec import Meta

from .message_parts import Count, Id, Message, Small, Text

NumSlots = Annotated[int, Meta(ge=1, le=4096)]
SlotBytes = Annotated[int, Meta(ge=4096, le=64 << 20)]


class SlabRequest(Message, frozen=True, kw_only=True):
    """Decode listens at the abstract unix address `address` of this host, where prefill may hand over a
    slab."""

    instance: Id
    address: Id
    token: Id  # sent with the slab's descriptor to identify this hand-over
    num_slots: NumSlots  # number of slots that decode asks for: its pulls in flight, and some more
    slot_bytes: SlotBytes  # the block size of the common layout


class SlabGrant(Message, frozen=True, kw_only=True):
    """Prefill has handed over the descriptor of slab `slab`, of `num_slots` slots of `slot_bytes` bytes."""

    instance: Id
    token: Id  # token of the request
    slab: Id
    num_slots: NumSlots
    slot_bytes: SlotBytes


class SlabDenied(Message, frozen=True, kw_only=True):
    """This pair has no slab, or has lost it. Its blocks are sent as messages."""

    instance: Id
    token: Id  # token of the request
    reason: Text


class SlabBlock(Message, frozen=True, kw_only=True):
    """A block in slot `slot` of the pair's slab, in place of Block and its bytes."""

    room: Id
    epoch: Count
    instance: Id
    block: Count
    size: Count
    digest: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    slab: Id
    slot: Small
    lease_ms: Count  # the slot is not reused for this long, unless the room ends earlier


class SlotFree(Message, frozen=True, kw_only=True):
    """Decode is done with the block in slot `slot`, whether the block was valid or not."""

    room: Id
    epoch: Count
    instance: Id
    block: Count
    slab: Id
    slot: Small


class SlabUnusable(Message, frozen=True, kw_only=True):
    """Decode cannot read slab `slab`, so the blocks of this pair must be sent as messages."""

    instance: Id
    slab: Id
    reason: Text


SlabUp = SlabRequest | SlotFree | SlabUnusable
SlabDown = SlabGrant | SlabDenied
