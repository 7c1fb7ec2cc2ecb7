"""MTP modules on a device: hidden states and rows in CUDA graphs, and an engine that serves with them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.batch.forward_batch import CaptureHidden
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.loader import EngineLoader
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.warmup.watch import CAPTURES, COMPILATIONS
from baton.tests.parity.graph_engine import MAX_BATCH
from baton.tests.parity.mtp_laws import (
    DEEP,
    KINDS,
    PATHS,
    check_accept_lens,
    check_alternation,
    check_prefill_graphs,
    check_sizes,
    write_kinds,
)
from baton.tests.parity.toy_engine import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("one_thread"),
]

SAMPLED = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5},
    {"temperature": 0.0, "frequency_penalty": 0.8, "logprobs": 2},
)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_kinds(tmp_path_factory.mktemp("mtp"), target)


@pytest.mark.parametrize("kind", KINDS)
def test_m4_1_batches_around_the_largest_graph_give_the_same_tokens(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    check_sizes(target, heads[kind], "cuda")


def test_m4_2_steps_of_chained_modules_under_a_memory_checker(target: Path, heads: dict[str, Path]) -> None:
    """Fewer requests than the largest graph holds, as many, and one more."""
    check_sizes(target, heads["chained"], "cuda", (MAX_BATCH - 1, MAX_BATCH, MAX_BATCH + 1), ("graph",))


def test_m4_2_a_memory_checker_finds_nothing() -> None:
    """Runs the test before this one under compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")
    case = f"{__file__}::{test_m4_2_steps_of_chained_modules_under_a_memory_checker.__name__}"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(
        [*command, sys.executable, "-m", "pytest", "-q", case, "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=alone,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in found.stdout + found.stderr


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("kind", DEEP)
def test_m4_4_after_any_accept_length_each_modules_kv_is_that_of_scratch(
    target: Path, heads: dict[str, Path], kind: str, path: str | None
) -> None:
    check_accept_lens(target, heads[kind], "cuda", None if path is None else PATHS[path])


@pytest.mark.parametrize("kind", KINDS)
def test_m4_5_each_modules_hidden_in_a_graph_equals_the_eager_one(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    check_prefill_graphs(target, heads[kind], "cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_m4_6_graph_and_eager_steps_in_turns_equal_eager_ones(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    check_alternation(target, heads[kind], "cuda")


def engine_of(target: Path, draft: Path | None, *, has_graphs: bool, dtype: str = "float32") -> Engine:
    """An engine of a decode worker, self-tested and rehearsed as at its start."""
    config = EngineConfig(
        model=str(target), draft=str(draft or ""), device="cuda", dtype=dtype, pages=200, max_context=256,
        graphs="on" if has_graphs else "off", max_running=8, graph_self_test=has_graphs,
        overlap="auto" if has_graphs else "off",
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return loader.engine()


def generate(engine: Engine, count: int) -> list[list[int]]:
    """Tokens of `count` requests, whose steps are launched ahead where the engine does so."""
    decoder, requests = engine.decoder(), []
    for i in range(count):
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, **SAMPLED[i % len(SAMPLED)])
        request = Request(
            room=f"{i:032x}", epoch=0, prompt_ids=random_ids(5 + 9 * i, seed=i), sampling=params
        )
        request.pages = engine.cache.alloc(12)
        batch = extend_batch(
            [(request, 0, request.num_prompt)], page_size=engine.page_size, device=engine.pool.device,
            capture=CaptureHidden.NULL if engine.drafter is None else CaptureHidden.FULL,
        )  # fmt: skip
        output = engine.runner.forward(batch)
        rows = engine.sampler.build([request.masked_row])
        request.append(engine.sampler.sample(output.logits[-1:], rows).tokens.tolist(), ())
        request.num_computed = request.num_prompt
        if output.hidden is not None:
            for start in range(0, request.num_prompt, 7):
                decoder.draft_prefill(request, output.hidden[start : start + 7], start)
        requests.append(request)
    while live := [request for request in requests if not request.is_finished]:
        decoder.step(live)
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_modules_gives_the_tokens_of_one_without(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    """The kernels of every pass are compiled, captured, self-tested and measured at the start."""
    plain = engine_of(target, None, has_graphs=False)
    expected = [generate(plain, count) for count in (1, 8)]
    engine = engine_of(target, heads[kind], has_graphs=True)
    engine.begin_watch()
    assert [generate(engine, count) for count in (1, 8)] == expected
    counters = engine.graph_counters
    assert counters["graph_replays_decode_step"] + counters.get("graph_replays_edited_step", 0) > 5
    assert not any("capture_failed" in name for name in counters), counters
    assert engine.watch_counters[COMPILATIONS] == engine.watch_counters[CAPTURES] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_bfloat16_modules_pass_their_self_tests(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    engine = engine_of(target, heads[kind], has_graphs=True, dtype="bfloat16")
    assert not any("capture_failed" in name for name in engine.graph_counters), engine.graph_counters
    assert all(len(tokens) == 24 for tokens in generate(engine, 4))
