"""Prefill and decode workers of unequal numbers of GPUs: answers of transformers, by slabs on the GPUs.

Roles share cards, so a hand-off goes within a card and between cards; with fewer cards than ranks the ranks
of a worker do, too. Run this file alone: workers whose kernels wait for each other are slow on cards with
other work.
"""

import os
import shutil

import pytest
import torch
from baton.tests.cluster.random_heads import random_head
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import at_once, complete, random_ids, serving, wait_free
from baton.tests.cluster.test_unequal_ranks import with_ranks
from baton.tests.parity.toy_models import reference_greedy, reference_model

NUM_CARDS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_CARDS < 2, reason="needs two CUDA devices")]

VOCAB, LENGTHS, NUM_TOKENS = 330, (1, 40, 333, 900), 24
SETTINGS = {
    "kv_memory_mb": 256, "threads": 1, "watchdog_s": 60.0, "local_prefill": False, "graphs": "on",
    "spec_adaptive": "off", "chunk_size": 512, "max_running": 8,
}  # fmt: skip


def cards_of(prefill: int, decode: int) -> dict[str, str]:
    """Prefill has the first cards, decode the last ones, of as many as the larger of both needs."""
    visible = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    cards = (visible or [str(at) for at in range(NUM_CARDS)])[: max(prefill, decode)]
    return {"prefill": ",".join(cards[:prefill]), "decode": ",".join(cards[-decode:])}


def check(model, head, prefill, decode, *, cards=None, transport="cuda_slab", **settings):
    """Two rounds of prompts, so that pairs of ranks have slabs in the second one whatever the first did."""
    command_of = with_ranks(prefill, decode, cards=cards)
    reference = reference_model(model)
    with serving(
        model, head, prefill=1, decode=1, command_of=command_of, ready_s=300.0, **(SETTINGS | settings)
    ) as cluster:
        for first in (0, 10_000):
            prompts = [random_ids(count, VOCAB, seed=first + count) for count in LENGTHS]
            jobs = [lambda ids=ids: complete(cluster, ids, max_tokens=NUM_TOKENS) for ids in prompts]
            answers = at_once(jobs, len(jobs))
            timelines = [document["timeline"] for _, document in answers]
            for prompt, (tokens, _) in zip(prompts, answers, strict=True):
                assert tokens == reference_greedy(reference, prompt, NUM_TOKENS), f"{len(prompt)} tokens"
            assert not any(timeline["local_prefill"] for timeline in timelines)
            assert all(timeline["verify_steps"] for timeline in timelines), "the head drafted"
        assert [timeline["handoff_transport"] for timeline in timelines] == [transport] * len(LENGTHS)
        wait_free(cluster)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_kv_heads"),
    [
        (1, 2, 2),
        (2, 1, 2),
        (4, 2, 4),
        (2, 4, 4),
        (4, 2, 2),
        (2, 4, 2),
    ],
)
def test_answers_are_those_of_transformers(
    toy_checkpoint, tmp_path, prefill: int, decode: int, num_kv_heads: int
):
    """2 KV heads are copied on 4 ranks, and the other role pulls one copy, or from both."""
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": num_kv_heads}
    path = toy_checkpoint("llama", **sizes, vocab_size=VOCAB, max_position_embeddings=1 << 12)
    model = save_tokenizer(shutil.copytree(path, tmp_path / "toy"))
    head = random_head(model, tmp_path / "head", 3, (0, 1, 2))
    cards = cards_of(prefill, decode)
    check(model, head, prefill, decode, cards=cards, device="cuda", is_watched=False)
