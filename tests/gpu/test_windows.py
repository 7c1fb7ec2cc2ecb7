"""Models with windows give up the KV behind them on a device, with the tokens of transformers.

Free pages and free window pages hold NaN and are looked at after every turn, as on the CPU
(`tests/sim/test_windows.py`).
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from baton.engine.kv.window_pool import WindowedPool
from baton.engine.warmup.watch import COMPILATIONS
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.test_page_growth import Asked, played
from baton.tests.sim.test_windows import (
    NEW_TOKENS,
    SETTINGS,
    TIGHT,
    WAYS,
    a_page_given_up_too_early,
    pair_of,
    prompts_of,
    tokens_of,
)
from baton.tests.sim.worker_pair import name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Models = Callable[[str], tuple[Path, Path]]
Expected = Callable[..., list[int]]
GPU_WAYS = [way for way in WAYS if way != "deterministic"]


@pytest.fixture(autouse=True, scope="module")
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def models(toy_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    """(target, head) of a family."""
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())
    return cache(lambda family: (toy_checkpoint(family, **SETTINGS[family]), head))


@pytest.fixture(scope="module")
def expected(models: Models) -> Expected:
    """The tokens of transformers behind a prompt, on the CPU."""
    references = cache(lambda family: reference_model(models(family)[0]))

    @cache
    def of(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
        tokens: list[int] = reference_greedy(references(family), list(prompt), count)
        return tokens

    return lambda family, prompt, count=NEW_TOKENS: of(family, tuple(prompt), count)


@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "local"])
@pytest.mark.parametrize("way", GPU_WAYS)
@pytest.mark.parametrize("family", SETTINGS)
def test_every_way_gives_the_tokens_of_transformers(
    models: Models, expected: Expected, family: str, way: str, is_local: bool
) -> None:
    pair, prompts = pair_of(models, family, way, device="cuda"), prompts_of()
    assert isinstance(pair.decode.engine.pool, WindowedPool)
    wanted = [expected(family, prompt) for prompt in prompts]
    assert tokens_of(pair, prompts, is_local=is_local, rng=random.Random(1)) == wanted, "cold"
    assert tokens_of(pair, prompts, is_local=is_local) == wanted, "with cached prefixes"
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("way", ["chain graphs", "tree ahead graphs"])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_a_long_request_goes_through_a_small_pool(
    models: Models, expected: Expected, family: str, way: str
) -> None:
    """55 pages of text in 30 window pages, handed over and local."""
    prompt = random_ids(160, seed=3)
    for is_local in (False, True):
        pair = pair_of(models, family, way, device="cuda", **TIGHT)
        assert tokens_of(pair, [prompt], is_local=is_local, max_new_tokens=60) == [
            expected(family, prompt, 60)
        ]
        pair.assert_nothing_is_held()


@pytest.mark.parametrize("way", ["plain graphs", "tree ahead graphs"])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_requests_that_are_retracted_go_on_with_their_tokens(
    models: Models, expected: Expected, family: str, way: str
) -> None:
    prompts = prompts_of((3, 5, 30, 4, 6))
    sizes = {"pages": 400, "window_pages": 15, "max_context": 200, "max_running": 6}
    pair = pair_of(models, family, way, device="cuda", **sizes)
    pair.decode.growth.ahead_tokens = 0
    asked = [Asked(pair, i, prompt, {"temperature": 0.0}, is_local=True) for i, prompt in enumerate(prompts)]
    played(pair, asked, random.Random(4))
    assert [each.told for each in asked] == [expected(family, prompt) for prompt in prompts]
    assert pair.decode.stats().counters["retractions"] > 0
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_nothing_is_compiled_once_an_engine_serves(models: Models, family: str) -> None:
    """Window pages are looked up by kernels that the warm-up has compiled."""
    pair = pair_of(models, family, "chain graphs", device="cuda")
    for engine in (pair.prefill.engine, pair.decode.engine):
        engine.begin_watch()
    for number, count in enumerate((5, 40, 61)):
        pair.send(name(number), random_ids(count, seed=count), max_new_tokens=20, is_local=number == 2)
    pair.run()
    for engine in (pair.prefill.engine, pair.decode.engine):
        assert engine.watch is not None
        assert engine.watch.counters[COMPILATIONS] == 0


def test_a_page_given_up_too_early_is_seen_on_a_device(
    models: Models, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poison of free window pages reaches the tokens, or it would prove nothing here."""
    a_page_given_up_too_early(monkeypatch)
    pair, prompts = pair_of(models, "mistral", "chain graphs", device="cuda"), prompts_of()
    wanted = [expected("mistral", prompt) for prompt in prompts]
    try:
        found = tokens_of(pair, prompts)
    except (AssertionError, IndexError, KeyError):
        return
    assert found != wanted
