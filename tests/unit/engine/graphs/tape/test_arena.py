"""Blocks belong to tensors and come back when the last of them is gone."""

import pytest
import torch
from baton.engine.graphs.breakable import BreakableGraph, ReplayContext
from baton.engine.graphs.tape.arena import ALIGNMENT, Arena, ArenaMemory
from baton.engine.graphs.tape.tape import TapeBackend
from hypothesis import given
from hypothesis import strategies as st


def test_a_block_lives_as_long_as_the_last_view_of_it():
    arena = Arena(1024)
    tensor = arena.place(torch.arange(8.0))
    assert (arena.num_used, arena.num_bytes) == (ALIGNMENT, 1024)
    view = tensor.view(2, 4)[1]
    del tensor
    assert arena.num_used == ALIGNMENT
    assert view.tolist() == [4.0, 5.0, 6.0, 7.0]
    del view
    assert arena.num_used == 0
    arena.check_integrity()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_shape_strides_dtype_and_values_survive(dtype: torch.dtype):
    arena = Arena(64)
    for original in (
        torch.arange(24).view(4, 6),
        torch.arange(24).view(4, 6).t(),
        torch.arange(0),
        torch.tensor(3),
    ):
        original = original.to(dtype)
        placed = arena.place(original)
        assert torch.equal(placed, original)
        assert (placed.stride(), placed.dtype) == (original.stride(), dtype)
        assert placed.data_ptr() % ALIGNMENT == 0
        assert arena.owns(placed)
        assert not arena.owns(original)
        assert torch.equal(arena.unowned(placed), original)
        assert arena.unowned(original) is original


def test_a_free_block_is_poisoned_and_reused():
    arena = Arena(1024, poison=True)
    owned = arena.place(torch.ones(4))
    weak, weak_ids = arena.unowned(owned), arena.unowned(arena.place(torch.ones(4, dtype=torch.int64)))
    address = owned.data_ptr()
    assert (weak.data_ptr(), weak.tolist()) == (address, [1.0] * 4)
    del owned
    arena.sweep()
    assert weak.isnan().all()
    assert weak_ids.tolist() == [-1] * 4
    assert arena.place(torch.zeros(4)).data_ptr() == address


def test_the_arena_grows_by_chunks_and_holds_larger_blocks():
    arena = Arena(256)
    held = [arena.place(torch.ones(32)) for _ in range(5)]  # 128 B each
    assert arena.num_bytes == 3 * 256
    big = arena.place(torch.ones(1000))
    assert arena.num_bytes == 3 * 256 + 4032
    assert repr(arena) == "<Arena 4672 of 4800 B in 4 chunks>"
    del held, big
    assert arena.num_used == 0
    arena.check_integrity()


@given(moves=st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=60))
def test_living_tensors_never_overlap(moves: list[tuple[bool, int]]):
    arena, held = Arena(2048, poison=True), []
    for number, (allocates, size) in enumerate(moves):
        if allocates or not held:
            held.append((float(number), arena.place(torch.full((size,), float(number)))))
        else:
            held.pop(size % len(held))
        arena.check_integrity()
        assert all((tensor == value).all() for value, tensor in held)
    held.clear()
    assert arena.num_used == 0


def test_a_tape_in_an_arena_pins_its_output_only_and_reuses_the_rest():
    memory, x = ArenaMemory(1 << 16), torch.ones(1024)
    backend = TapeBackend(memory)
    graphs = [BreakableGraph[ReplayContext, torch.Tensor](backend) for _ in range(3)]
    for graph in graphs:
        graph.capture(lambda _: ((x + 1) * 2 + 3) * 4 - 5, ReplayContext(num_rows=1))
    assert memory.pool.num_used == 3 * 4096
    assert backend.pool_bytes() == 1 << 16
    x.fill_(2)
    for graph in graphs:
        assert graph.replay(ReplayContext(num_rows=1)).unique().tolist() == [31.0]
    graphs[0].release()
    del graph
    assert memory.pool.num_used == 2 * 4096
