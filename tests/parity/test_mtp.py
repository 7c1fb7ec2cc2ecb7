"""MTP modules on the real engine: drafts change how many tokens a step yields, never which."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from baton.engine.kv.page_table import slots_for
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafting.shape import DraftShape
from baton.tests.parity.eagle3_engine import (
    NUM_PAGES,
    PAGE_SIZE,
    Engine,
    check_without_draft_state,
    features_of,
    record_drafts,
)
from baton.tests.parity.mtp_oracles import (
    SOURCES,
    corrupt,
    expected_lens,
    write_oracle_modules,
    write_oracle_target,
)
from baton.tests.parity.mtp_reference import reference_drafts
from baton.tests.parity.mtp_toys import MtpEngine, random_modules, write_mtp
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model, write_toy_checkpoint
from baton.tests.variants import slow, witnesses
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_thread")

# (dialect, modules, config keys): several that chain, several that do not, and one that is applied again
KINDS: dict[str, tuple[str, int, dict[str, object]]] = {
    "chained": ("deepseek", 3, {}),
    "independent": ("mimo_v2", 3, {}),
    "hidden first": ("mimo", 3, {}),
    "shared": ("qwen", 1, {}),
    "shared before the norm": ("mimo_v2", 1, {}),
}
DEEP = ("chained", "independent", "hidden first")
PROMPTS = ([5, 9, 200, 31, 7, 7, 90, 18, 3], [17], list(range(40, 64)), [250, 3, 250, 3, 250, 3], [8, 8])
ORACLE_PROMPT = [token % 16 for token in random_ids(14, seed=3)]


@pytest.fixture(scope="session")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=3)


@pytest.fixture(scope="session")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("mtp")
    return {
        kind: write_mtp(path / kind, target, dialect, random_modules(target, count), **keys)
        for kind, (dialect, count, keys) in KINDS.items()
    }


@pytest.fixture(scope="session")
def oracle_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_oracle_target(tmp_path_factory.mktemp("oracle") / "target")


def greedy(max_new_tokens: int = 24, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True, **changes)


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0, "seed": 11, "max_new_tokens": 24, "ignore_eos": True} | changes)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_transformers_whatever_the_modules(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    expected = [reference_greedy(reference_model(target), prompt, 24) for prompt in PROMPTS]
    assert MtpEngine(target, heads[kind]).generate(PROMPTS, greedy()) == expected
    alone = [MtpEngine(target, heads[kind]).generate([prompt], greedy())[0] for prompt in PROMPTS[:2]]
    assert alone == expected[:2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params",
    [slow(sampled()), slow(sampled(temperature=0.4, top_k=5)), sampled(frequency_penalty=0.7, top_p=0.8)],
)
def test_sampled_output_is_the_same_with_and_without_modules(
    target: Path, heads: dict[str, Path], kind: str, params: SamplingParams
) -> None:
    plain = Engine(target).generate(PROMPTS, params)
    assert MtpEngine(target, heads[kind]).generate(PROMPTS, params) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_a_full_recompute_without_a_cache(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    """The formulas of each family over all rows: order of the streams, norms, recycling, the chain."""
    engine = MtpEngine(target, heads[kind])
    request = engine.prefill(PROMPTS[0], greedy(30))
    for _ in range(5):
        before = list(request.all_ids)
        drafts = record_drafts(engine, request)
        assert drafts == reference_drafts(target, heads[kind], before, len(drafts)).tokens
        assert len(drafts) == engine.steps


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_fewer_steps_than_modules_use_the_first_modules(
    target: Path, heads: dict[str, Path], steps: int
) -> None:
    engine = MtpEngine(target, heads["chained"], steps=steps)
    assert engine.drafter.head.num_modules == steps
    request = engine.prefill(PROMPTS[0], greedy(30))
    wanted = reference_drafts(target, heads["chained"], list(request.all_ids), steps).tokens
    assert record_drafts(engine, request) == wanted


def test_a_shared_module_drafts_a_tree_too(target: Path, heads: dict[str, Path]) -> None:
    expected = [reference_greedy(reference_model(target), prompt, 24) for prompt in PROMPTS]
    engine = MtpEngine(target, heads["shared"], topk=3, tokens=8)
    assert engine.generate(PROMPTS, greedy()) == expected


@pytest.mark.parametrize("is_chained", [True, False])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_the_oracle_is_accepted_in_full_at_every_step(
    oracle_target: Path, tmp_path: Path, source: str, count: int, is_chained: bool
) -> None:
    head = write_oracle_modules(tmp_path, oracle_target, count, source=source, is_chained=is_chained)
    engine = MtpEngine(oracle_target, head)
    plain = Engine(oracle_target).generate([ORACLE_PROMPT, ORACLE_PROMPT[::-1]], greedy(48))
    assert engine.generate([ORACLE_PROMPT, ORACLE_PROMPT[::-1]], greedy(48)) == plain
    assert set(engine.accept_lens) == {1 + engine.steps}


@pytest.mark.parametrize("is_chained", [True, False])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("alpha", [0.3, slow(0.8)])
def test_guesses_that_were_wrong_leave_no_trace_in_the_kv_of_any_module(
    oracle_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    is_chained: bool,
    alpha: float,
) -> None:
    """Some drafts are made wrong. The oracle reads every row again later, so exactly those are rejected."""
    head = write_oracle_modules(tmp_path, oracle_target, 3, source=source, is_chained=is_chained)
    engine = MtpEngine(oracle_target, head)
    corrupt(monkeypatch, engine, alpha)
    plain = Engine(oracle_target).generate([ORACLE_PROMPT], greedy(60))
    assert engine.generate([ORACLE_PROMPT], greedy(60)) == plain
    lens = [result.accept_lens[0] for result in engine.results]
    assert lens == expected_lens(len(ORACLE_PROMPT), 60, engine.steps, alpha)
    assert len(set(lens)) > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, slow(2), 3, slow(5), slow(16)])
def test_any_chunking_of_the_prefill_gives_the_same_kv_and_drafts(
    target: Path, heads: dict[str, Path], kind: str, chunk: int
) -> None:
    """The tail of a chunk needs tokens of the next one, and the prompt's last rows need guesses."""
    whole, pieces = MtpEngine(target, heads[kind]), MtpEngine(target, heads[kind])
    for prompt in PROMPTS:
        one = whole.prefill(prompt, sampled())
        two = pieces.prefill(prompt, sampled(), chunk=chunk)
        assert one.all_ids == two.all_ids
        assert record_drafts(whole, one) == record_drafts(pieces, two)
        whole.decoder.forget(one), pieces.decoder.forget(two)
    assert torch.allclose(pieces.drafter.pool.kv[1:], whole.drafter.pool.kv[1:], atol=1e-4)
    assert bool(whole.drafter.pool.kv[1:].any())


