"""The default mode in bfloat16 on a GPU: greedy answers differ from float32 at near-ties only.

Chains and trees, with eager forwards, with breakable graphs and with full graphs, for prompts and steps.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.kv.page_table import pages_for
from baton.engine.kv.pool import KVPool
from baton.engine.request import Request
from baton.engine.runner.model_runner import ModelRunner
from baton.tests.gpu.bf16_answers import GREEDY, MAX_TOKENS, NEW_TOKENS, PLAIN_WAY, answers_of
from baton.tests.parity.answer_engine import CHAIN, PAGE_SIZE, TREE, Answer, AnswerEngine, Models, Way
from baton.tests.parity.forward_bugs import FORWARD_BUGS
from baton.tests.parity.near_ties import Audit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EAGER, BREAKABLE, FULL = set[str](), {"target_prefill", "edited_step"}, {"whole_prefill", "decode_step"}
WAYS = [
    (PLAIN_WAY, FULL),
    (Way(shape=CHAIN, batch=32, chunk=77), EAGER),
    (Way(shape=TREE, batch=32, chunk=512), EAGER),
    (Way(shape=CHAIN, batch=32, chunk=512, has_graphs=True, has_breaks=True), BREAKABLE),
    (Way(shape=TREE, batch=32, chunk=100, has_graphs=True, has_breaks=True), BREAKABLE),
    (Way(shape=CHAIN, batch=32, chunk=100, has_graphs=True), FULL),
    (Way(shape=TREE, batch=32, chunk=512, has_graphs=True), FULL),
]


@pytest.fixture(scope="module")
def plain(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, PLAIN_WAY, prompts, is_invariant=False)


@pytest.fixture(scope="module")
def audit(models: Models) -> Audit:
    return Audit(models.fastest)


@pytest.mark.parametrize(("way", "graphs"), WAYS, ids=[str(way) for way, _ in WAYS])
def test_default_answers_differ_from_float32_at_near_ties_only(
    models: Models,
    audit: Audit,
    prompts: list[list[int]],
    plain: list[Answer],
    way: Way,
    graphs: set[str],
) -> None:
    engine = AnswerEngine(models, way, is_invariant=False, max_tokens=MAX_TOKENS)
    found = engine.answer(prompts, GREEDY, [answer.tokens for answer in plain])
    differences = audit.check(prompts, [answer.tokens for answer in found])
    others = sum(ours.tokens != theirs.tokens for ours, theirs in zip(found, plain, strict=True))
    accepted = [number for answer in found for number in answer.accept_lens]
    widest = max((difference.gap for difference in differences), default=0.0)
    print(
        f"{way}: {len(differences)} of {NEW_TOKENS * len(prompts)} tokens are not float32's best, the "
        f"widest gap is {widest:.3f} of {audit.bound:.3f} deviations; {others} of {len(prompts)} answers "
        f"differ from those without drafts; {sum(accepted) / len(accepted):.2f} tokens a step; "
        f"replays {engine.num_replays}"
    )
    assert graphs <= set(engine.num_replays)
    assert graphs or not engine.num_replays
    # Drafts are tokens of the answers without drafts, so few are accepted behind the first difference.
    assert not way.shape.steps or sum(accepted) > 1.2 * len(accepted), "drafts are accepted"


@pytest.mark.parametrize("bug", FORWARD_BUGS)
def test_the_audit_finds_planted_bugs(
    models: Models,
    prompts: list[list[int]],
    plain: list[Answer],
    bug: Callable[[object], AbstractContextManager[None]],
) -> None:
    with bug(models.fastest):
        found = answers_of(models, Way(shape=CHAIN, batch=32), prompts[:32], plain, is_invariant=False)
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
