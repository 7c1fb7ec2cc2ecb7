"""Every row of a training forward is that of the served drafter, for DFLASH blocks and MTP chains."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.models.interface import CausalLM
from baton.engine.speculative.drafters.dflash_config import load_dflash_config
from baton.engine.speculative.drafters.dflash_head import DflashHead
from baton.engine.speculative.drafters.dflash_weights import load_dflash
from baton.engine.speculative.drafters.eagle3_head import DraftPhase
from baton.engine.speculative.drafters.mtp_config import load_mtp_config
from baton.engine.speculative.drafters.mtp_head import MtpHead
from baton.engine.speculative.drafters.mtp_weights import load_mtp
from baton.kernels.attention_form import AttentionForm
from baton.tests.unit.training.toy_run import STEPS, VOCAB, ToyRun, toy_run
from baton.training import dflash as training_dflash
from baton.training.chain_attention import chain_attention, plain_chain_attention
from baton.training.dflash import DflashTrainee, draw_anchors, pace_weights
from baton.training.frozen_target import FrozenTarget
from baton.training.head_files import write_weights
from baton.training.kinds import HeadSettings
from baton.training.mtp import MtpTrainee

BLOCK = 4
KeysValues = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return toy_run(tmp_path_factory.mktemp("toy"))


def perturbed(module: torch.nn.Module) -> None:
    """All weights differ from their first values, so that no norm or projection can be left out unseen."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, keys, values)), attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def model_of(run: ToyRun) -> CausalLM:
    return run.target.model


def dflash(run: ToyRun, folder: Path) -> tuple[DflashTrainee, DflashHead, FrozenTarget]:
    settings = HeadSettings(kind="dflash", block_size=BLOCK, num_layers=2, num_anchors=8)
    counts = run.samples.counts(VOCAB)
    settings = settings.resolved(run.config, counts)
    settings.write_config(folder, run.model, run.config)
    target = FrozenTarget(run.target.model, settings.layers)
    trainee = settings.trainee(folder, run.config, target, counts)
    assert isinstance(trainee, DflashTrainee)
    perturbed(trainee)
    write_weights(folder, trainee.checkpoint_tensors(), torch.float32)
    head = load_dflash(load_dflash_config(folder, run.config, dtype="float32"), dtype=torch.float32)
    model = model_of(run)
    head.share(model.embed_tokens, model.lm_head, 512)
    return trainee, head, target


def assert_blocks_are_served(
    run: ToyRun, trainee: DflashTrainee, head: DflashHead, target: FrozenTarget
) -> None:
    tokens = torch.tensor([run.samples.sample(0).tokens])
    features = target.rows(tokens).features
    anchors = torch.tensor([[0, 1, 5, 9, tokens.shape[1] - 2]])
    with torch.no_grad():
        blocks = trainee.outputs(tokens, features, anchors)[0]
    for block, anchor in zip(blocks, anchors[0].tolist(), strict=True):
        # the features of the anchor itself are not there when a server drafts
        context = head.project(features[0, :anchor], torch.arange(anchor))

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm
        ) -> torch.Tensor:
            keys = torch.cat((context.keys[:, layer], k))  # noqa: B023
            values = torch.cat((context.values[:, layer], v))  # noqa: B023
            return attended(q, keys, values, torch.ones(len(q), len(keys), dtype=torch.bool))

        hidden = head.embed_block(tokens[0, anchor][None], BLOCK)
        out = head.forward(hidden, anchor + torch.arange(BLOCK), [attend] * 2)
        torch.testing.assert_close(block, out, rtol=1e-4, atol=1e-5)


def mtp(run: ToyRun, folder: Path) -> tuple[MtpTrainee, MtpHead]:
    settings = HeadSettings(kind="mtp", steps=STEPS)
    counts = run.samples.counts(VOCAB)
    settings = settings.resolved(run.config, counts)
    settings.write_config(folder, run.model, run.config)
    trainee = settings.trainee(folder, run.config, run.target, counts)
    assert isinstance(trainee, MtpTrainee)
    perturbed(trainee)
    write_weights(folder, trainee.checkpoint_tensors(), torch.float32)
    head = load_mtp(load_mtp_config(folder, run.config, dtype="float32"), 1, dtype=torch.float32)
    model = model_of(run)
    head.share(model.embed_tokens, model.lm_head, model.norm, 512)
    return trainee, head


