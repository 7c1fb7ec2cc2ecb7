"""Messages about slabs, on the KV plane: only between peers that agreed on "shm", "cuda_slab" or "nixl".

With "shm" the slab is shared memory of the host, whose descriptor crosses a unix socket. With "cuda_slab" it
is memory of prefill's device, whose handle is in the SlabGrant; the same unix socket then crosses only the
token, and later frames of the KV plane if both ends read them (`has_wire`). Its two ends are open as long as
the slab is used. With "nixl" the slab is memory of prefill's host, which decode reads through an agent of
NIXL: no socket is used, and the SlabGrant carries what that agent must know.
"""

from typing import Annotated

from msgspec import Meta

from .message_parts import Address, AgentBytes, Count, Id, KeyBytes, Message, ShortText, Small, Text

NumSlots = Annotated[int, Meta(ge=1, le=4096)]
SlotBytes = Annotated[int, Meta(ge=4096, le=64 << 20)]


MAX_PLANNED = 8  # runs of one plan
RunLength = Annotated[int, Meta(ge=1, le=1 << 14)]  # blocks that share a pull and a slot


class SlabRequest(Message, frozen=True, kw_only=True):
    """Decode listens at the abstract unix address `address` of this host, where prefill may hand over a slab.

    With "nixl" nobody listens there.
    """

    instance: Id
    address: Id
    token: Id  # sent with the slab's descriptor to identify this hand-over
    num_slots: NumSlots  # number of slots that decode asks for: its pulls in flight, and some more
    early_slots: Small = 0  # those of them for runs that prefill sends before decode has pulled them
    slot_bytes: SlotBytes  # "shm": the block size of the common layout; "cuda_slab": a multiple of it
    transport: ShortText = "shm"
    has_wire: bool = False  # decode reads frames from the connection of the hand-over
    hears_soon: bool = False  # decode knows SlabSoon
    hears_plan: bool = False  # and SlabPlan


class SlabGrant(Message, frozen=True, kw_only=True):
    """Prefill has handed over slab `slab`, of `num_slots` slots of `slot_bytes` bytes.

    `handle` opens device memory: whoever has it may read and write the whole slab. With "nixl", `agent` is
    the name of prefill's agent, `metadata` opens this slab to decode's, and `base` is the address of slot 0
    on prefill; slot i lies `slot_bytes` * i bytes behind it.
    """

    instance: Id
    token: Id  # token of the request
    slab: Id
    num_slots: NumSlots
    slot_bytes: SlotBytes
    handle: KeyBytes = b""
    has_wire: bool = False  # so does prefill
    agent: ShortText = ""
    metadata: AgentBytes = b""
    base: Address = 0

    def __repr__(self) -> str:
        """Omits the handle and the metadata, which must not be logged."""
        size = f"{self.num_slots} x {self.slot_bytes}"
        return f"SlabGrant({self.slab} from {self.instance}, {size})"


class SlabDenied(Message, frozen=True, kw_only=True):
    """This pair has no slab, or has lost it. Its blocks are sent as messages."""

    instance: Id
    token: Id  # token of the request
    reason: Text


class SlabBlock(Message, frozen=True, kw_only=True):
    """The blocks [block, block + count) in slot `slot` of the pair's slab, in place of their bytes.

    `digest` is that of `kernels.move_spans` in device memory, else crc32c.
    """

    room: Id
    epoch: Count
    instance: Id
    block: Count
    size: Count
    digest: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    slab: Id
    slot: Small
    lease_ms: Count  # the slot is not reused for this long, unless the room ends earlier
    count: RunLength = 1


class SlabPlan(Message, frozen=True, kw_only=True):
    """The runs of a room that follow its last forward, which is under way: decode may prepare to move them.

    The SlabBlock of each run follows when its slot is filled. Here the digests are 0.
    """

    blocks: Annotated[list[SlabBlock], Meta(min_length=1, max_length=MAX_PLANNED)]


class SlabSoon(Message, frozen=True, kw_only=True):
    """The first SlabBlock of a room follows within a fraction of a millisecond, over the slab's connection.

    It spares decode the time in which a sleeping processor wakes up.
    """

    room: Id
    epoch: Count
    instance: Id


class SlotFree(Message, frozen=True, kw_only=True):
    """Decode is done with slot `slot`, whose first block is `block`, whether the blocks were valid or not."""

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
