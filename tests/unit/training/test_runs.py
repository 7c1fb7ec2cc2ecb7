"""A run that was killed ends as one that was not, and bad samples are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.tests.unit.training.toy_run import VOCAB, ToyRun, settings, toy_run
from baton.training import tensor_files
from baton.training import trainer as training_loop
from baton.training.optimizers import ADAMW, MUON, Optimizers
from baton.training.run_state import CURVE, Progress, load_state, save_state
from baton.training.samples import BatchPlan, Sample, SampleSet, SampleWriter, read_samples
from baton.training.trainer import Ranks, Trainer
from safetensors import SafetensorError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return toy_run(tmp_path_factory.mktemp("toy"))


class Killed(Exception):
    pass


def curve(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / CURVE).read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "lr", "accuracy")} for line in lines]


@pytest.mark.parametrize("optimizer", [ADAMW, MUON])
def test_a_run_killed_at_three_points_ends_as_an_unbroken_one(
    run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    reference = run.trainee()
    chosen = settings(optimizer=optimizer)
    done = Trainer(reference, run.target, run.samples, chosen, whole, ranks=Ranks()).run()
    for number, limit in enumerate((1, 4, 8, None)):
        # from the third on, weights come from the state and not from this start
        trainee = run.trainee(seed=0 if number < 2 else 9)
        trainer = Trainer(trainee, run.target, run.samples, chosen, broken, ranks=Ranks())
        rates = training_loop.learning_rate

        def rate(step: int, total: int, given: training_loop.TrainSettings, limit=limit, rates=rates):
            if limit is not None and step >= limit:
                raise Killed
            return rates(step, total, given)

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


def test_a_run_begun_before_optimizers_could_be_chosen_goes_on(run: ToyRun, tmp_path: Path) -> None:
    def trainer(**more: object) -> Trainer:
        chosen = settings(epochs=1, **more)
        return Trainer(run.trainee(), run.target, run.samples, chosen, tmp_path, ranks=Ranks())

    steps = trainer().run().step
    for path in tmp_path.glob("step-*/progress.json"):
        progress = json.loads(path.read_text())
        del progress["settings"]["optimizer"]
        path.write_text(json.dumps(progress))
    assert trainer().run().step == steps
    with pytest.raises(CheckpointError, match="begun with optimizer 'adamw', now it is 'muon'"):
        trainer(optimizer=MUON).run()


@pytest.mark.parametrize("changed", ["layers", "samples"])
def test_a_run_of_other_layers_or_samples_is_refused(run: ToyRun, tmp_path: Path, changed: str) -> None:
    def trainer(samples: SampleSet, layers: list[int]) -> Trainer:
        return Trainer(
            run.trainee(), run.target, samples, settings(epochs=1), tmp_path, ranks=Ranks(),
            about={"layers": layers},
        )  # fmt: skip

    trainer(run.samples, [1, 2, 4]).run()
    assert trainer(run.samples, [1, 2, 4]).run().step > 0
    samples = run.samples
    if changed == "samples":
        samples = SampleSet(samples.tokens.flip(0), samples.mask, samples.offsets)
    with pytest.raises(CheckpointError, match="use the same settings"):
        trainer(samples, [1, 2, 3] if changed == "layers" else [1, 2, 4]).run()


def test_states_are_ordered_by_number(run: ToyRun, tmp_path: Path) -> None:
    module = run.trainee()
    optimizers = Optimizers(module, ADAMW, 1e-3)
    for step in (999_998, 999_999, 1_000_000):
        progress = Progress(step=step, epoch=0, epoch_step=0, num_samples=0, seconds=0.0, settings={})
        save_state(tmp_path, progress, module, optimizers)
    found = load_state(tmp_path, {}, module, optimizers)
    assert found is not None
    assert found.step == 1_000_000


def test_a_state_that_is_torn_is_refused_by_name(run: ToyRun, tmp_path: Path) -> None:
    Trainer(run.trainee(), run.target, run.samples, settings(epochs=1), tmp_path, ranks=Ranks()).run()
    newest = max(tmp_path.glob("step-*"))
    (newest / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=f"{newest.name}: not a readable state"):
        Trainer(run.trainee(), run.target, run.samples, settings(epochs=1), tmp_path, ranks=Ranks()).run()


def test_a_full_disk_leaves_the_shards_and_states_that_are_there(
    run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, sample = SampleWriter(tmp_path / "samples"), Sample([1, 2], [0, 1])
    writer.add(sample)
    writer.flush()
    done = Trainer(run.trainee(), run.target, run.samples, settings(epochs=1), tmp_path, ranks=Ranks()).run()

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "save_file", full)
        writer.add(sample)
        with pytest.raises(CheckpointError, match="is the disk full"):
            writer.flush()
        with pytest.raises(CheckpointError, match="is the disk full"):
            save_state(tmp_path, done, run.trainee(), Optimizers(run.trainee(), ADAMW, 1e-3))
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["samples-00000.safetensors"]
    writer.flush()
    assert len(read_samples([tmp_path / "samples"], VOCAB)) == 2
    again = Trainer(run.trainee(), run.target, run.samples, settings(epochs=1), tmp_path, ranks=Ranks())
    assert again.run().step == done.step


def test_a_shard_that_was_deleted_frees_no_name_of_another(tmp_path: Path) -> None:
    for number in range(3):
        writer = SampleWriter(tmp_path)
        writer.add(Sample([number, 2], [0, 1]))
        writer.flush()
    (tmp_path / "samples-00000.safetensors").unlink()
    one, other = SampleWriter(tmp_path), SampleWriter(tmp_path)
    for writer in (one, other):
        writer.add(Sample([5, 2], [0, 1]))
        writer.flush()
    assert read_samples([tmp_path], VOCAB).tokens.tolist() == [1, 2, 2, 2, 5, 2, 5, 2]


def test_ranks_divide_the_batches_of_one_process_among_them(run: ToyRun) -> None:
    def plan(rank: int, num_ranks: int) -> BatchPlan:
        return BatchPlan(
            samples=run.samples, max_tokens=100, max_length=16, seed=1, rank=rank, num_ranks=num_ranks
        )

    alone = [batch.tokens for batch in plan(0, 1).batches(3)]
    shared = [list(plan(rank, 2).batches(3)) for rank in (0, 1)]
    merged = [batch.tokens for pair in zip(*shared, strict=True) for batch in pair]
    assert len(alone) - len(merged) in (0, 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(alone, merged, strict=False))
    assert max(batch.numel() for batch in alone) <= 100
    assert all(batch.shape[1] <= 16 for batch in alone)
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


def test_samples_of_prompts_held_out_are_left_out(run: ToyRun) -> None:
    some = {run.samples.prompt(1), run.samples.prompt(4)}
    kept = run.samples.without(some)
    wanted = [i for i in range(len(run.samples)) if run.samples.prompt(i) not in some]
    assert 0 < len(kept) < len(run.samples)
    assert [kept.sample(i) for i in range(len(kept))] == [run.samples.sample(i) for i in wanted]
    assert run.samples.prompt(1) == tuple(run.samples.sample(1).tokens[:2])
    assert len(run.samples.without({run.samples.prompt(i) for i in wanted} | some)) == 0


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
