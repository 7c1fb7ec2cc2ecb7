"""Log probabilities of a prompt equal those of transformers, over prefill and decode, in any chunks."""

import random

import pytest
import torch
from baton.cluster.protocol.messages import PromptLogprobs
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.toy_models import reference_logits, reference_model
from baton.tests.sim.worker_pair import Pair, name

PROMPTS = [
    [random.Random(seed).randrange(3, 250) for _ in range(length)]
    for seed, length in enumerate((1, 2, 9, 30))
]


class Scored(Pair):
    """Keeps what the router is told of prompts."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.scored = {}

    def _read(self):
        for link in self.links.values():
            for message in link.to_router:
                if isinstance(message, PromptLogprobs):
                    assert message.room not in self.tokens, "before token 1"
                    known = self.scored.setdefault(message.room, [])
                    assert message.start == len(known) + 1
                    known += message.items
        super()._read()


@pytest.fixture(scope="module")
def model(toy_checkpoint):
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(model):
    """Per prompt: (log probability of each token but the first, the three likeliest ids)."""
    reference = reference_model(model)
    found = []
    for prompt in PROMPTS:
        logprobs = torch.log_softmax(reference_logits(reference, prompt), dim=1)
        chosen = logprobs[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None]).flatten()
        found.append((chosen.tolist(), logprobs[:-1].topk(3, dim=1).indices.tolist()))
    return found


@pytest.mark.parametrize("place", ["prefill", "decode", "decode, launched ahead"])
@pytest.mark.parametrize("rows", [1 << 20, 4], ids=["whole", "bounded logits"])
def test_prompt_logprobs_equal_those_of_transformers(model, expected, place, rows, monkeypatch):
    monkeypatch.setattr("baton.engine.prompt_logprobs.MAX_SCORED_LOGITS", rows * 256)
    is_local, overlap = place != "prefill", "on" if "ahead" in place else "off"
    pair = Scored(model, pages=96, chunk_size=7, max_running=8, overlap=overlap)
    for again in (0, 10):  # the second time the prompts are in the prefix cache
        for i, prompt in enumerate(PROMPTS):
            pair.send(name(again + i), prompt, is_local=is_local, prompt_logprobs=3, max_new_tokens=6)
        pair.send(name(again + 9), PROMPTS[2], is_local=is_local, max_new_tokens=6)
        pair.run()
        for i, (chosen, top) in enumerate(expected):
            scores = pair.scored.get(name(again + i), [])
            assert [s.logprob for s in scores] == pytest.approx(chosen, abs=1e-4)
            assert [[token for token, _ in s.top] for s in scores] == top
        assert name(again + 9) not in pair.scored, "nobody asked"
    pair.assert_nothing_is_held()


def test_no_end_token_is_chosen_before_min_new_tokens(model):
    eos = {"ignore_eos": False, "stop_token_ids": list(range(3, 256))}
    pair = Pair(model, pages=96)
    for i, least in enumerate((0, 1, 2, 7)):
        pair.send(name(i), PROMPTS[2], min_new_tokens=least, **eos)
    pair.run()
    assert [len(pair.tokens[name(i)]) for i in range(4)] == [1, 2, 3, 8]
    assert SamplingParams().min_new_tokens == 0
