"""Processes serve a model whose pages hold side caches, over each transport between processes."""

from pathlib import Path

import pytest
import torch
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import complete, serving
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.sparse_toys import Reference, built, sparse_config, write_sparse_checkpoint
from baton.tests.parity.toy_engine import random_ids

NUM_TOKENS = 24


@pytest.mark.parametrize("transports", ["shm,zmq_blocks", "zmq_blocks"])
def test_a_cluster_gives_the_tokens_of_the_definition(tmp_path: Path, transports: str):
    """Cold, then with the prompts cached on both sides; several chunks and pages per prompt."""
    model = built(sparse_config(vocab_size=330), torch.float32)
    target = save_tokenizer(write_sparse_checkpoint(tmp_path / "target", model))
    tensors = head_tensors()
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 3), vocab_size=330), tensors_for(tensors))
    reference = Reference(model)
    settings = {"transport": "tcp", "kv_memory_mb": 8, "threads": 1, "chunk_size": 48, "graphs": "on"}
    with serving(target, head, transports=transports, **settings) as cluster:
        for _ in range(2):
            for length in (30, 130):
                prompt = random_ids(length, seed=length, vocab_size=330)
                tokens, _ = complete(cluster, prompt, max_tokens=NUM_TOKENS)
                assert len(tokens) == NUM_TOKENS
                assert reference.would_say(prompt, tokens)


def tensors_for(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A head for a target of 330 tokens."""
    grown = torch.nn.functional.pad(tensors["t2d"], (0, 330 - len(tensors["t2d"])))
    return tensors | {"t2d": grown}
