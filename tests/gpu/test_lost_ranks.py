"""Two workers of two GPUs each, one of which loses a rank under streams; afterwards the cards are as before.

With less than four GPUs both workers share the first two. Run this file alone: other work on the cards would
change the memory that is measured.
"""

import shutil

import pytest
import torch
from baton.tests.cluster.random_heads import random_head
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import wait_until
from baton.tests.cluster.test_tensor_parallel import VOCAB, check_losses
from baton.tests.cluster.test_unequal_ranks import with_ranks
from baton.tests.gpu.test_unequal_ranks import cards_of

NUM_CARDS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_CARDS < 2, reason="needs two CUDA devices")]

NUM_TOKENS = 600  # so many that streams run for seconds
SETTINGS = {
    "aggregated": True, "kv_memory_mb": 256, "threads": 1, "watchdog_s": 10.0,
    "stall_timeout_s": 4.0, "graphs": "on", "spec_adaptive": "off", "chunk_size": 256, "max_running": 8,
}  # fmt: skip
LEFT, GIVEN_BACK_S = 64 << 20, 20.0  # bytes of a card that may be missing afterwards; seconds


def free_memory() -> list[int]:
    """Free bytes of each card."""
    return [torch.cuda.mem_get_info(card)[0] for card in range(NUM_CARDS)]


@pytest.fixture(scope="module")
def free_before() -> list[int]:
    """Before any cluster; this process has a context on every card, so that it takes no more later."""
    for card in range(NUM_CARDS):
        torch.zeros(1, device=f"cuda:{card}")
        torch.cuda.synchronize(card)
    return free_memory()


@pytest.fixture(scope="module")
def model(tmp_path_factory, toy_checkpoint):
    sizes = {"num_hidden_layers": 3, "vocab_size": VOCAB, "max_position_embeddings": 1 << 12}
    folder = tmp_path_factory.mktemp("lost") / "toy"
    return save_tokenizer(shutil.copytree(toy_checkpoint("llama", **sizes), folder))


def test_a_dead_and_a_stopped_rank_cost_no_stream_and_no_memory_of_a_card(model, tmp_path, free_before):
    head = random_head(model, tmp_path, 3, (0, 1, 2))
    ranks = {"command_of": with_ranks(2, 2, cards=cards_of(2, 2))} if NUM_CARDS < 4 else {"tp": 2}
    check_losses(
        model, head, NUM_TOKENS, device="cuda", is_watched=False, ready_s=300.0, **(SETTINGS | ranks)
    )
    wait_until(
        lambda: all(now > before - LEFT for now, before in zip(free_memory(), free_before, strict=True)),
        GIVEN_BACK_S,
        f"free memory of {free_before} bytes",
    )