def assert_chains_are_served(run: ToyRun, trainee: MtpTrainee, head: MtpHead) -> None:
    tokens = torch.tensor([run.samples.sample(0).tokens])
    rows = run.target.rows(tokens)
    with torch.no_grad():
        steps = list(trainee.outputs(tokens, rows))
    for root in range(tokens.shape[1] - STEPS - 1):
        stored: list[KeysValues] = []

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm
        ) -> torch.Tensor:
            stored.append((k, v))  # noqa: B023
            keys, values = (torch.cat(parts) for parts in zip(*stored, strict=True))  # noqa: B023
            mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
            return attended(q, keys, values, mask)

        out = head.forward(
            rows.hidden[0, : root + 1], tokens[0, 1 : root + 2], torch.arange(root + 1), attend,
            DraftPhase.FROM_TARGET_FEATURES,
        )  # fmt: skip
        torch.testing.assert_close(steps[0][0, root], out[-1], rtol=1e-4, atol=1e-5)
        for step in range(1, STEPS):
            out = head.forward(
                head.feedback(out[-1:]), tokens[0, root + 1 + step][None], torch.tensor([root + step]),
                attend, DraftPhase.SELF_CHAIN,
            )  # fmt: skip
            torch.testing.assert_close(steps[step][0, root], out[-1], rtol=1e-4, atol=1e-5)


def test_a_trained_block_is_the_served_block_at_every_anchor(run: ToyRun, tmp_path: Path) -> None:
    assert_blocks_are_served(run, *dflash(run, tmp_path))


def test_a_trained_chain_of_a_module_is_the_served_chain(run: ToyRun, tmp_path: Path) -> None:
    assert_chains_are_served(run, *mtp(run, tmp_path))


def test_a_context_with_the_anchor_is_not_the_served_one(
    run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dflash(run, tmp_path)
    monkeypatch.setattr(training_dflash, "unseen", lambda places, anchors: places > anchors[..., None])
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_blocks_are_served(run, *made)


def test_another_mask_token_is_not_the_served_one(run: ToyRun, tmp_path: Path) -> None:
    trainee, head, target = dflash(run, tmp_path)
    trainee.config = replace(trainee.config, mask_token_id=trainee.config.mask_token_id + 1)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_blocks_are_served(run, trainee, head, target)


@pytest.mark.parametrize("planted", ["feedback before the norm", "features before the norm"])
def test_a_module_that_recycles_another_hidden_is_not_the_served_one(
    run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    made = mtp(run, tmp_path)
    if planted == "feedback before the norm":
        monkeypatch.setattr(MtpTrainee, "feedback", lambda self, out: out)
    else:
        monkeypatch.setattr(MtpTrainee, "project", lambda self, rows: rows.hidden)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_chains_are_served(run, *made)


def test_a_chain_attends_as_its_definition_says_with_all_gradients() -> None:
    generator = torch.Generator().manual_seed(2)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 9, 8, generator=generator).requires_grad_()

    q, given = random(4), torch.randn(2, 4, 9, 8, generator=generator)
    steps = [(random(2), random(2)) for _ in range(4)]
    leaves = [q, *(x for pair in steps for x in pair)]
    found = [
        (out, *torch.autograd.grad(out, leaves, given))
        for out in (chain_attention(q, steps), plain_chain_attention(q, steps))
    ]
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_anchors_are_generated_tokens_whose_successor_is_generated() -> None:
    mask = torch.tensor(
        [[0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 0]], dtype=torch.bool
    )
    drawn = draw_anchors(mask, 8, seed=1)
    kept = [row[real].tolist() for row, real in zip(drawn.places, drawn.is_real, strict=True)]
    assert kept == [[1, 4, 5], [], [0]]
    few = [draw_anchors(mask, 1, seed=seed).places[0].item() for seed in range(20)]
    assert set(few) == {1, 4, 5}


def test_paced_weights_are_the_gain_of_each_draft_in_expected_length() -> None:
    likelihood = torch.tensor([[0.5, 1.0], [0.2, 1.0], [0.9, 1.0]])
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    reached = torch.tensor([[0.75, 0.75 * 0.6, 0.75 * 0.6 * 0.95], [1.0, 1.0, 0.0]]).T
    wanted = torch.stack([reached[k:].sum(0) for k in range(3)]) * valid
    torch.testing.assert_close(pace_weights(likelihood, valid), wanted)
