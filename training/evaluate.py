"""Measures a drafter's accept length: held-out prompts through the decode engine itself, greedily."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..engine.batch.extend_batch import extend_batch
from ..engine.batch.forward_batch import CaptureHidden
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.kv.page_table import pages_for
from ..engine.loader import EngineLoader
from ..engine.request import Request
from ..engine.sampling.params import SamplingParams
from ..engine.speculative.step.async_decoder import AsyncDecoder
from .samples import SampleSet

BATCH = 32  # requests at once
PAGE_SIZE = 16


@dataclass(frozen=True)
class AcceptCounts:
    """`counts[n]` is the number of verifies that committed n + 1 tokens of `steps` drafts and a bonus."""

    counts: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Mean tokens of a verify."""
        total = sum(self.counts)
        return sum((n + 1) * count for n, count in enumerate(self.counts)) / total if total else 1.0

    @property
    def by_position(self) -> list[float]:
        """The share of accepted drafts at each position, of verifies that accepted all before it."""
        shares = []
        for position in range(1, len(self.counts)):
            reached, passed = sum(self.counts[position - 1 :]), sum(self.counts[position:])
            shares.append(passed / reached if reached else 0.0)
        return shares

    def __str__(self) -> str:
        shares = " ".join(f"{share:.2f}" for share in self.by_position)
        return (
            f"accept length {self.accept_length:.3f} over {sum(self.counts)} verifies; by position {shares}"
        )


def held_out_prompts(samples: SampleSet, count: int, max_length: int = 1 << 30) -> list[list[int]]:
    """The tokens before the first generated one of up to `count` samples, at most `max_length` of them."""
    prompts: list[list[int]] = []
    for index in range(len(samples)):
        sample = samples.sample(index)
        first = next((i for i, bit in enumerate(sample.mask) if bit), len(sample.mask))
        if 0 < first <= max_length and len(prompts) < count:
            prompts.append(list(sample.tokens[:first]))
    return prompts


def measure(
    model: Path,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    num_tokens: int,
    device: str = "auto",
    dtype: str = "auto",
    ignore_eos: bool = True,
    progress: Callable[[int], None] = lambda done: None,
) -> AcceptCounts:
    """Decodes `num_tokens` tokens of each prompt with chains of `steps` drafts of `draft`, or up to the end
    of the answer unless `ignore_eos`.

    Raises CheckpointError for a model or a draft that cannot be loaded.
    """
    longest = max(map(len, prompts)) + num_tokens
    each = pages_for(longest + 2 * (steps + 1), PAGE_SIZE)
    config = EngineConfig(
        model=str(model), draft=str(draft), device=device, dtype=dtype, graphs="off", pages=BATCH * each,
        page_size=PAGE_SIZE, spec_steps=steps, spec_adaptive="off", overlap="off", prefix_cache=False,
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, action in loader.phases():
        action()
    engine = loader.engine()
    counts = [0] * (steps + 1)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=ignore_eos)
    for start in range(0, len(prompts), BATCH):
        decoder = engine.decoder()
        requests = [
            _prefilled(engine, decoder, prompt, range(1 + i * each, 1 + (i + 1) * each), sampling)
            for i, prompt in enumerate(prompts[start : start + BATCH])
        ]
        while running := [request for request in requests if not request.is_finished]:
            for num in decoder.step(running).accept_lens:
                counts[num - 1] += 1
        for request in requests:
            decoder.forget(request)
        progress(start + len(requests))
    return AcceptCounts(tuple(counts))


@torch.no_grad()
def _prefilled(
    engine: Engine, decoder: AsyncDecoder, prompt: Sequence[int], pages: range, sampling: SamplingParams
) -> Request:
    """A request whose prompt is computed, with its first token and the drafter's state."""
    request = Request(room="0" * 32, epoch=0, prompt_ids=list(prompt), sampling=sampling, pages=list(pages))
    batch = extend_batch(
        [(request, 0, request.num_prompt)],
        page_size=engine.page_size,
        device=engine.pool.device,
        capture=CaptureHidden.FULL,
    )
    output = engine.runner.forward(batch)
    request.num_computed = request.num_prompt
    request.append([int(output.logits[-1].argmax())], engine.model_config.eos_token_ids)
    assert output.hidden is not None
    if not request.is_finished:
        decoder.draft_prefill(request, output.hidden, 0)
    return request
