"""Cases of the kernels of attention over latents: absorbed, expanded, and the store."""

from collections.abc import Callable, Iterator

import torch
from baton.kernels import expanded_attention, latent_attention, latent_store
from baton.tests.kernels.attention_cases import random_trees
from baton.tests.kernels.cases import BFLOAT16, DTYPES, FLOAT32, NAN, assert_close, randn

PAGE_SIZE, LAYER, SCALE = 16, 1, 0.2
RANKS = ((24, 8), (64, 16))


def poisoned_latents(
    kv_lens: list[int], width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A pool of 2 layers, its page table, and the latents `[S, W]` of each request; all else is NaN."""
    needed = [-(-length // PAGE_SIZE) for length in kv_lens]
    pages = (torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(7)) + 1).tolist()
    pool = torch.full((sum(needed) + 3, 2, 1, PAGE_SIZE, 1, width), NAN, dtype=dtype)
    pool[0, :, :, 0] = 0
    table = torch.zeros(len(kv_lens), max(needed, default=0) + 1, dtype=torch.int64)
    rows = []
    for request, length in enumerate(kv_lens):
        own = randn(length, width, dtype=dtype, seed=10 + request)
        for index in range(needed[request]):
            table[request, index] = page = pages.pop()
            part = own[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            pool[page, LAYER, 0, : len(part), 0] = part
        rows.append(own)
    return pool, table, rows


def definition(
    q: torch.Tensor, latents: torch.Tensor, rank: int, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Absorbed attention of one request in float64: `q` `[Q, N, W]` are the last Q of `latents` `[S, W]`.

    `seen` bool `[Q, Q]`: the new rows that each sees; by default those up to itself.
    """
    num_rows, wide = q.shape[0], latents.double()
    scores = torch.einsum("qnw,sw->nqs", q.double(), wide) * SCALE
    visible = torch.ones(num_rows, latents.shape[0], dtype=torch.bool)
    visible[:, latents.shape[0] - num_rows :] = (
        torch.ones(num_rows, num_rows).tril().bool() if seen is None else seen
    )
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("nqs,sr->qnr", weights, wide[:, :rank]).to(q.dtype)


def check_store_latent(device: str, num_rows: int, width: int, dtype: torch.dtype) -> None:
    """Rows of the sink stay zero, whatever padding holds; other rows stay as they are."""
    pool = randn(5, 2, 1, PAGE_SIZE, 1, width, dtype=dtype)
    pool[0, :, :, 0] = 0
    wide = randn(num_rows, 1, width + 3, dtype=dtype, seed=1)
    slots = torch.randperm(3 * PAGE_SIZE, generator=torch.Generator().manual_seed(1))[:num_rows] + PAGE_SIZE
    if num_rows > 2:
        slots[2], wide[2] = 0, NAN
    rows = latent_store.kv_rows(slots, pool)
    found, expected = pool.clone().to(device), pool.clone()
    latent_store.store_latent_triton(found, LAYER, rows.to(device), wide.to(device)[..., :width])
    latent_store.store_latent(expected, LAYER, rows, wide[..., :width].clone())
    assert torch.equal(found.cpu(), expected)
    assert not expected[0, LAYER, 0, 0].any()


def check_latent_verify(
    device: str,
    num_rows: int,
    num_heads: int,
    kv_lens: list[int],
    rank: int,
    rope: int,
    num_splits: int,
    is_tree: bool,
    dtype: torch.dtype,
) -> None:
    """kv_len 0 is an idle request: its queries are NaN and its rows come out as zeros."""
    pool, table, latents = poisoned_latents(kv_lens, rank + rope, dtype)
    q = randn(len(kv_lens), num_rows, num_heads, rank + rope, dtype=dtype, seed=3)
    lengths = torch.tensor(kv_lens)
    q[lengths == 0] = NAN
    trees = random_trees(len(kv_lens), num_rows) if is_tree else None
    found = latent_attention.latent_verify_triton(
        q.to(device),
        pool.to(device),
        LAYER,
        table.to(device),
        lengths.to(device),
        SCALE,
        rank,
        None if trees is None else trees.to(device),
        num_splits=num_splits,
        min_split=16,
    ).cpu()
    for request, kv_len in enumerate(kv_lens):
        if kv_len == 0:
            assert not found[request].any()
            continue
        expected = definition(q[request], latents[request], rank, None if trees is None else trees[request])
        assert_close(found[request], expected)
    if dtype == FLOAT32:
        clean = torch.nan_to_num(pool)
        on_cpu = latent_attention.latent_verify(
            torch.nan_to_num(q), clean, LAYER, table, lengths, SCALE, rank, trees
        )
        assert_close(found, on_cpu)


def check_latent_extend(
    device: str, q_lens: list[int], kv_lens: list[int], num_heads: int, num_splits: int, dtype: torch.dtype
) -> None:
    """Rows behind the last request are padding."""
    rank, rope = RANKS[0]
    pool, table, latents = poisoned_latents(kv_lens, rank + rope, dtype)
    q = randn(sum(q_lens) + 2, num_heads, rank + rope, dtype=dtype, seed=3)
    starts = torch.tensor([0, *q_lens]).cumsum(0)
    found = latent_attention.latent_extend_triton(
        q.to(device),
        pool.to(device),
        LAYER,
        table.to(device),
        starts.to(device),
        torch.tensor(kv_lens).to(device),
        max(q_lens),
        SCALE,
        rank,
        num_splits=num_splits,
        min_split=16,
    ).cpu()
    for request, first in enumerate(starts[:-1].tolist()):
        own = slice(first, first + q_lens[request])
        assert_close(found[own], definition(q[own], latents[request], rank))


def check_expanded_attention(
    device: str, q_lens: list[int], kv_lens: list[int], num_heads: int, dtype: torch.dtype
) -> None:
    """Against absorbed attention of the same latents: the two forms are one function."""
    rank, rope, key, value = 24, 8, 20, 12
    up = randn(num_heads, key + value, rank, dtype=dtype, seed=5) / rank**0.5
    latents = [randn(length, rank + rope, dtype=dtype, seed=6 + i) for i, length in enumerate(kv_lens)]
    joined = torch.cat(latents)
    expanded = torch.einsum("sr,nfr->snf", joined[:, :rank].float(), up.float()).to(dtype)
    starts, firsts = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens))
    q = randn(sum(q_lens), num_heads, key + rope, dtype=dtype, seed=8)
    out = torch.full((sum(q_lens), num_heads, value), NAN, dtype=dtype)
    found = out.clone().to(device)
    expanded_attention.expanded_attention_triton(
        q.to(device),
        expanded.to(device),
        joined.to(device)[:, rank:],
        starts.to(device),
        firsts.to(device),
        torch.tensor(kv_lens).to(device),
        max(q_lens),
        SCALE,
        found,
    )
    expanded_attention.expanded_attention(
        q, expanded, joined[:, rank:], starts, firsts, torch.tensor(kv_lens), max(q_lens), SCALE, out
    )
    assert_close(found, out)
    if dtype == FLOAT32:
        absorbed = latent_attention.absorb(q, up, rope)
        for request, first in enumerate(starts[:-1].tolist()):
            own = slice(first, first + q_lens[request])
            wide = definition(absorbed[own], latents[request], rank)
            assert_close(out[own], latent_attention.project_values(wide, up, value))


def latent_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for dtype in DTYPES:
        for num_rows, width in ((0, 32), (1, 40), (9, 80)):
            yield check_store_latent, (num_rows, width, dtype)
    for rank, rope in RANKS:
        yield check_latent_verify, (1, 4, [1, 0, 37, 130], rank, rope, 4, False, FLOAT32)
    yield check_latent_verify, (1, 16, [33, 200], 64, 16, 1, False, BFLOAT16)
    yield check_latent_verify, (5, 3, [5, 33, 70], 24, 8, 3, False, BFLOAT16)
    yield check_latent_verify, (5, 8, [6, 33, 48], 24, 8, 2, True, FLOAT32)
    yield check_latent_verify, (7, 16, [7, 90], 64, 16, 1, True, BFLOAT16)
    for num_splits in (1, 3):
        yield check_latent_extend, ([1, 9, 3], [40, 9, 35], 4, num_splits, FLOAT32)
    yield check_expanded_attention, ([1, 40, 17], [33, 70, 17], 3, FLOAT32)
    yield check_expanded_attention, ([5, 150], [130, 150], 2, BFLOAT16)
