"""bfloat16 on a GPU: bits in the deterministic mode, and near-ties in the default mode.

A random Llama with 8 layers of width 1024 and an EAGLE3 head. Its answers are computed alone and in batches,
without drafts, with chains and with trees, eagerly and in graphs, in whole prompts and in chunks.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.kv.page_table import pages_for
from baton.engine.kv.pool import KVPool
from baton.engine.request import Request
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.params import SamplingParams
from baton.kernels.invariant_attention import Rows, invariant_attention
from baton.kernels.invariant_linear import invariant_linear, invariant_logits
from baton.kernels.rms_norm import add_rms_norm, rms_norm
from baton.tests.parity.answer_engine import CHAIN, PAGE_SIZE, TREE, Answer, AnswerEngine, Models, Way
from baton.tests.parity.eagle3_toys import toy_target
from baton.tests.parity.forward_bugs import FORWARD_BUGS
from baton.tests.parity.near_ties import Audit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB, MAX_PROMPT, NEW_TOKENS = 32000, 200, 128
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
PLAIN_WAY = Way(batch=32, chunk=512, has_graphs=True)
WAYS = [
    Way(shape=CHAIN, batch=32, chunk=512, has_graphs=True),
    Way(shape=TREE, batch=32, chunk=100, has_graphs=True),
    Way(shape=CHAIN, batch=1, has_graphs=True),
    Way(shape=TREE, batch=1, has_graphs=True),
    Way(batch=1, has_graphs=True),
    Way(shape=CHAIN, batch=32, chunk=77),
    Way(shape=TREE, batch=7, chunk=512),
]


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = toy_target(
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=8,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        dtype="bfloat16",
    )
    yield Models(config, torch.bfloat16, "cuda")
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, MAX_PROMPT, (200,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def answers_of(
    models: Models,
    way: Way,
    prompts: list[list[int]],
    texts: list[Answer] | None = None,
    *,
    is_invariant: bool,
    params: SamplingParams = GREEDY,
) -> list[Answer]:
    engine = AnswerEngine(models, way, is_invariant=is_invariant, max_tokens=MAX_PROMPT + NEW_TOKENS)
    return engine.answer(prompts, params, [answer.tokens for answer in texts or ()])


@pytest.fixture(scope="module")
def invariant(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, PLAIN_WAY, prompts, is_invariant=True)


@pytest.fixture(scope="module")
def fastest(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, PLAIN_WAY, prompts, is_invariant=False)


# --- the deterministic mode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_deterministic_answers_and_kv_have_the_same_bits(
    models: Models, prompts: list[list[int]], invariant: list[Answer], way: Way
) -> None:
    found = answers_of(models, way, prompts, invariant, is_invariant=True)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in invariant]
    assert [answer.kv_hash for answer in found] == [answer.kv_hash for answer in invariant]
    accepted = [count for answer in found for count in answer.accept_lens]
    assert not way.shape.steps or sum(accepted) > 2 * len(accepted), "drafts are accepted"


def test_deterministic_samples_are_the_same_with_and_without_drafts(
    models: Models, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_new_tokens=64, ignore_eos=True)
    plain = answers_of(models, Way(batch=16), prompts[:32], is_invariant=True, params=params)
    for way in (Way(shape=CHAIN, batch=5), Way(shape=TREE, batch=32, has_graphs=True)):
        found = answers_of(models, way, prompts[:32], plain, is_invariant=True, params=params)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]


@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 1024), (6144, 4096), (4096, 14336), (32000, 1024)])
def test_a_row_of_a_product_has_the_same_bits_in_any_number(outputs: int, inputs: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(outputs, inputs, device="cuda", generator=generator).bfloat16() * inputs**-0.5
    x = torch.randn(2100, inputs, device="cuda", generator=generator).bfloat16()
    whole, logits = invariant_linear(x, weight), invariant_logits(x[:300], weight)
    for count in (1, 2, 4, 16, 17, 33, 64, 65, 100, 129, 256, 257, 1024):
        assert torch.equal(invariant_linear(x[:count], weight), whole[:count]), count
        assert torch.equal(invariant_logits(x[:count], weight)[:300], logits[:count]), count
    assert torch.equal(invariant_linear(x.flip(0), weight), whole.flip(0))
    torch.testing.assert_close(logits, x[:300].float() @ weight.float().T, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("width", [64, 576, 1024, 4096])
def test_a_row_of_a_norm_has_the_same_bits_in_any_number(width: int) -> None:
    x, residual = torch.randn(2, 300, width, device="cuda").bfloat16()
    weight = torch.randn(width, device="cuda").bfloat16()
    whole, summed = rms_norm(x, weight, 1e-5), add_rms_norm(x, residual, weight, 1e-5)
    for count in (1, 2, 3, 5, 17, 64):
        assert torch.equal(rms_norm(x[-count:], weight, 1e-5), whole[-count:])
        for got, wanted in zip(
            add_rms_norm(x[-count:], residual[-count:], weight, 1e-5), summed, strict=True
        ):
            assert torch.equal(got, wanted[-count:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("length", "table_pages"), [(90, 8), (1300, 83), (1300, 600), (9000, 600)])
def test_a_row_of_attention_has_the_same_bits_in_every_forward(
    dtype: torch.dtype, length: int, table_pages: int
) -> None:
    """80 rows in one prefill, in ragged chunks, and as decode and verify rows of one request and of many."""
    heads, kv_heads, dim, count = (32, 8, 128, 80) if dtype == torch.bfloat16 else (9, 3, 64, 80)
    generator = torch.Generator("cuda").manual_seed(2)
    pool = torch.randn(table_pages + 2, 2, 2, 16, kv_heads, dim, device="cuda", generator=generator).to(dtype)
    table = (torch.randperm(table_pages, device="cuda", generator=generator) + 1)[None]
    q = torch.randn(count, heads, dim, device="cuda", generator=generator).to(dtype)

    def lens(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cuda")

    def attend(rows: torch.Tensor, pages: torch.Tensor, how: Rows) -> torch.Tensor:
        return invariant_attention(rows, pool, 1, pages, how, dim**-0.5)

    whole = attend(q, table, Rows(lens(length), starts=lens(0, count), longest=count))
    for chunk in (1, 7, 33):
        for start in range(0, count, chunk):
            end = min(start + chunk, count)
            how = Rows(lens(length - count + end), starts=lens(0, end - start), longest=end - start)
            assert torch.equal(attend(q[start:end], table, how), whole[start:end])
    for uniform in (1, 4, 5, 8):
        some = count // uniform
        ends = length - count + uniform * torch.arange(1, some + 1, device="cuda")
        many = attend(q[: some * uniform], table.expand(some, -1).contiguous(), Rows(ends, uniform=uniform))
        assert torch.equal(many, whole[: some * uniform])
        alone = attend(q[uniform : 2 * uniform], table, Rows(ends[1:2], uniform=uniform))
        assert torch.equal(alone, whole[uniform : 2 * uniform])


@pytest.mark.parametrize("length", [90, 1300, 9000])
@pytest.mark.parametrize("num_requests", [1, 40])
def test_a_branch_of_a_tree_has_the_bits_of_a_chain(length: int, num_requests: int) -> None:
    heads, kv_heads, dim, num_nodes = 32, 8, 128, 8
    branch = [0, 2, 3, 6]  # of the nodes; the others hold other keys and values
    num_pages = length // 16 + 3
    pool = torch.randn(num_pages + 2, 1, 2, 16, kv_heads, dim, device="cuda").bfloat16()
    table = (torch.randperm(num_pages, device="cuda") + 1)[None]
    q = torch.randn(len(branch), heads, dim, device="cuda").bfloat16()
    chain_lens = torch.tensor([length + len(branch)], device="cuda")
    chain = invariant_attention(q, pool, 0, table, Rows(chain_lens, uniform=len(branch)), 0.1)
    moved = pool.clone()
    for node in range(num_nodes):
        source = length + branch.index(node) if node in branch else length + 20
        page, offset = int(table[0, (length + node) // 16]), (length + node) % 16
        moved[page, :, :, offset] = pool[int(table[0, source // 16]), :, :, source % 16]
    mask = torch.eye(num_nodes, dtype=torch.bool, device="cuda")
    for depth, node in enumerate(branch):
        mask[node, branch[: depth + 1]] = True
    nodes = torch.randn(num_nodes, heads, dim, device="cuda").bfloat16()
    nodes[branch] = q
    how = Rows(
        torch.full((num_requests,), length + num_nodes, device="cuda"),
        uniform=num_nodes,
        tree_mask=mask.expand(num_requests, -1, -1).contiguous(),
    )
    pages = table.expand(num_requests, -1).contiguous()
    out = invariant_attention(nodes.repeat(num_requests, 1, 1), moved, 0, pages, how, 0.1)
    for found in out.view(num_requests, num_nodes, heads, dim)[:, branch]:
        assert torch.equal(found, chain)


# --- the default mode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [PLAIN_WAY, *WAYS[:2], WAYS[5]], ids=str)
def test_default_answers_differ_from_float32_at_near_ties_only(
    models: Models, prompts: list[list[int]], fastest: list[Answer], way: Way
) -> None:
    found = fastest if way is PLAIN_WAY else answers_of(models, way, prompts, fastest, is_invariant=False)
    audit = Audit(models.fastest)
    differences = audit.check(prompts, [answer.tokens for answer in found])
    others = sum(ours.tokens != theirs.tokens for ours, theirs in zip(found, fastest, strict=True))
    widest = max((difference.gap for difference in differences), default=0.0)
    print(
        f"{way}: {len(differences)} of {NEW_TOKENS * len(prompts)} tokens are not float32's best, the "
        f"widest gap is {widest:.3f} of {audit.bound:.3f} deviations; {others} of {len(prompts)} answers "
        "differ from those without drafts"
    )


@pytest.mark.parametrize("bug", FORWARD_BUGS)
def test_the_audit_finds_planted_bugs(
    models: Models,
    prompts: list[list[int]],
    fastest: list[Answer],
    bug: Callable[[object], AbstractContextManager[None]],
) -> None:
    with bug(models.fastest):
        found = answers_of(models, Way(shape=CHAIN, batch=32), prompts[:32], fastest, is_invariant=False)
    with pytest.raises(AssertionError, match="no near-ties"):
        Audit(models.fastest).check(prompts[:32], [answer.tokens for answer in found])


def test_logits_of_a_prefill_are_float32_sums_not_rounded_to_bfloat16(
    models: Models, prompts: list[list[int]]
) -> None:
    model = models.fastest
    pool = KVPool(64, model.kv_layout(PAGE_SIZE), "cuda")
    request = Request(room="0" * 32, epoch=0, prompt_ids=prompts[0], sampling=GREEDY)
    request.pages = list(range(1, 1 + pages_for(request.num_prompt, PAGE_SIZE)))
    batch = extend_batch([(request, 0, request.num_prompt)], page_size=PAGE_SIZE, device=torch.device("cuda"))
    logits = ModelRunner(model, pool).forward(batch).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
