"""A run that was killed ends as one that was not, and bad samples are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.tests.unit.training.toy_run import VOCAB, ToyRun, settings, toy_run
from baton.training import trainer as training_loop
from baton.training.run_state import CURVE
from baton.training.samples import BatchPlan, Sample, SampleWriter, read_samples
from baton.training.trainer import Ranks, Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return toy_run(tmp_path_factory.mktemp("toy"))


class Killed(Exception):
    pass


def curve(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / CURVE).read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "lr", "accuracy")} for line in lines]


def test_a_run_killed_at_three_points_ends_as_an_unbroken_one(
    run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    reference = run.trainee()
    done = Trainer(reference, run.target, run.samples, settings(), whole, ranks=Ranks()).run()
    for number, limit in enumerate((1, 4, 8, None)):
        # from the third on, weights come from the state and not from this start
        trainee = run.trainee(seed=0 if number < 2 else 9)
        trainer = Trainer(trainee, run.target, run.samples, settings(), broken, ranks=Ranks())
        rates = training_loop.learning_rate

        def rate(step: int, total: int, chosen: training_loop.TrainSettings, limit=limit, rates=rates):
            if limit is not None and step >= limit:
                raise Killed
            return rates(step, total, chosen)

        with monkeypatch.context() as patch:
            patch.setattr(training_loop, "learning_rate", rate)
            if limit is None:
                again = trainer.run()
            else:
                with pytest.raises(Killed):
                    trainer.run()
    assert curve(broken) == curve(whole)
    assert (again.step, again.num_samples) == (done.step, done.num_samples) == (done.step, 2 * 48)
    for (name, ours), (_, theirs) in zip(
        trainee.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_run_with_other_settings_is_refused(run: ToyRun, tmp_path: Path) -> None:
    Trainer(run.trainee(), run.target, run.samples, settings(epochs=1), tmp_path, ranks=Ranks()).run()
    other = Trainer(
        run.trainee(), run.target, run.samples, settings(epochs=1, lr=1e-4), tmp_path, ranks=Ranks()
    )
    with pytest.raises(CheckpointError, match=r"lr 0\.003, now it is 0\.0001"):
        other.run()


def test_ranks_divide_the_batches_of_one_process_among_them(run: ToyRun) -> None:
    def plan(rank: int, num_ranks: int) -> BatchPlan:
        return BatchPlan(
            samples=run.samples, max_tokens=100, max_length=20, seed=1, rank=rank, num_ranks=num_ranks
        )

    alone = [batch.tokens for batch in plan(0, 1).batches(3)]
    shared = [list(plan(rank, 2).batches(3)) for rank in (0, 1)]
    merged = [batch.tokens for pair in zip(*shared, strict=True) for batch in pair]
    assert len(alone) - len(merged) in (0, 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(alone, merged, strict=False))
    assert max(batch.numel() for batch in alone) <= 100
    assert all(batch.shape[1] <= 20 for batch in alone)
    later = [batch.tokens for batch in plan(0, 1).batches(3, first=2)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(alone[2:], later, strict=True))
    other = [batch.tokens for batch in plan(0, 1).batches(4)]
    assert any(
        ours.shape != theirs.shape or not torch.equal(ours, theirs)
        for ours, theirs in zip(alone, other, strict=False)
    )


def test_samples_come_back_from_their_shards_as_written(tmp_path: Path) -> None:
    written = [Sample(list(range(3, 3 + n)), [0] + [1] * (n - 1)) for n in (2, 9, 5, 7)]
    writer = SampleWriter(tmp_path, shard_tokens=10)
    for sample in [*written, Sample([4], [1])]:
        writer.add(sample)
    writer.flush()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    samples = read_samples([tmp_path], VOCAB)
    assert [samples.sample(i) for i in range(len(samples))] == written
    more = SampleWriter(tmp_path)
    more.add(written[0])
    more.flush()
    assert len(read_samples([tmp_path], VOCAB)) == 5


def test_bad_shards_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="baton draft collect"):
        read_samples([tmp_path], VOCAB)
    writer = SampleWriter(tmp_path)
    writer.add(Sample([1, 2, VOCAB], [0, 1, 1]))
    writer.flush()
    with pytest.raises(CheckpointError, match=f"token {VOCAB} is outside"):
        read_samples([tmp_path], VOCAB)
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=path.name):
        read_samples([tmp_path], 256)
