"""Answers of the sparse toy in many ways, and the law of its side caches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from baton.engine.kv.sparse_layout import SparseLayout
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.kernels.sparse_caches import dense_entries_of, index_entries_of
from baton.tests.parity.answer_engine import CHAIN, PAGE_SIZE, TREE, AnswerEngine, Models, Way
from baton.tests.parity.sparse_toys import Reference
from baton.tests.parity.toy_engine import random_ids

LENGTHS, NUM_TOKENS, MAX_TOKENS = (3, 38, 71), 20, 96
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = tuple(tuple(random_ids(length, seed=length)) for length in LENGTHS)
WHOLE = 1 << 20
WAYS = (
    Way(),
    Way(batch=3, chunk=16, has_graphs=True),
    Way(batch=3, chunk=7, has_graphs=True, has_breaks=True),
    Way(shape=CHAIN, batch=2, chunk=7),
    Way(shape=TREE, batch=3, chunk=16),
    Way(shape=CHAIN, batch=3, chunk=16, has_graphs=True, is_disaggregated=True),
    Way(shape=TREE, batch=3, chunk=16, has_graphs=True),
    Way(shape=TREE, batch=2, chunk=16, has_graphs=True, has_breaks=True, is_disaggregated=True),
)


class SparseEngine(AnswerEngine):
    """An engine that checks the side caches of every request at its end."""

    def __init__(self, models: Models, way: Way, *, row_multiple: int = 1) -> None:
        super().__init__(models, way, is_invariant=False, max_tokens=MAX_TOKENS)
        self.num_entries = 0
        for runner in (self.runner, self.prompts):
            runner.row_multiple = row_multiple

    def _kv_hash(self, request: Request) -> str:
        self.num_entries += check_entries(self, request)
        return super()._kv_hash(request)


def check_entries(engine: AnswerEngine, request: Request) -> int:
    """AssertionError unless every whole group of a request's stored rows has its means in the side caches.

    Returns the number of entries.
    """
    pool, count = engine.runner.pool, 0
    assert isinstance(pool.layout, SparseLayout)
    sizes, pages = pool.layout.sizes, request.pages
    stored = request.num_tokens - 1  # the newest token has no row yet
    for block in (sizes.index_block, sizes.dense_block):
        is_index = block == sizes.index_block
        for end in range(block, stored + 1, block):
            where = [(pages[i // PAGE_SIZE], i % PAGE_SIZE) for i in range(end - block, end)]
            page, offset = where[-1]
            for layer in range(sizes.num_layers):
                rows = torch.stack([pool.kv[p, layer, :, o] for p, o in where]).float()
                if is_index:
                    found = index_entries_of(pool.kv, layer, sizes)[page, offset // block]
                    wanted = rows[:, 0].mean((0, 1))
                else:
                    found, wanted = (
                        dense_entries_of(pool.kv, layer, sizes)[page, offset // block],
                        rows.mean(0),
                    )
                torch.testing.assert_close(
                    found, wanted.to(found.dtype), msg=f"tokens to {end} of layer {layer}"
                )
                count += 1
    return count


@dataclass(frozen=True)
class Expected:
    """The answers of the definition to PROMPTS."""

    tokens: list[list[int]]

    @classmethod
    def of(cls, models: Models) -> "Expected":
        """Those of an eager engine without drafts, as the definition confirms."""
        answers = SparseEngine(models, Way(batch=len(PROMPTS))).answer(PROMPTS, GREEDY)
        reference = Reference(models.fastest)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert reference.would_say(list(prompt), answer.tokens), f"the prompt of {len(prompt)} tokens"
        return cls([answer.tokens for answer in answers])


def check_way(
    models: Models, way: Way, expected: Sequence[Sequence[int]], *, row_multiple: int = 1
) -> SparseEngine:
    """AssertionError unless `way` gives the tokens of `expected` and right side caches, with its graphs."""
    engine = SparseEngine(models, way, row_multiple=row_multiple)
    answers = engine.answer(PROMPTS, GREEDY, expected if way.shape.steps else ())
    assert [answer.tokens for answer in answers] == list(expected)
    assert engine.num_entries > 0
    if way.shape.steps:
        accepted = {count for answer in answers for count in answer.accept_lens}
        assert min(accepted) < max(accepted), "drafts were accepted in part and in full"
    return engine
