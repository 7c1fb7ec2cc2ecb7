"""Both attention paths equal the float64 definition, which itself equals a loop over rows."""

import math

import pytest
import torch
from baton.kernels.kv_store import kv_rows
from baton.kernels.paged_attention import (
    QUERY_BLOCK,
    batched_attention,
    causal_band,
    extend_attention,
    gather_kv,
    paged_attention_reference,
)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_definition_is_a_causal_softmax_of_scaled_scores():
    kv, pages, kv_len = randn(6, 2, 2, 4, 2, 8), torch.tensor([3, 5, 1]), 11
    q = randn(3, 4, 8, seed=1)
    out = paged_attention_reference(q, kv, 1, pages, kv_len, 0.3)
    for row in range(3):
        for head in range(4):
            seen = kv_len - 3 + row + 1
            keys = [kv[pages[j // 4], 1, 0, j % 4, head // 2] for j in range(seen)]
            values = [kv[pages[j // 4], 1, 1, j % 4, head // 2] for j in range(seen)]
            weights = [math.exp(0.3 * float(q[row, head] @ key)) for key in keys]
            expected = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
            torch.testing.assert_close(out[row, head], expected, atol=1e-6, rtol=0)


def test_gathered_rows_are_those_of_their_slots_and_layer():
    kv = randn(6, 3, 2, 4, 2, 8)
    slots = torch.tensor([[5, 22], [13, 0]])
    rows = kv_rows(slots, kv).flatten()
    keys, values = gather_kv(kv, 2, torch.cat((rows, rows + 4)), kv.dtype)
    for i, slot in enumerate(slots.flatten().tolist()):
        assert torch.equal(keys[i], kv[slot // 4, 2, 0, slot % 4])
        assert torch.equal(values[i], kv[slot // 4, 2, 1, slot % 4])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (9, 3), (4, 4)])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (7, 1), (7, 3), (QUERY_BLOCK + 37, QUERY_BLOCK + 5), (QUERY_BLOCK, 1)]
)
def test_extend_equals_the_definition(lengths: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype):
    (kv_len, q_len), (num_heads, kv_heads) = lengths, heads
    num_pages = -(-kv_len // 8)
    kv, pages = randn(num_pages + 1, 1, 2, 8, kv_heads, 6).to(dtype), torch.arange(num_pages, 0, -1)
    q = randn(q_len, num_heads, 6, seed=1).to(dtype)
    k, v = kv[pages, 0].unbind(1)
    band = causal_band(kv_len + 3, min(q_len, QUERY_BLOCK), dtype, torch.device("cpu"))
    ours = extend_attention(q, k.flatten(0, 1)[:kv_len], v.flatten(0, 1)[:kv_len], band, 0.5)
    expected = paged_attention_reference(q, kv, 0, pages, kv_len, 0.5)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 4)])
def test_batched_equals_the_definition_request_by_request(
    heads: tuple[int, int], q_len: int, dtype: torch.dtype
):
    num_heads, kv_heads = heads
    kv_lens, longest = [5, 17, 4], 17
    kv = randn(9, 1, 2, 8, kv_heads, 6).to(dtype)
    tables = torch.tensor([[4, 0, 0], [1, 7, 3], [8, 0, 0]])
    q = randn(3, q_len, num_heads, 6, seed=1).to(dtype)
    k, v = (plane.reshape(3, 24, kv_heads, 6)[:, :longest] for plane in kv[tables, 0].unbind(2))
    seen = torch.tensor(kv_lens)[:, None] + torch.arange(1 - q_len, 1)
    mask = torch.zeros(3, q_len, longest, dtype=dtype)
    mask = mask.masked_fill(torch.arange(longest) >= seen[:, :, None], float("-inf")).unsqueeze(1)
    ours = batched_attention(q, k, v, mask, 0.5)
    for request, kv_len in enumerate(kv_lens):
        expected = paged_attention_reference(q[request], kv, 0, tables[request], kv_len, 0.5)
        torch.testing.assert_close(ours[request], expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
