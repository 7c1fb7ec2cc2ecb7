"""A tiny target, samples of its own greedy answers, and a head to train on them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from baton.engine.models.config import ModelConfig
from baton.engine.models.registry import load_model_config
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.tests.parity.toy_models import write_toy_checkpoint
from baton.training.eagle3 import Eagle3Trainee
from baton.training.frozen_target import FrozenTarget
from baton.training.head_files import draft_vocabulary, write_eagle3_config
from baton.training.samples import Sample, SampleSet, SampleWriter, read_samples
from baton.training.trainer import TrainSettings

LAYERS = (1, 2, 4)
VOCAB = 64
STEPS = 3


@dataclass(frozen=True)
class ToyRun:
    """The paths and models of one run. `samples` begin with two random tokens; the target wrote the rest."""

    model: Path
    head: Path
    config: ModelConfig
    target: FrozenTarget
    samples: SampleSet

    def trainee(self, draft_vocab: int = VOCAB, seed: int = 0) -> Eagle3Trainee:
        write_eagle3_config(self.head, self.model, self.config, LAYERS, draft_vocab)
        draft = load_draft_config(self.head, self.config, dtype="float32", convention="output")
        ids = draft_vocabulary(self.samples.counts(VOCAB), draft_vocab)
        return Eagle3Trainee(draft, self.target, ids, steps=STEPS, seed=seed)


def toy_run(folder: Path, num_samples: int = 48, length: int = 24) -> ToyRun:
    model = folder / "target"
    write_toy_checkpoint(model, "llama", num_hidden_layers=6, vocab_size=VOCAB, hidden_size=32)
    target = FrozenTarget.load(model, LAYERS, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (num_samples, 2), generator=generator)
    while tokens.shape[1] < length:
        logits = target.logits(target.rows(tokens).hidden[:, -1])
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
    writer = SampleWriter(folder / "samples")
    for row, ids in enumerate(tokens.tolist()):
        kept = length - row % 5
        writer.add(Sample(ids[:kept], [0, 0] + [1] * (kept - 2)))
    writer.flush()
    samples = read_samples([folder / "samples"], VOCAB)
    return ToyRun(model, folder / "head", load_model_config(model), target, samples)


def settings(**changes: object) -> TrainSettings:
    values: dict[str, object] = {
        "epochs": 2, "max_tokens": 256, "max_length": 64, "lr": 3e-3, "save_every": 3,
    }  # fmt: skip
    return TrainSettings(**(values | changes))  # type: ignore[arg-type]
