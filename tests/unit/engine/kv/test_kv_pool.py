"""The KV pool: its byte view, its layer views, and refused sizes."""

import pytest
import torch
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import FeaturePlane, KVPool, PageAllocator, PoolExhausted


def make_pool(dtype=torch.float32):
    return KVPool(4, MHALayout(page_size=2, num_layers=3, num_kv_heads=2, head_dim=5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_page_of_all_layers_is_one_row_of_the_byte_view(dtype):
    pool = make_pool(dtype)
    view = pool.byte_view()
    assert view.dtype == torch.uint8
    assert view.shape == (4, pool.page_bytes)
    assert pool.page_bytes == 3 * 2 * 2 * 2 * 5 * pool.kv.element_size()
    pool.kv[2] = 1.5
    touched = view.ne(0).any(dim=1).tolist()
    assert touched == [False, False, True, False]


def test_bytes_written_through_the_view_are_the_pools_own():
    source, target = make_pool(), make_pool()
    source.kv.normal_()
    target.byte_view()[3] = source.byte_view()[1]
    assert torch.equal(target.kv[3], source.kv[1])
    assert not target.kv[:3].any()


def test_layer_views_write_into_the_pool_in_layout_order():
    pool = make_pool()
    k, v = pool.layer(1)
    assert k.shape == v.shape == (4, 2, 2, 5)
    k[3, 1] = 7.0
    v[3, 0] = 9.0
    assert (pool.kv[3, 1, 0, 1] == 7.0).all()
    assert (pool.kv[3, 1, 1, 0] == 9.0).all()
    assert int(pool.kv.count_nonzero()) == 20


def test_a_new_pool_is_zero():
    assert not make_pool().kv.any()
    assert not FeaturePlane(4, 2, 6, torch.float32).rows.any()


@pytest.mark.parametrize("wrong", [{"num_pages": 1}, {"page_size": 0}, {"num_layers": 0}, {"head_dim": 0}])
def test_impossible_sizes_are_refused_by_value(wrong):
    sizes = {"num_pages": 4, "page_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 4} | wrong
    num_pages = sizes.pop("num_pages")
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        KVPool(num_pages, MHALayout(**sizes, dtype=torch.float32))


def test_features_land_at_their_slots_and_nowhere_else():
    plane = FeaturePlane(num_pages=3, page_size=4, width=6, dtype=torch.bfloat16)
    features = torch.randn(3, 6).to(torch.bfloat16)
    plane.store(torch.tensor([5, 11, 4]), features)
    assert torch.equal(plane.rows[[5, 11, 4]], features)
    others = [slot for slot in range(12) if slot not in (4, 5, 11)]
    assert not plane.rows[others].any()
    assert plane.byte_view().shape == (3, plane.page_bytes) == (3, 4 * 6 * 2)
    assert plane.byte_view()[0].ne(0).any().item() is False
    assert torch.equal(plane.byte_view()[1].view(torch.bfloat16).view(4, 6), plane.features[1])


def test_a_feature_plane_needs_a_width():
    with pytest.raises(ValueError, match="width 0"):
        FeaturePlane(2, 2, 0, torch.float32)


def test_every_page_but_zero_is_given_once():
    allocator = PageAllocator(9)
    pages = allocator.alloc(3) + allocator.alloc(5)
    assert sorted(pages) == list(range(1, 9))
    assert (allocator.num_free, allocator.num_used, allocator.num_total) == (0, 8, 8)
    allocator.check_integrity()


def test_alloc_gives_all_or_nothing():
    allocator = PageAllocator(4)
    allocator.alloc(2)
    with pytest.raises(PoolExhausted, match="2 pages asked for, 1 of 3 free"):
        allocator.alloc(2)
    assert allocator.num_free == 1
    assert allocator.alloc(0) == []


def test_a_page_is_free_after_its_last_owner_only():
    allocator = PageAllocator(3)
    (page,) = allocator.alloc(1)
    allocator.retain([page])
    allocator.release([page])
    assert allocator.refs(page) == 1
    assert allocator.num_free == 1
    allocator.release([page])
    assert allocator.refs(page) == 0
    assert allocator.num_free == 2
    allocator.check_integrity()


@pytest.mark.parametrize("misuse", ["release", "retain"])
@pytest.mark.parametrize("page", [0, 2])
def test_using_a_page_without_an_owner_raises(misuse, page):
    allocator = PageAllocator(4)
    with pytest.raises(AssertionError):
        getattr(allocator, misuse)([page])


def test_a_pool_without_pages_to_give_is_refused():
    with pytest.raises(ValueError, match="page 0"):
        PageAllocator(1)


def test_integrity_check_notices_a_page_that_is_owned_and_free():
    allocator = PageAllocator(4)
    (page,) = allocator.alloc(1)
    allocator._free.append(page)
    with pytest.raises(AssertionError):
        allocator.check_integrity()


def test_the_observer_sees_every_change_of_owners():
    heard = []
    allocator = PageAllocator(4)
    allocator.watch(lambda *event: heard.append(event))
    (page,) = allocator.alloc(1)
    allocator.retain([page])
    allocator.release([page, page])
    assert heard == [(page, 2, 1), (page, 1, -1), (page, 0, -1)]


def test_reprs_state_the_condition_in_one_line():
    allocator = PageAllocator(9)
    allocator.alloc(3)
    assert repr(allocator) == "<PageAllocator 5 free of 8>"
    assert repr(make_pool()) == "<KVPool 4 pages x 480 B, 3 layers, cpu>"