@pytest.mark.parametrize("kind", KINDS)
def test_kv_after_decoding_is_that_of_a_prefill_of_the_same_tokens(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    decoded, fresh = MtpEngine(target, heads[kind]), MtpEngine(target, heads[kind])
    request = decoded.prefill(PROMPTS[0], greedy(30))
    while request.num_output < 20:
        decoded.decoder.step([request])
    again = fresh.prefill(request.all_ids[:-1], greedy(30))
    assert again.all_ids == request.all_ids
    assert torch.allclose(kv_of(decoded, request), kv_of(fresh, again), atol=1e-4)
    assert record_drafts(decoded, request) == record_drafts(fresh, again)


@pytest.mark.parametrize("kind", ["chained", "independent", "shared"])
@pytest.mark.parametrize("chunk", [2, 100])
def test_a_cached_prefix_needs_the_tokens_behind_it_and_no_rows_of_its_own(
    target: Path, heads: dict[str, Path], kind: str, chunk: int
) -> None:
    """Pages are shared while as many tokens behind them are equal as there are modules."""
    engine, whole = MtpEngine(target, heads[kind]), MtpEngine(target, heads[kind])
    owner = engine.prefill(list(range(40, 64)), greedy())
    shared, depth = 3 * PAGE_SIZE, engine.drafter.lookahead
    assert depth == engine.drafter.head.num_modules
    prompt = [*range(40, 40 + shared + depth), 99, 98, 97][: shared + depth + 2]
    expected = whole.prefill(prompt, greedy(8))
    request = Request(room="b" * 32, epoch=0, prompt_ids=prompt, sampling=greedy(8))
    request.pages = [*owner.pages[:3], *range(300, 306)]
    request.append(expected.output_ids, ())
    before = engine.drafter.pool.kv[owner.pages[:3]].clone()
    rows = features_of(whole, prompt)
    for start in range(shared, len(prompt), chunk):
        engine.decoder.draft_prefill(request, rows[start : start + chunk], start)
    assert engine.decoder.coverage.is_warm(request)
    assert torch.allclose(kv_of(engine, request), kv_of(whole, expected), atol=1e-4)
    assert record_drafts(engine, request) == record_drafts(whole, expected)
    assert torch.equal(engine.drafter.pool.kv[owner.pages[:3]], before), "shared pages are never written"


def test_requests_of_a_mixed_batch_get_the_tokens_they_get_alone(
    target: Path, heads: dict[str, Path]
) -> None:
    every = [greedy(9), sampled(seed=3), sampled(seed=3, temperature=0.5, frequency_penalty=1.0), greedy(17)]
    for kind in ("chained", "shared"):
        alone = [
            MtpEngine(target, heads[kind]).generate([prompt], params)[0]
            for prompt, params in zip(PROMPTS, every, strict=False)
        ]
        engine = MtpEngine(target, heads[kind])
        pairs = zip(PROMPTS, every, strict=False)
        assert engine.run([engine.prefill(prompt, params) for prompt, params in pairs]) == alone


@pytest.mark.parametrize("kind", ["chained", "shared"])
def test_a_request_without_draft_state_is_served_beside_drafted_ones(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    plain = Engine(target).generate(PROMPTS[:2], greedy())
    check_without_draft_state(MtpEngine(target, heads[kind]), PROMPTS[:2], greedy(), plain)


@pytest.mark.parametrize("kind", ["chained", "shared"])
def test_nothing_is_written_beyond_the_requests_pages(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    engine = MtpEngine(target, heads[kind])
    request = engine.prefill([1, 2, 3], greedy(12), pages=4)
    others = [page for page in range(1, NUM_PAGES) if page not in request.pages]
    engine.drafter.pool.kv[others] = 7.0
    assert engine.run([request]) == Engine(target).generate([[1, 2, 3]], greedy(12))
    assert bool((engine.drafter.pool.kv[others] == 7.0).all())


def test_features_of_another_width_and_gaps_are_refused(target: Path, heads: dict[str, Path]) -> None:
    engine = MtpEngine(target, heads["chained"])
    request = engine.prefill(PROMPTS[0], greedy())
    engine.decoder.forget(request)
    with pytest.raises(ValueError, match=r"\[2, 63\].*\[2, 64\]"):
        engine.decoder.draft_prefill(request, torch.zeros(2, 63), 0)
    engine.decoder.forget(request)
    engine.decoder.draft_prefill(request, torch.zeros(2, 64), 0)
    with pytest.raises(AssertionError, match=r"draft rows 2\.\.3 would stay unwritten"):
        engine.decoder.draft_prefill(request, torch.zeros(2, 64), 4)


FAMILIES: dict[str, tuple[str, str, dict[str, bool], dict[str, object]]] = {
    # family of the layers, dialect, their parts, config keys
    "MiMo": ("qwen2", "mimo", {"bias": True}, {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}),
    "GLM": ("qwen2", "deepseek", {"bias": True}, {}),
    "Qwen": ("qwen3", "qwen", {"qk_norm": True}, {}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_run_from_the_targets_own_checkpoint(tmp_path: Path, family: str) -> None:
    """Biased and normed projections, and modules whose embedding and head are copies of the target's."""
    layers, dialect, parts, keys = FAMILIES[family]
    target = tmp_path / "target"
    write_toy_checkpoint(target, layers, num_hidden_layers=3)
    modules, extra = random_modules(target, 1, **parts), {}
    if dialect == "deepseek":
        weights = load_file(target / "model.safetensors")
        extra["model.layers.3.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        extra["model.layers.3.shared_head.head.weight"] = weights["lm_head.weight"]
    both = write_mtp(tmp_path / "both", target, dialect, modules, is_beside=True, extra=extra, **keys)
    expected = [reference_greedy(reference_model(target), prompt, 16) for prompt in PROMPTS[:3]]
    engine = MtpEngine(both, both, steps=2)
    assert engine.generate(PROMPTS[:3], greedy(16)) == expected
    request = engine.prefill(PROMPTS[0], greedy(30))
    before = list(request.all_ids)
    assert record_drafts(engine, request) == reference_drafts(target, both, before, 2).tokens


class Cycle:
    """A policy that drafts 0, 3, 1 and 2 tokens in turns, as load and acceptance may ask."""

    is_watched = True

    def __init__(self, steps: int) -> None:
        self.shapes = [DraftShape.of(count) for count in range(steps + 1)]
        self.turns = cycle([0, steps, 1, 0, 0, min(2, steps)])

    def choose(self, batch_size: int, context: int) -> DraftShape:
        return self.shapes[next(self.turns)]

    def observe(self, matched: object, reached: object) -> None:
        pass


@pytest.mark.parametrize("kind", witnesses(KINDS, {"chained", "shared", "hidden first"}))
def test_steps_of_any_length_in_turns_keep_the_kv_of_all_modules(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    """A step without drafts writes the rows of every module, too, and proposes for the next one."""
    expected = [reference_greedy(reference_model(target), prompt, 24) for prompt in PROMPTS]
    adaptive, fresh = (MtpEngine(target, heads[kind], policy=policy) for policy in (Cycle(3), None))
    assert adaptive.generate(PROMPTS, greedy()) == expected
    assert len({tuple(result.drafted) for result in adaptive.results}) > 3
    request = adaptive.prefill(PROMPTS[0], greedy(30))
    while request.num_output < 20:
        adaptive.decoder.step([request])
    again = fresh.prefill(request.all_ids[:-1], greedy(30))
    assert torch.allclose(kv_of(adaptive, request), kv_of(fresh, again), atol=1e-4)
    view = [
        engine.drafter.anchors[-1][engine.decoder.coverage.known[each].row]
        for engine, each in ((adaptive, request), (fresh, again))
    ]
    assert torch.allclose(*view, atol=1e-3), "the remembered drafts, or the logits of the first"


def kv_of(engine: MtpEngine, request: Request) -> torch.Tensor:
    """The KV of all modules in their final rows: the last k rows of module k were made of guesses."""
    count, parts = request.num_tokens - 1, []
    for module in range(engine.drafter.pool.num_layers):
        slots = slots_for(request.pages, 0, count - module, PAGE_SIZE)
        parts.append(engine.drafter.pool.kv[slots // PAGE_SIZE, module, :, slots % PAGE_SIZE].flatten())
    return torch.cat(parts)


def test_the_reference_sees_every_switch(target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    """Recycled or chained hidden, taken on the other side of the norm or of the target, changes drafts."""
    ids = [*PROMPTS[0], 5]
    for kind, change in (("chained", "is_normed"), ("chained", "is_chained"), ("shared", "is_normed")):
        right = reference_drafts(target, heads[kind], ids, 3)
        wrong = reference_drafts(target, heads[kind], ids, 3, **{change: not getattr(right, change)})
        assert not torch.allclose(right.logits, wrong.logits, atol=1e-2)
