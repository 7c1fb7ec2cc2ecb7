"""A pair that takes some feature layers gets blocks with those layers' bytes, over every transport."""

import msgspec
import numpy as np
import pytest
import torch
from baton.cluster.protocol.messages import Layout
from baton.kvtransfer.memory.blocks import BlockReader, Filling
from baton.kvtransfer.protocol.layout import KVLayout, agree, feature_columns
from baton.kvtransfer.transport import Planes
from crc32c import crc32c

WIDTH, PAGE_SIZE, NUM_TOKENS, PAGES = 40, 4, 19, (3, 1, 7, 2, 5)
OFFERED = Layout(
    fingerprint="f", dtype="bfloat16", page_size=PAGE_SIZE, num_layers=1, num_kv_heads=1, head_dim=8,
    feature_ids=[1, 5, 8, 2], feature_width=4 * WIDTH, block_bytes=4096,
)  # fmt: skip


@pytest.mark.parametrize("have", [0, 8])
@pytest.mark.parametrize("block_bytes", [4096, 8192])
@pytest.mark.parametrize("wanted", [[8], [2, 1], [1, 5, 8, 2], [2, 8, 5, 1], []], ids=str)
def test_blocks_hold_the_wanted_layers_of_each_token_in_order(wanted, block_bytes, have):
    noise = torch.Generator().manual_seed(0)
    sizes = KVLayout(OFFERED)
    planes = Planes(
        kv=torch.randint(0, 256, (9, sizes.kv_page_bytes), dtype=torch.uint8, generator=noise),
        features=torch.randint(0, 256, (9, sizes.feature_page_bytes), dtype=torch.uint8, generator=noise),
    )
    asked = msgspec.structs.replace(
        OFFERED, feature_ids=wanted, feature_width=len(wanted) * WIDTH, block_bytes=block_bytes
    )
    common = agree(OFFERED, asked)
    reader, columns = BlockReader(sizes, planes), feature_columns(OFFERED, common)
    pages = PAGES[have // PAGE_SIZE :]
    expected = []
    for page in pages:
        expected.append(planes.kv[page])
        layers = planes.features[page].view(PAGE_SIZE, 4, 2 * WIDTH)
        for token in layers:
            expected += [token[OFFERED.feature_ids.index(layer)] for layer in wanted]
    stream = KVLayout(common).stream(NUM_TOKENS, have)
    read, filled = [], []
    for block in range(stream.num_blocks):
        segments, size = stream.segments(block), stream.block_size(block)
        read.append(bytes(reader.read(segments, pages, size, columns).data))
        slot = np.zeros(size, dtype=np.uint8)
        (digest,) = reader.fill([Filling(slot, segments, pages, size, 7, columns)])
        filled.append(slot.tobytes())
        assert digest == crc32c(filled[-1], 7)
    assert b"".join(read) == b"".join(filled) == torch.cat(expected).numpy().tobytes()
