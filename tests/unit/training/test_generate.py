"""Texts of the engine in this process are those of the model, in any batch, and become samples."""

from pathlib import Path

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.tests.unit.training.test_collect import TEMPLATE, tokenizer
from baton.tests.unit.training.toy_run import VOCAB, ToyRun, toy_run
from baton.training.command import main
from baton.training.frozen_target import FrozenTarget
from baton.training.generate import Ask, Generator
from baton.training.samples import read_samples

END = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    made = toy_run(tmp_path_factory.mktemp("toy"))
    tokenizer(TEMPLATE).save_pretrained(made.model)
    return made


def greedy(target: FrozenTarget, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != END:
        logits = target.logits(target.rows(torch.tensor([tokens])).hidden[:, -1])
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_texts_of_a_batch_are_those_of_the_model_and_ask_again(run: ToyRun, launches_ahead: bool) -> None:
    generator = Generator(str(run.model), batch=3, max_tokens=30, device="cpu", dtype="float32")
    generator._decoder.launches_ahead = launches_ahead
    first: dict[int, list[int]] = {}
    second: dict[int, list[int]] = {}

    def ask(number: int) -> Ask:
        def then(ids: list[int]) -> Ask | None:
            first[number] = ids
            if number % 2:
                return None
            sampling = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
            return Ask(prompt=[5, number], sampling=sampling, then=lambda more: second.update({number: more}))

        sampling = SamplingParams(temperature=0.0, max_new_tokens=2 + number)
        return Ask(prompt=[4, 5 + number], sampling=sampling, then=then)

    told: list[int] = []
    generator.run((ask(number) for number in range(8)), told.append)
    assert first == {number: greedy(run.target, [4, 5 + number], 2 + number) for number in range(8)}
    assert set(second) == {0, 2, 4, 6}
    assert {len(ids) for ids in second.values()} == {28}, "as long as there is room"
    assert told[-1] == sum(map(len, [*first.values(), *second.values()]))
    assert generator._engine.cache.allocator.num_free == generator._engine.num_pages, (
        "all pages are free again"
    )


def test_samples_of_this_process_are_distinct_with_greedy_answers(run: ToyRun, tmp_path: Path) -> None:
    assert main([
        "collect", "--model", str(run.model), "--out", str(tmp_path), "--samples", "10", "--concurrency", "4",
        "--max-answer", "5", "--greedy-share", "1", "--device", "cpu", "--dtype", "float32",
    ]) == 0  # fmt: skip
    samples = read_samples([tmp_path], VOCAB)
    prompts = [samples.prompt(index) for index in range(len(samples))]
    assert len(samples) == len(set(prompts)) == 10
    for index, prompt in enumerate(prompts):
        answer = list(samples.sample(index).tokens[len(prompt) :])
        assert answer == greedy(run.target, list(prompt), 5)
