"""The loss of a batch by its definition: over some tokens, with the weights of drafts that a server makes."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from baton.tests.unit.training.toy_run import STEPS, VOCAB, ToyRun, toy_run
from baton.training import output_loss
from baton.training.chain import STEP_DECAY
from baton.training.dflash import DflashTrainee, draw_anchors, pace_weights
from baton.training.frozen_target import FrozenTarget
from baton.training.kinds import HeadSettings
from baton.training.loss_vocabulary import LossVocabulary, places_in
from baton.training.mtp import MtpTrainee
from baton.training.samples import Batch, BatchPlan
from baton.training.trainee import StepLosses, Trainee

SIZE = 24  # so few that some answers have tokens outside
BLOCK = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return toy_run(tmp_path_factory.mktemp("toy"))


def trainee_of(run: ToyRun, folder: Path, settings: HeadSettings) -> tuple[Trainee, FrozenTarget]:
    counts = run.samples.counts(VOCAB)
    settings = settings.resolved(run.config, counts)
    settings.write_config(folder, run.model, run.config)
    target = FrozenTarget(run.target.model, settings.layers)
    return settings.trainee(folder, run.config, target, counts), target


def a_batch(run: ToyRun) -> Batch:
    plan = BatchPlan(samples=run.samples, max_tokens=256, max_length=64, seed=5)
    return next(iter(plan.batches(0)))


def drawn(run: ToyRun, batch: Batch) -> torch.Tensor:
    vocabulary = LossVocabulary(run.samples.counts(VOCAB), SIZE, torch.device("cpu"))
    return vocabulary.draw(batch.seed)


def others_left_out(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    left_out = torch.ones(VOCAB, dtype=torch.bool)
    left_out[ids] = False
    return logits.masked_fill(left_out, float("-inf"))


def assert_same_gradients(trainee: torch.nn.Module, found: StepLosses, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.objective, wanted)
    parameters = list(trainee.parameters())
    ours = torch.autograd.grad(found.objective, parameters)
    for one, other in zip(ours, torch.autograd.grad(wanted, parameters, allow_unused=True), strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


@pytest.mark.parametrize("parts", [1 << 28, 3 * SIZE * 7])
@pytest.mark.parametrize("missed", [1.0, 0.25])
def test_a_chain_s_loss_is_that_of_the_drawn_tokens(
    run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missed: float, parts: int
) -> None:
    monkeypatch.setattr(output_loss, "PART_ELEMENTS", parts)  # seven columns at a time
    settings = HeadSettings(kind="mtp", steps=STEPS, loss_vocab=SIZE, missed=missed)
    trainee, target = trainee_of(run, tmp_path, settings)
    assert isinstance(trainee, MtpTrainee)
    batch = a_batch(run)
    rows, ids = target.rows(batch.tokens), drawn(run, batch)
    all_wanted = target.logits(rows.hidden.flatten(0, 1)).view(*batch.tokens.shape, -1)
    wanted = torch.zeros(())
    unknown = 0
    chance: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)  # of a chain, by its sample and root
    for step, out in enumerate(trainee.outputs(batch.tokens, rows)):
        logits = others_left_out(trainee.norm(out) @ target.model.lm_head.T, ids).log_softmax(-1)
        losses = []
        for sample in range(len(batch.tokens)):
            # output i of this step predicts what row i+1+step of the target does, if its token was generated
            for i in range(batch.tokens.shape[1] - 2 - step):
                if batch.mask[sample, i + 2 + step]:
                    given = all_wanted[sample, i + 1 + step]
                    shares = others_left_out(given, ids).softmax(-1)
                    is_known = bool((ids == given.argmax()).any())
                    unknown += not is_known
                    loss = -(shares[ids] * logits[sample, i, ids]).sum()
                    losses.append(chance[sample, i] * is_known * loss)
                    if logits[sample, i].argmax() != given.argmax():
                        chance[sample, i] *= missed
        wanted = wanted + STEP_DECAY**step * torch.stack(losses).mean()
    assert unknown
    assert_same_gradients(trainee, trainee(batch, rows), wanted)


def test_a_block_s_loss_is_that_of_the_drawn_tokens(run: ToyRun, tmp_path: Path) -> None:
    settings = HeadSettings(kind="dflash", block_size=BLOCK, num_layers=1, num_anchors=8, loss_vocab=SIZE)
    trainee, target = trainee_of(run, tmp_path, settings)
    assert isinstance(trainee, DflashTrainee)
    batch = a_batch(run)
    rows, ids = target.rows(batch.tokens), drawn(run, batch)
    anchors = draw_anchors(batch.mask, 8, batch.seed)
    outs = trainee.outputs(batch.tokens, rows.features, anchors.places)
    logits = others_left_out(outs @ target.model.lm_head.T, ids).log_softmax(-1)
    wanted, blocks, unknown = torch.zeros(()), 0, 0
    for sample, index in anchors.is_real.nonzero().tolist():
        anchor = int(anchors.places[sample, index])
        generated = batch.mask[sample, anchor + 1 : anchor + BLOCK].tolist()
        size = generated.index(False) if False in generated else len(generated)
        labels = batch.tokens[sample, anchor + 1 : anchor + 1 + size]
        places, known = places_in(ids, labels)
        losses = F.nll_loss(logits[sample, index, 1 : 1 + size][:, ids], places, reduction="none")
        likelihood = (-losses.detach()).exp().where(known, 0.0)[:, None]
        weights = pace_weights(likelihood, torch.ones(size, 1, dtype=torch.bool))[:, 0]
        wanted = wanted + (weights * losses * known).sum()
        blocks, unknown = blocks + 1, unknown + int((~known).sum())
    assert unknown
    assert_same_gradients(trainee, trainee(batch, rows), wanted / blocks)


def test_frequent_tokens_are_always_drawn_and_each_other_one_sometimes() -> None:
    counts = torch.arange(VOCAB)
    vocabulary = LossVocabulary(counts, SIZE, torch.device("cpu"))
    seen = torch.zeros(VOCAB, dtype=torch.int64)
    for seed in range(60):
        ids = vocabulary.draw(seed)
        assert len(ids) == SIZE
        assert (ids[1:] > ids[:-1]).all()
        assert torch.equal(ids, vocabulary.draw(seed))
        seen[ids] += 1
    assert (seen[-SIZE * 3 // 4 :] == 60).all()
    others = seen[: -SIZE * 3 // 4]
    assert (others > 0).all()
    assert (others < 60).all()


def test_blocks_continue_with_the_mask_token_and_layers_they_began_with(run: ToyRun, tmp_path: Path) -> None:
    counts = run.samples.counts(VOCAB)
    begun = HeadSettings(kind="dflash", block_size=BLOCK, num_layers=1, layers=(0, 3), mask_token=9)
    begun.resolved(run.config, counts).write_config(tmp_path, run.model, run.config)
    settings = HeadSettings(kind="dflash", block_size=BLOCK, num_layers=1, init=tmp_path)
    found = settings.resolved(run.config, counts)
    assert (found.layers, found.mask_token) == ((0, 3), 9)
    assert HeadSettings(kind="dflash").resolved(run.config, counts).layers != (0, 3)
