"""Texts of the engine in this process are those of the model, in any batch, and become samples."""

import json
import shutil
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


def greedy(target: FrozenTarget, prompt: list[int], count: int, end: int = END) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != end:
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


def test_answers_past_the_end_are_whole_and_long_prompts_have_room(run: ToyRun, tmp_path: Path) -> None:
    long, lines = list(range(3, 53)), [[4, 5 + number] for number in range(8)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in [long, *lines]))
    model = shutil.copytree(run.model, tmp_path / "model")
    end = greedy(run.target, lines[0], 3, end=-1)[-1]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    (model / "generation_config.json").unlink()

    def answers(out: str, *more: str) -> dict[tuple[int, ...], list[int]]:
        assert main([
            "collect", "--model", str(model), "--out", str(tmp_path / out), "--prompts", str(prompts),
            "--concurrency", "4", "--max-answer", "9", "--greedy-share", "1", "--device", "cpu", "--dtype",
            "float32", *more,
        ]) == 0  # fmt: skip
        samples = read_samples([tmp_path / out], VOCAB)
        asked = [samples.prompt(index) for index in range(len(samples))]
        return {ids: list(samples.sample(i).tokens[len(ids) :]) for i, ids in enumerate(asked)}

    ended = answers("a", "--max-prompt", "40")
    assert ended == {tuple(ids): greedy(run.target, ids, 9, end) for ids in lines}, "50 tokens leave no room"
    assert len(ended[tuple(lines[0])]) < 9
    whole = answers("b", "--past-end-share", "1")
    assert whole == {tuple(ids): greedy(run.target, ids, 9, end=-1) for ids in [long, *lines]}
