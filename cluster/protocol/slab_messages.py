"""Messages about shared memory, on the KV plane: only between peers that agreed on the transport "shm"."""

from typing import Annotated

from msgspec import Meta

from .message_parts import Count, Id, Message, Small, Text

NumSlots = Annotated[int, Meta(ge=1, le=4096)]
SlotBytes = Annotated[int, Meta(ge=4096, le=64 << 20)]


class SlabRequest(Message, frozen=True, kw_only=True):
    """Decode listens at the abstract unix address `address` of this host: prefill may hand it a slab there."""

    instance: Id
    address: Id
    token: Id  # goes with the slab's descriptor, and so tells this hand-over from others
    num_slots: NumSlots  # that decode would like: what it asks for at once, and some
    slot_bytes: SlotBytes  # the block size of the common layout


class SlabGrant(Message, frozen=True, kw_only=True):
    """Prefill has handed over the descriptor of slab `slab`, of `num_slots` slots of `slot_bytes` bytes."""

    instance: Id
    token: Id  # of the request
    slab: Id
    num_slots: NumSlots
    slot_bytes: SlotBytes


class SlabDenied(Message, frozen=True, kw_only=True):
    """There is no slab for this pair, or no longer; its blocks go as messages."""

    instance: Id
    token: Id  # of the request
    reason: Text


class SlabBlock(Message, frozen=True, kw_only=True):
    """A block that stands in slot `slot` of the pair's slab, in place of Block and its bytes."""

    room: Id
    epoch: Count
    instance: Id
    block: Count
    size: Count
    digest: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    slab: Id
    slot: Small
    lease_ms: Count  # for so long the slot is not reused, unless the room ends before


class SlotFree(Message, frozen=True, kw_only=True):
    """Decode has copied the block out of slot `slot`, whatever came of it."""

    room: Id
    epoch: Count
    instance: Id
    block: Count
    slab: Id
    slot: Small


class SlabUnusable(Message, frozen=True, kw_only=True):
    """Decode cannot read slab `slab`: the blocks of this pair must go as messages."""

    instance: Id
    slab: Id
    reason: Text


SlabUp = SlabRequest | SlotFree | SlabUnusable
SlabDown = SlabGrant | SlabDenied
