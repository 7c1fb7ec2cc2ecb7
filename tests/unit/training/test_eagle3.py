"""The trained chain is the served chain, and training raises the accept length that the engine measures."""

from pathlib import Path

import pytest
import torch
from baton.engine.speculative.drafters.eagle3_head import DraftPhase
from baton.engine.speculative.drafters.eagle3_weights import load_eagle3
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.kernels.attention_form import AttentionForm
from baton.tests.unit.training.toy_run import STEPS, VOCAB, ToyRun, settings, toy_run
from baton.training.evaluate import held_out_prompts, measure
from baton.training.head_files import write_weights
from baton.training.samples import Batch
from baton.training.trainer import Ranks, Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return toy_run(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("draft_vocab", [VOCAB, 40])
def test_outputs_of_every_step_equal_a_served_chain_from_each_row(run: ToyRun, draft_vocab: int) -> None:
    trainee = run.trainee(draft_vocab, seed=5)
    write_weights(run.head, trainee.checkpoint_tensors(), torch.float32)
    config = load_draft_config(run.head, run.config, dtype="float32")
    head = load_eagle3(config, dtype=torch.float32)
    head.share(run.target.model.embed_tokens, run.target.model.lm_head, 512)
    tokens = torch.tensor([run.samples.sample(0).tokens])
    rows = run.target.rows(tokens)
    with torch.no_grad():
        steps = list(trainee.outputs(tokens, rows))
    for root in range(tokens.shape[1] - STEPS - 1):
        stored: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm
        ) -> torch.Tensor:
            stored.append((k, v))  # noqa: B023
            keys, values = (torch.cat(parts) for parts in zip(*stored, strict=True))  # noqa: B023
            mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
            out = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q, keys, values)), attn_mask=mask, enable_gqa=True
            )
            return out[0].transpose(0, 1)

        out = head.forward(
            rows.features[0, : root + 1], tokens[0, 1 : root + 2], torch.arange(root + 1), attend,
            DraftPhase.FROM_TARGET_FEATURES,
        )  # fmt: skip
        torch.testing.assert_close(steps[0][0, root], out[-1], rtol=1e-4, atol=1e-5)
        for step in range(1, STEPS):
            out = head.forward(
                head.feedback(out[-1:]), tokens[0, root + 1 + step][None], torch.tensor([root + step]),
                attend, DraftPhase.SELF_CHAIN,
            )  # fmt: skip
            torch.testing.assert_close(steps[step][0, root], out[-1], rtol=1e-4, atol=1e-5)


def test_padding_and_neighbours_change_no_sum(run: ToyRun) -> None:
    trainee = run.trainee()
    alone, short = (torch.tensor([run.samples.sample(i).tokens]) for i in (0, 4))
    width = alone.shape[1]
    both = torch.cat((alone, torch.nn.functional.pad(short, (0, width - short.shape[1]))))
    mask = torch.zeros_like(both, dtype=torch.bool)
    mask[0, 2:] = mask[1, 2 : short.shape[1]] = True
    with torch.no_grad():
        whole = trainee(Batch(both, mask, 2), run.target.rows(both))
        parts = [
            trainee(Batch(ids, mask[i : i + 1, : ids.shape[1]], 1), run.target.rows(ids))
            for i, ids in enumerate((alone, short))
        ]
    sums = [part.loss * part.count for part in (whole, *parts)]
    torch.testing.assert_close(sums[0], sums[1] + sums[2], rtol=1e-4, atol=1e-3)
    assert torch.equal(whole.correct, parts[0].correct + parts[1].correct)
    assert whole.count.tolist() == [float(mask[:, 2 + step :].sum()) for step in range(STEPS)]


@pytest.mark.parametrize("draft_vocab", [pytest.param(VOCAB, marks=pytest.mark.slow), 40])
def test_training_raises_the_accept_length_of_the_engine(
    run: ToyRun, draft_vocab: int, tmp_path: Path
) -> None:
    trained, held_out = run.samples.split(8)
    trainee = run.trainee(draft_vocab)
    prompts = held_out_prompts(held_out, 8, 100)
    lengths = []
    for epochs in (0, 30):
        if epochs:
            chosen = settings(epochs=epochs, save_every=1000)
            Trainer(trainee, run.target, trained, chosen, tmp_path, ranks=Ranks()).run()
        write_weights(run.head, trainee.checkpoint_tensors(), torch.float32)
        counts = measure(
            run.model, run.head, prompts, steps=STEPS, num_tokens=20, device="cpu", dtype="float32"
        )
        lengths.append(counts.accept_length)
    assert lengths[0] < 1.3
    assert lengths[1] > lengths[0] + 0.5, lengths
