"""The messages of the KV plane, which decode and prefill exchange about rooms and their blocks."""

from typing import Annotated

from msgspec import Meta, Struct

from .message_parts import (
    Count,
    Id,
    KeyBytes,
    Message,
    Port,
    RankNumber,
    ShortText,
    Small,
    Text,
    Ticket,
    TokenId,
)
from .slab_messages import RunLength, SlabBlock, SlabDown, SlabPlan, SlabSoon, SlabUp

BLOCK_BYTES = 1 << 20  # default block size, the unit of a pull
BLOCK_TOKENS, MAX_BLOCK_BYTES = 32, 4 << 20


def block_bytes_of(token_bytes: int) -> int:
    """The block size for KV of `token_bytes` bytes per token: the memory of `BLOCK_TOKENS` tokens, within
    bounds.

    Each block costs some messages and turns of both link threads, whatever its size. At 128 KiB per token, a
    block of 1 MiB holds only eight tokens, and the interpreter limits the hand-off. Blocks above 4 MiB gain
    little more and delay other rooms on a slow link.
    """
    return min(max(BLOCK_BYTES, BLOCK_TOKENS * token_bytes), MAX_BLOCK_BYTES)


class Layout(Struct, frozen=True, kw_only=True):
    """The layout of a token's KV in a worker's pool; `kvtransfer.protocol.layout.agree` finds the layout of a
    pair.

    Of the `num_layers` layers, `window_layers` have windows, of `window` tokens at most, and pages of their
    own; 0: all layers share their pages. Decode computes up to `window_margin` last rows of a
    prompt again, so the window of these is handed over as well; prefill's is the most that it keeps.

    Prefill's `feature_ids` are the layers that it offers. Decode's are the layers that its head reads, in the
    order of the head's input. The layout of a KVWelcome is the common one: it has decode's features and no
    `weights_hash`.
    """

    fingerprint: Text
    dtype: Text  # of keys and values: "float32", "bfloat16", "float16", "float8_e4m3fn"
    page_size: Annotated[int, Meta(ge=1, le=4096)]
    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_kv_heads: Annotated[int, Meta(ge=1, le=4096)]
    head_dim: Annotated[int, Meta(ge=1, le=4096)]
    # Layer outputs, in the order of a row: offered by prefill, wanted by decode; empty: no features.
    feature_ids: Annotated[list[Small], Meta(max_length=64)] = []
    feature_width: Small = 0  # feature elements per token over all layers: K*H
    block_bytes: Annotated[int, Meta(ge=4096, le=64 << 20)] = BLOCK_BYTES
    digest: Text = "crc32c"
    feature_dtype: Text = ""  # "": that of keys and values
    window_layers: Annotated[int, Meta(ge=0, le=4096)] = 0
    window: Small = 0
    window_margin: Small = 0
    weights_hash: Text = ""  # sha256 of every byte of the weights; "": not known yet


class KVHello(Message, frozen=True, kw_only=True):
    """Decode opens the link of a pair. Resent until answered.

    `ciphers` are the accepted protections of blocks, `transports` the accepted transports, see
    `cluster.net.transport_names`. `host` is the boot id of decode's host. The layout is that of all ranks;
    the sender of this message is rank `rank` of `num_ranks`.
    """

    instance: Id
    protocol: Small
    layout: Layout
    ciphers: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()  # none: "crc32c"
    transports: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()  # none: "zmq_blocks"
    host: ShortText = ""
    num_ranks: RankNumber = 0  # 0: a peer that knows of no ranks, and is one
    rank: RankNumber = 0


class KVWelcome(Message, frozen=True, kw_only=True):
    """Prefill agrees. `layout` is the common one, `transport` the best common one, and `cipher` protects
    every block.

    With a `bulk_ticket` blocks use a second connection to `bulk_port` of the same host (0: a path beside the
    ipc path). The ticket opens that connection once. The sender is rank `rank` of `num_ranks`; rank 0 names
    the addresses of all of them.
    """

    instance: Id
    layout: Layout
    cipher: Text = "crc32c"
    transport: Text = "zmq_blocks"
    bulk_port: Port = 0
    bulk_ticket: Ticket = ""
    num_ranks: RankNumber = 0  # 0: a peer that knows of no ranks, and is one
    rank: RankNumber = 0
    rank_endpoints: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()

    def __repr__(self) -> str:
        """Omits the ticket, which must not be logged."""
        return (
            f"KVWelcome({self.instance}, cipher={self.cipher!r}, bulk_port={self.bulk_port}, {self.layout})"
        )


class KVRefused(Message, frozen=True, kw_only=True):
    """Prefill does not agree. The reason shows both layouts."""

    instance: Id
    reason: Text


class Attach(Message, frozen=True, kw_only=True):
    """Decode asks for a room's announcements.

    Its first `have` prompt tokens need not be offered. Idempotent.
    """

    room: Id
    epoch: Count
    instance: Id
    have: Count


class Announce(Message, frozen=True, kw_only=True):
    """Prompt tokens [0, tokens_ready) have KV (and features); with `final` the prompt is complete and token 1
    is known.

    `key` opens the sealed blocks of this transfer only. It is empty when blocks are not sealed. `ready_at` is
    the monotonic time at which prefill knew that the tokens are computed; it goes to peers of the same host.
    """

    room: Id
    epoch: Count
    instance: Id
    tokens_ready: Count
    final: bool = False
    first_token: TokenId = 0  # meaningful with final
    key: KeyBytes = b""
    ready_at: float = 0.0

    def __repr__(self) -> str:
        """Omits the key, which must not be logged."""
        progress = f"{self.tokens_ready}{', final' if self.final else ''}"
        return f"Announce({self.room}.{self.epoch} from {self.instance}, tokens_ready={progress})"


class Pull(Message, frozen=True, kw_only=True):
    """Decode asks for the blocks [block, block + count) of the room's byte stream, counted from `have`.

    Only a pair with a slab in device memory asks for more than one.
    """

    room: Id
    epoch: Count
    instance: Id
    block: Count
    count: RunLength = 1


class Block(Message, frozen=True, kw_only=True):
    """The header of one block; its bytes follow as the next frame.

    The bytes of a sealed block are `size` of ciphertext and a tag, which stands for the digest. `attempt`
    counts how often the block was sealed for this transfer.
    """

    room: Id
    epoch: Count
    instance: Id
    block: Count
    size: Count
    digest: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    attempt: Small = 0


class Release(Message, frozen=True, kw_only=True):
    """Decode holds every block and its digest matched; prefill frees the room at once."""

    room: Id
    epoch: Count
    instance: Id


class Abort(Message, frozen=True, kw_only=True):
    """Either side gives the room up; idempotent."""

    room: Id
    epoch: Count
    instance: Id
    reason: Text = ""


PairUp = KVHello | Attach | Pull | Release | Abort
PairDown = KVWelcome | KVRefused | Announce | Abort

KVUp = PairUp | SlabUp
KVDown = PairDown | Block | SlabBlock | SlabPlan | SlabSoon | SlabDown
