"""Slabs for NIXL beside pages on a GPU: pinned host memory, filled and read by the copy engines."""

import pytest
import torch
from baton.kvtransfer.transport import Complete
from baton.tests.unit.kvtransfer.transports.test_nixl import NUM_BLOCKS, Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_pages_on_a_gpu_cross_through_pinned_slabs_on_both_sides():
    pair = Pair(device="cuda")
    try:
        pair.connect()
        (lane,) = pair.sender._nixl._lanes.values()
        (known,) = pair.receiver._nixl._pairs.values()
        assert lane.slab.is_pinned
        assert known.lane.unpin is not None
        pair.target.kv.zero_()
        torch.cuda.synchronize()  # copies have a stream of their own
        done = pair.hand_over()
        assert isinstance(done, Complete)
        assert done.num_nixl_blocks == done.num_blocks == NUM_BLOCKS
        pair.check_landed()
    finally:
        pair.receiver.close()
        pair.sender.close()


def test_a_changed_byte_is_pulled_again_before_it_is_used():
    pair, times = Pair(device="cuda"), [1]

    def flip(data) -> None:
        if times[0] > 0:
            times[0] -= 1
            data[7] ^= 1

    try:
        pair.connect()
        pair.target.kv.zero_()
        torch.cuda.synchronize()
        pair.fabric.change = flip
        assert isinstance(pair.hand_over(), Complete)
        pair.check_landed()
        assert pair.receiver.counters["digest_mismatches"] == 1
    finally:
        pair.receiver.close()
        pair.sender.close()
