"""Greedy answers of 128 tokens in the deterministic and in the default mode, and their comparison."""

from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.answer_engine import Answer, AnswerEngine, Models, Way

MAX_PROMPT, NEW_TOKENS = 200, 128
MAX_TOKENS = MAX_PROMPT + NEW_TOKENS
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
PLAIN_WAY = Way(batch=32, chunk=512, has_graphs=True)


def answers_of(
    models: Models,
    way: Way,
    prompts: list[list[int]],
    texts: list[Answer] | None = None,
    params: SamplingParams = GREEDY,
    *,
    is_invariant: bool,
) -> list[Answer]:
    """The answers of `prompts`; some drafts are the tokens of `texts`."""
    engine = AnswerEngine(models, way, is_invariant=is_invariant, max_tokens=MAX_TOKENS)
    return engine.answer(prompts, params, [answer.tokens for answer in texts or ()])


def assert_same_bits(way: Way, found: list[Answer], plain: list[Answer]) -> None:
    """Tokens and KV of `found` are those of the first of `plain`; prints the counts."""
    accepted = [number for answer in found for number in answer.accept_lens]
    tokens = [ours.tokens != theirs.tokens for ours, theirs in zip(found, plain, strict=False)]
    kv = [ours.kv_hash != theirs.kv_hash for ours, theirs in zip(found, plain, strict=False)]
    print(
        f"{way}: {len(found)} answers of {NEW_TOKENS} tokens, {sum(tokens)} differ, KV of {sum(kv)} differs, "
        f"{sum(accepted) / max(1, len(accepted)):.2f} tokens a step"
    )
    assert not any(tokens)
    assert not any(kv)
    assert not way.shape.steps or sum(accepted) > 2 * len(accepted), "drafts are accepted"
