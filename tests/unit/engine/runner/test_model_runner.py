"""A request's logits depend neither on the chunking of its prompt nor on the rest of its batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.attention.metadata import AttentionMetadata, plan
from baton.engine.errors import LifecycleError
from baton.engine.models.layers import Read
from baton.tests.parity.toy_engine import PAGE_SIZE, ToyEngine, random_ids
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {"atol": 5e-5, "rtol": 0}
PROMPT = random_ids(90, seed=5)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint(request.param)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_any_chunking_equals_the_whole_prompt(checkpoint: Path, sizes: list[int]):
    engine = ToyEngine(checkpoint)
    whole = engine.run(("whole", PROMPT)).logits
    start = 0
    while start < len(PROMPT):
        for size in sizes:
            chunk = PROMPT[start : start + size]
            if chunk:
                logits = engine.run(("cut", chunk)).logits
                torch.testing.assert_close(logits, whole[start : start + len(chunk)], **TOLERANCE)
            start += size


def test_requests_in_one_batch_equal_each_alone(checkpoint: Path):
    prompts = {"a": PROMPT[:40], "b": PROMPT[40:41], "c": PROMPT[41:73], "d": PROMPT[73:]}
    alone, together = ToyEngine(checkpoint), ToyEngine(checkpoint)
    steps = [
        [(name, ids[: len(ids) // 2 or 1]) for name, ids in prompts.items()],  # ragged extend
        [
            (name, ids[len(ids) // 2 :]) for name, ids in prompts.items() if name != "b"
        ],  # ragged, behind a prefix
        [(name, random_ids(1, seed=i)) for i, name in enumerate(prompts)],  # decode
        [(name, random_ids(4, seed=i)) for i, name in enumerate(prompts)],  # verify
        [("a", random_ids(1)), ("d", random_ids(3)), ("b", random_ids(1))],  # mixed, in another order
    ]
    for step in steps:
        expected = torch.cat([alone.run(chunk).logits for chunk in step])
        torch.testing.assert_close(together.run(*step).logits, expected, **TOLERANCE)


def test_padding_rows_and_padding_requests_change_nothing(checkpoint: Path):
    plain, padded = ToyEngine(checkpoint), ToyEngine(checkpoint)
    for engine in (plain, padded):
        engine.run(("a", PROMPT[:20]), ("b", PROMPT[20:25]))
    expected = plain.run(("a", [7]), ("b", [8])).logits
    batch = padded.batch(("a", [7]), ("b", [8]))
    zeros = torch.zeros(2, dtype=torch.int64)
    batch.input_ids, batch.positions = (
        torch.cat((batch.input_ids, zeros)),
        torch.cat((batch.positions, zeros)),
    )
    batch.slots = torch.cat((batch.slots, zeros))
    with_rows = padded.runner.forward(batch).logits[:2]
    batch.page_table = torch.cat(
        (batch.page_table, torch.zeros(2, batch.page_table.shape[1], dtype=torch.int64))
    )
    batch.q_lens, batch.kv_lens = [1] * 4, [*batch.kv_lens, 1, 1]
    with_requests = padded.runner.forward(batch).logits[:2]
    for logits in (with_rows, with_requests):
        torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert torch.equal(padded.pool.kv[0], torch.zeros_like(padded.pool.kv[0]))
    torch.testing.assert_close(padded.pool.kv, plain.pool.kv, **TOLERANCE)


def test_only_the_logit_rows_asked_for_come_back_in_their_order(checkpoint: Path):
    engine = ToyEngine(checkpoint)
    whole = engine.run(("whole", PROMPT)).logits
    batch = engine.batch(("picked", PROMPT))
    batch.logit_rows = torch.tensor([89, 3])
    picked = engine.runner.forward(batch).logits
    assert picked.dtype == torch.float32
    torch.testing.assert_close(picked, whole[[89, 3]], **TOLERANCE)


def test_only_the_wanted_rows_pass_the_end_of_the_last_layer(checkpoint: Path, monkeypatch):
    engine = ToyEngine(checkpoint)
    whole = engine.run(("whole", PROMPT)).logits
    finish, finished = engine.model.finish, []

    def counted(attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        finished.append(len(attended))
        return finish(attended, hidden)

    monkeypatch.setattr(engine.model, "finish", counted)
    batch = engine.batch(("picked", PROMPT))
    batch.logit_rows = torch.tensor([89, 3])
    picked = engine.runner.forward(batch).logits
    torch.testing.assert_close(picked, whole[[89, 3]], **TOLERANCE)
    assert finished == [2]


def test_a_part_without_logits_stores_its_last_layer_and_does_not_read_it(checkpoint: Path):
    plain, short = ToyEngine(checkpoint), ToyEngine(checkpoint)
    backend, last, read = short.runner.attention, short.model.config.num_layers - 1, []
    bind_rows = backend._bind_rows

    def noted(metadata: AttentionMetadata) -> Read:
        attend = bind_rows(metadata)

        def reads(layer: int, q: torch.Tensor, out: torch.Tensor, *more: object) -> None:
            read.append(layer)
            attend(layer, q, out, *more)

        return reads

    backend._bind_rows = noted
    plain.run(("a", PROMPT[:40]))
    batch = short.batch(("a", PROMPT[:40]))
    batch.logit_rows = torch.zeros(0, dtype=torch.int64)
    assert short.runner.forward(batch).logits.shape == (0, short.model.config.vocab_size)
    assert read == list(range(last))
    torch.testing.assert_close(short.pool.kv, plain.pool.kv, **TOLERANCE)
    rest = [engine.run(("a", PROMPT[40:])).logits for engine in (plain, short)]
    torch.testing.assert_close(*rest, **TOLERANCE)


def test_an_idle_batch_runs_and_returns_no_rows(checkpoint: Path):
    engine = ToyEngine(checkpoint)
    output = engine.runner.forward(engine.batch())
    assert output.logits.shape == (0, 256)
    assert output.hidden is None
    assert engine.pool.kv.abs().sum() == 0


def test_metadata_of_an_older_version_is_refused_and_a_fresh_plan_runs(checkpoint: Path):
    engine = ToyEngine(checkpoint)
    batch = engine.batch(("a", PROMPT[:5]))
    metadata = plan(batch, PAGE_SIZE)
    batch.positions = batch.positions.clone()
    with pytest.raises(LifecycleError, match="plan after the last change"):
        engine.runner.forward(batch, metadata)
    assert engine.pool.kv.abs().sum() == 0
    given_plan = engine.runner.forward(batch, plan(batch, PAGE_SIZE)).logits
    assert torch.equal(given_plan, engine.runner.forward(batch).logits)


def test_every_forward_is_counted_by_its_path(checkpoint: Path):
    engine = ToyEngine(checkpoint)
    outputs = [engine.run(("a", [5])) for _ in range(3)]
    assert {output.path for output in outputs} == {"eager"}
    assert engine.runner.counters.forwards == {"eager": 3}
    assert "forwards {'eager': 3}" in repr(engine.runner)


def test_results_belong_to_the_caller(checkpoint: Path):
    engine = ToyEngine(checkpoint)
    first = engine.run(("a", [5])).logits
    kept = first.clone()
    engine.run(("b", [6]))
    assert torch.equal(first, kept)
    assert not first.requires_grad
