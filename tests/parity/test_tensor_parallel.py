"""A tensor-parallel worker says what transformers says, and what a worker with one rank says."""

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from baton.cluster.protocol.messages import Reserve, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.tests.parity import toy_models
from baton.tests.parity.conftest import Reference
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_aggregated import DRAFTS, LAYERS, LENGTHS, NUM_TOKENS, answers_of, ask, worker_of
from baton.tests.parity.test_sampled_law import D
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_model
from baton.tests.parity.tp_worker import tp_worker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, LAYERS), head_tensors())


def check(target: Path, draft: Path | str | None, tp: int = 2, **settings: object) -> None:
    """Prompts in parts, alone and in a batch, cold and cached, get the tokens of transformers."""
    answers = answers_of(target)
    prompts = list(answers)
    with tp_worker(target, draft, tp, **settings) as worker:
        assert ask(worker, prompts[:1]) == [answers[prompts[0]]]
        assert ask(worker, prompts) == list(answers.values())
        assert ask(worker, prompts) == list(answers.values())  # from cached prefixes
        worker.engine.cache.allocator.check_integrity()
        assert worker.ranks.num_issued > NUM_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_two_ranks_say_what_transformers_says(target: Path, head: Path, drafts: str, graphs: str):
    settings = DRAFTS[drafts]
    check(target, head if settings is not None else None, graphs=graphs, **(settings or {}))


@pytest.mark.slow
def test_steps_launched_ahead_and_adaptive_drafts_keep_the_tokens(target: Path, head: Path):
    check(target, head, overlap="on", spec_adaptive="on", graphs="on")


@pytest.mark.slow
def test_a_vocabulary_that_ranks_cannot_share_evenly(toy_checkpoint: Callable[..., Path]):
    check(toy_checkpoint("gemma3", num_hidden_layers=2, vocab_size=257), "ngram", graphs="on")


@pytest.mark.slow
def test_more_ranks_than_kv_heads_have_copies(toy_checkpoint: Callable[..., Path]):
    check(toy_checkpoint("llama", num_hidden_layers=2, num_key_value_heads=1), None, tp=4)


@pytest.mark.slow
def test_sampled_edited_and_scored_answers_are_those_of_one_rank(target: Path, head: Path):
    prompts = [random_ids(length, seed=length) for length in (5, 20, 33)]
    wishes = [
        {"temperature": 0.8, "seed": 7, "top_p": 0.9},
        {"temperature": 0.7, "seed": 8, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 4.0}},
    ]
    alone = sampled(worker_of(target, head, 16), prompts, wishes)
    with tp_worker(target, head, 2, graphs="on") as worker:
        assert sampled(worker, prompts, wishes) == alone


def sampled(worker: DecodeWorker, prompts: list[list[int]], wishes: list[dict]) -> list[list[int]]:
    """The tokens of one batch, each prompt with sampling of its own."""
    rooms = [secrets.token_hex(16) for _ in prompts]
    for room, ids, wish in zip(rooms, prompts, wishes, strict=True):
        sampling = Sampling(max_new_tokens=NUM_TOKENS, ignore_eos=True, **wish)
        order = Reserve(room=room, epoch=0, instance=D, prompt_ids=ids, sampling=sampling, deadline_ms=0)
        worker.handle(order, now=0.0)
    while worker.num_rooms:
        worker.step()
    said: dict[str, list[int]] = {}
    for message in worker.link.heard:
        for item in message.items if isinstance(message, Tokens) else ():
            said.setdefault(item.room, []).extend(item.ids)
    return [said[room] for room in rooms]


def test_two_ranks_with_drafts_answer_two_prompts(target: Path, head: Path):
    """The cheap witness of the slow laws."""
    model = reference_model(target)
    prompts = [tuple(random_ids(length, seed=length)) for length in LENGTHS[1:3]]
    with tp_worker(target, head, 2) as worker:
        assert ask(worker, prompts, 5) == [
            toy_models.reference_greedy(model, list(ids), 5) for ids in prompts
        ]


@pytest.mark.slow
@pytest.mark.smollm2
def test_three_ranks_of_the_real_model_say_what_transformers_says(
    smollm2_dir: Path, reference_greedy: dict[str, Reference]
):
    """It has 9 heads and 3 KV heads; two ranks are refused (`test_cuts`)."""
    shortest = min(reference_greedy.values(), key=lambda one: len(one.prompt_ids))
    sizes = {"page_size": 16, "max_context": 256}
    with tp_worker(smollm2_dir, None, 3, **sizes) as worker:
        found = ask(worker, [tuple(shortest.prompt_ids)], 8)
    assert found == [shortest.output_ids[:8]]
