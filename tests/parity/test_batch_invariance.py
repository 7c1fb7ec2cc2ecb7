"""Under --deterministic, a CPU computes every answer with the same bits in every way, in both dtypes."""

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.answer_engine import CHAIN, TREE, Answer, AnswerEngine, Models, Way
from baton.tests.parity.eagle3_toys import toy_target
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, MAX_TOKENS = 256, 120
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_new_tokens=14, ignore_eos=True)
WAYS = [
    Way(batch=5, chunk=16),
    Way(shape=CHAIN),
    Way(shape=CHAIN, batch=5, chunk=7),
    Way(shape=TREE, batch=3),
    Way(batch=4, chunk=32, has_graphs=True),
    Way(shape=CHAIN, batch=4, chunk=32, has_graphs=True),
    Way(shape=TREE, batch=3, chunk=13, has_graphs=True),
    Way(shape=TREE, batch=3, chunk=32, has_graphs=True, has_breaks=True),
    Way(batch=5, chunk=16, is_disaggregated=True),
    Way(shape=CHAIN, batch=4, chunk=13, has_graphs=True, is_disaggregated=True),
]


# A third of the cells, with both dtypes; all in the last tier.
CASES = [
    pytest.param(
        dtype,
        way,
        id=f"{dtype}-{way}",
        marks=pytest.mark.slow if (number - turn) % 3 else pytest.mark.smoke if number == turn else (),
    )
    for turn, dtype in enumerate((torch.bfloat16, torch.float32))
    for number, way in enumerate(WAYS)
]


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def models(request: pytest.FixtureRequest) -> Models:
    dtype = request.param
    config = toy_target(
        num_layers=3,
        vocab_size=VOCAB,
        dtype=str(dtype).removeprefix("torch."),
        qk_norm=dtype == torch.bfloat16,
        attention_bias=True,
    )
    return Models(config, dtype, "cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 17, 40, 1, 63, 30)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def answers_of(
    models: Models,
    way: Way,
    prompts: list[list[int]],
    texts: list[Answer],
    params: SamplingParams = GREEDY,
    *,
    is_invariant: bool = True,
) -> list[Answer]:
    engine = AnswerEngine(models, way, is_invariant=is_invariant, max_tokens=MAX_TOKENS)
    return engine.answer(prompts, params, [answer.tokens for answer in texts])


@pytest.fixture(scope="module")
def alone(models: Models, prompts: list[list[int]]) -> list[Answer]:
    return answers_of(models, Way(), prompts, [])


@pytest.mark.parametrize(("models", "way"), CASES, indirect=["models"])
def test_answers_and_kv_have_the_bits_of_plain_decoding_alone(
    models: Models, prompts: list[list[int]], alone: list[Answer], way: Way
) -> None:
    found = answers_of(models, way, prompts, alone)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in alone]
    assert [answer.kv_hash for answer in found] == [answer.kv_hash for answer in alone]
    accepted = [count for answer in found for count in answer.accept_lens]
    assert not way.shape.steps or sum(accepted) > 2 * len(accepted), "drafts are accepted"


@pytest.mark.parametrize(
    ("models", "way"),
    [
        pytest.param(torch.bfloat16, Way(shape=TREE, batch=3, chunk=30), id="bfloat16-tree"),
        pytest.param(torch.float32, Way(shape=CHAIN, batch=5), id="float32-chain"),
        slow(torch.bfloat16, Way(shape=CHAIN, batch=5), id="bfloat16-chain"),
        slow(torch.float32, Way(shape=TREE, batch=3, chunk=30), id="float32-tree"),
    ],
    indirect=["models"],
)
def test_sampled_answers_are_those_of_plain_decoding_alone(
    models: Models, prompts: list[list[int]], way: Way
) -> None:
    plain = answers_of(models, Way(), prompts, [], SAMPLED)
    found = answers_of(models, way, prompts, plain, SAMPLED)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
    assert [answer.kv_hash for answer in found] == [answer.kv_hash for answer in plain]


def test_in_float32_the_mode_computes_the_tokens_of_the_default_mode(prompts: list[list[int]]) -> None:
    models = Models(toy_target(num_layers=2, vocab_size=VOCAB), torch.float32, "cpu")
    fastest, invariant = (answers_of(models, Way(), prompts, [], is_invariant=mode) for mode in (False, True))
    assert [answer.tokens for answer in fastest] == [answer.tokens for answer in invariant]
