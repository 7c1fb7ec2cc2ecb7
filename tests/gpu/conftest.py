"""A random bfloat16 Llama of 8 layers of width 1024 with an EAGLE3 head, and 200 prompts for it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from baton.tests.parity.answer_engine import Models
from baton.tests.parity.eagle3_toys import toy_target

VOCAB, MAX_PROMPT, NUM_PROMPTS = 32000, 200, 200


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = toy_target(
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=8,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        dtype="bfloat16",
    )
    yield Models(config, torch.bfloat16, "cuda")
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of 1 to MAX_PROMPT - 1 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, MAX_PROMPT, (NUM_PROMPTS,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the figures that tests have recorded (`record_property`), also those of other processes."""
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
