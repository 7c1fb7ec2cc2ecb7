"""A loss over some tokens is that over all, where the logits of the others are left out."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from baton.tests.unit.training.toy_run import STEPS, VOCAB, ToyRun, toy_run
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


def test_a_chain_s_loss_is_that_of_the_drawn_tokens(run: ToyRun, tmp_path: Path) -> None:
    trainee, target = trainee_of(run, tmp_path, HeadSettings(kind="mtp", steps=STEPS, loss_vocab=SIZE))
    assert isinstance(trainee, MtpTrainee)
    batch = a_batch(run)
    rows, ids = target.rows(batch.tokens), drawn(run, batch)
    all_wanted = target.logits(rows.hidden.flatten(0, 1)).view(*batch.tokens.shape, -1)
    wanted = torch.zeros(())
    unknown = 0
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
                    losses.append(is_known * -(shares[ids] * logits[sample, i, ids]).sum())
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
