"""Blocks that are sealed or digested and wait because their connection is full."""

from ...cluster.protocol.messages import Block
from ..memory.blocks import BlockReader, Payload
from ..protocol.layout import block_digest
from ..protocol.seal import BlockName
from ..protocol.session import Peer, SendBlock

Key = tuple[Peer, str, int, int]  # peer, room, epoch, block


def key_of(item: SendBlock) -> Key:
    """The identity of a block among all blocks that may be under way."""
    return item.peer, item.room, item.epoch, item.block


class PreparedBlocks:
    """Seals or digests each block once.

    Repeating it at every attempt would take CPU time that a busy peer needs.
    """

    def __init__(self, instance: str, fingerprint: str, reader: BlockReader) -> None:
        self._instance, self._fingerprint, self._reader = instance, fingerprint, reader
        self._blocks: dict[Key, tuple[SendBlock, Block, Payload]] = {}

    def __repr__(self) -> str:
        return f"PreparedBlocks({len(self._blocks)})"

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, item: SendBlock) -> bool:
        return key_of(item) in self._blocks

    def get(self, item: SendBlock) -> tuple[Block, Payload]:
        """The header and the bytes of a block, sealed or with a digest.

        Raises LocalProtocolError when the nonces of the block are used up.
        """
        known = self._blocks.get(key_of(item))
        if known is not None and known[0] is item:
            return known[1:]
        self.drop(key_of(item))
        layout = item.stream.layout
        payload = self._reader.read(item.segments, item.pages, item.size, item.columns, layout.sender_rows)
        digest = attempt = 0
        if item.sealer is None:
            digest = block_digest(
                item.room, item.epoch, item.block, payload.data, self._reader.crc, layout.name
            )
        else:
            name = BlockName(item.room, item.epoch, item.block, item.size, self._fingerprint + layout.name)
            payload, attempt = self._reader.seal(payload, item.sealer, name)
        header = Block(
            room=item.room,
            epoch=item.epoch,
            instance=self._instance,
            block=item.block,
            size=item.size,
            digest=digest,
            attempt=attempt,
        )
        self._blocks[key_of(item)] = item, header, payload
        return header, payload

    def sent(self, item: SendBlock) -> None:
        """Forgets a block whose bytes the transport has taken over."""
        self._blocks.pop(key_of(item), None)

    def drop(self, key: Key) -> None:
        """Recycles the bytes of a block that will not be sent."""
        known = self._blocks.pop(key, None)
        if known is not None and known[2].staging is not None:
            self._reader.recycle(known[2].staging)

    def drop_peer(self, peer: Peer) -> None:
        """Recycles all blocks of a peer that has gone."""
        for key in [key for key in self._blocks if key[0] == peer]:
            self.drop(key)
