"""New keys and values land in their slots and nowhere else; the sink reads as zeros."""

import pytest
import torch
from baton.kernels.kv_store import kv_rows, store_kv

PAGES, LAYERS, PAGE_SIZE, HEADS, DIM = 5, 3, 4, 2, 6


@pytest.mark.parametrize("layer", range(LAYERS))
def test_each_row_lands_in_its_slot_and_nothing_else_changes(layer: int):
    kv = torch.full((PAGES, LAYERS, 2, PAGE_SIZE, HEADS, DIM), 7.0)
    expected = kv.clone()
    slots = torch.tensor([4, 19, 11, 6])
    k, v = torch.randn(4, HEADS, DIM), torch.randn(4, HEADS, DIM)
    for row, slot in enumerate(slots.tolist()):
        expected[slot // PAGE_SIZE, layer, 0, slot % PAGE_SIZE] = k[row]
        expected[slot // PAGE_SIZE, layer, 1, slot % PAGE_SIZE] = v[row]
    expected[0, layer, :, 0] = 0.0
    store_kv(kv, layer, kv_rows(slots, kv), k, v)
    assert torch.equal(kv, expected)


def test_the_sink_reads_as_zeros_whatever_is_written_there():
    kv = torch.zeros(PAGES, LAYERS, 2, PAGE_SIZE, HEADS, DIM)
    poison = torch.full((3, HEADS, DIM), float("nan"))
    store_kv(kv, 1, kv_rows(torch.zeros(3, dtype=torch.int64), kv), poison, poison)
    assert torch.equal(kv, torch.zeros_like(kv))


def test_views_of_a_wider_projection_are_stored_too():
    kv = torch.zeros(PAGES, LAYERS, 2, PAGE_SIZE, HEADS, DIM)
    wide = torch.randn(1, 3 * HEADS, DIM)
    store_kv(kv, 0, kv_rows(torch.tensor([9]), kv), wide[:, HEADS : 2 * HEADS], wide[:, 2 * HEADS :])
    assert torch.equal(kv[2, 0, :, 1].flatten(0, 1), wide[0, HEADS:])


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (torch.zeros(2, HEADS, DIM), torch.zeros(1, HEADS, DIM)),
        (torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM)),
        (torch.zeros(2, HEADS + 1, DIM), torch.zeros(2, HEADS + 1, DIM)),
        (torch.zeros(2, HEADS, DIM, dtype=torch.bfloat16), torch.zeros(2, HEADS, DIM)),
    ],
)
def test_rows_that_do_not_fit_the_pool_are_refused(k: torch.Tensor, v: torch.Tensor):
    kv = torch.zeros(PAGES, LAYERS, 2, PAGE_SIZE, HEADS, DIM)
    with pytest.raises(ValueError, match="store_kv"):
        store_kv(kv, 0, kv_rows(torch.tensor([4, 5]), kv), k, v)
