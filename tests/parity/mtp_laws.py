"""Laws of MTP drafters that hold eagerly, on tapes and in graphs of a device; each takes the device."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from baton.engine.batch.forward_batch import CaptureHidden, ForwardBatch
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.cuda import CudaBackend
from baton.engine.graphs.graph_pool import GraphKind
from baton.engine.graphs.tape.tape import TapeBackend
from baton.engine.kv.page_table import build_page_table, pages_for, slots_for
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_engine import PAGE_SIZE
from baton.tests.parity.graph_engine import (
    BREAKABLE,
    FULL,
    MAX_BATCH,
    MAX_TOKENS,
    arena,
    enable,
    with_graphs,
)
from baton.tests.parity.mtp_reference import reference_drafts
from baton.tests.parity.mtp_toys import MtpEngine, random_modules, write_mtp
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model

KINDS = {"chained": ("deepseek", 3), "independent": ("mimo_v2", 3), "shared": ("qwen", 1)}
DEEP = ("chained", "independent")
PATHS: dict[str, set[GraphKind]] = {"graph": FULL, "breakable": BREAKABLE, "eager": set()}
TOLERANCE = {"cpu": 2e-4, "cuda": 2e-3}
Seen = tuple[list[list[int]], list[list[int]]]


def write_kinds(path: Path, target: Path) -> dict[str, Path]:
    """Random modules of each kind for `target`."""
    return {
        kind: write_mtp(path / kind, target, dialect, random_modules(target, count))
        for kind, (dialect, count) in KINDS.items()
    }


def greedy(max_new_tokens: int = 9) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)


def params_of(index: int) -> SamplingParams:
    """Of request number `index`: greedy and sampled ones that end at different times."""
    count = 5 + 3 * (index % 4)
    if index % 3:
        return greedy(count)
    return SamplingParams(temperature=0.8, seed=index, max_new_tokens=count, ignore_eos=True)


def graphed(target: Path, head: Path, device: str = "cpu", **settings: object) -> MtpEngine:
    """An engine with every kind of graph; all static inputs are poisoned before each step."""
    engine = MtpEngine(target, head, device=device, is_greedy=True, **settings)
    backend: GraphBackend = CudaBackend() if device == "cuda" else TapeBackend(arena())
    engine.graphs = with_graphs(engine, backend=backend)
    return engine


def served(engine: MtpEngine, count: int) -> Seen:
    """Tokens of `count` requests that come together, and the accept lengths of all their steps."""
    engine.next_page, engine.results = 1, []
    requests = [engine.prefill(random_ids(3 + 5 * i, seed=i), params_of(i)) for i in range(count)]
    tokens = engine.run(requests)
    return tokens, [result.accept_lens for result in engine.results]


def check_sizes(
    target: Path,
    head: Path,
    device: str = "cpu",
    counts: Sequence[int] = (1, MAX_BATCH - 1, MAX_BATCH, MAX_BATCH + 1, 2 * MAX_BATCH),
    paths: Iterable[str] = PATHS,
) -> None:
    """M4.1: batches around the largest captured one give the tokens and accept lengths of no graphs."""
    plain, engine = MtpEngine(target, head, device=device), graphed(target, head, device)
    for count in counts:
        expected = served(plain, count)
        for path in paths:
            enable(engine, PATHS[path])
            assert served(engine, count) == expected
            if path == "graph" and count <= MAX_BATCH:
                assert {result.path for result in engine.results} == {"graph"}
            elif path != "graph":
                assert {result.path for result in engine.results} == {"eager"}
    replays = engine.graphs.counters()
    assert replays["graph_replays_decode_step"] > 5
    assert replays["graph_replays_draft_prefill"] > (5 if "breakable" in paths else -1)


def check_alternation(target: Path, head: Path, device: str = "cpu") -> None:
    """M4.6: graph and eager steps in turns equal eager steps."""
    expected = served(MtpEngine(target, head, device=device), 3)
    engine = graphed(target, head, device)
    step, turns = engine.decoder.step, iter(range(1000))

    def alternating(requests: list[Request]) -> object:
        enable(engine, FULL if next(turns) % 2 else set())
        return step(requests)

    engine.decoder.step = alternating
    assert served(engine, 3) == expected
    assert {result.path for result in engine.results} == {"graph", "eager"}


def check_accept_lens(
    target: Path, head: Path, device: str = "cpu", kinds: set[GraphKind] | None = None
) -> None:
    """M4.4: behind every accept length the KV of each module is that of a run from scratch, and so are the
    next drafts. `kinds` None: without graphs.
    """
    prompt = random_ids(7, seed=1)
    truth = reference_greedy(reference_model(target), prompt, 40)
    engine = MtpEngine(target, head, device=device) if kinds is None else graphed(target, head, device)
    if kinds is not None:
        enable(engine, kinds)
    for first, second in accept_pairs(MtpEngine.steps):
        engine.next_page = 1
        request = engine.prefill(prompt, greedy(40))
        for wanted in (first, second):
            begin_with(engine, request, truth, wanted - 1)
            assert engine.decoder.step([request]).accept_lens == [wanted]
            check_against_scratch(engine, request, target, head, TOLERANCE[device])
        engine.decoder.forget(request)


def accept_pairs(steps: int) -> Iterator[tuple[int, int]]:
    """Every accept length, each once behind a long one and once behind a short one."""
    for first in range(1, steps + 2):
        yield first, steps + 2 - first


def begin_with(engine: MtpEngine, request: Request, truth: list[int], num_right: int) -> None:
    """Makes the first `num_right` remembered drafts right and the others wrong."""
    coming = truth[request.num_output :][: engine.steps]
    drafts = [token if i < num_right else (token + 1) % 256 for i, token in enumerate(coming)]
    row = engine.decoder.coverage.known[request].row
    engine.drafter.states.drafts[row] = torch.tensor(drafts, device=engine.device)


def check_against_scratch(
    engine: MtpEngine, request: Request, target: Path, head: Path, tolerance: float
) -> None:
    """KV of each module in every row whose input tokens are committed, and the drafts that follow."""
    scratch = reference_drafts(target, head, list(request.all_ids), engine.steps)
    row, committed = engine.decoder.coverage.known[request].row, request.num_tokens - 1
    for module, pair in enumerate(scratch.kv):
        rows = committed - module
        slots = slots_for(request.pages, 0, rows, PAGE_SIZE)
        ours = engine.drafter.pool.kv[slots // PAGE_SIZE, module, :, slots % PAGE_SIZE].cpu()
        wanted = torch.stack([part[:rows] for part in pair], dim=1)
        torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)
    assert engine.drafter.states.drafts[row].tolist() == scratch.tokens


def check_prefill_graphs(target: Path, head: Path, device: str = "cpu") -> None:
    """The outputs of every module are those of the eager path, and a held result outlives later replays."""
    plain, engine = MtpEngine(target, head, device=device), graphed(target, head, device)
    enable(engine, BREAKABLE)
    for count in (1, 15, 16, 17, MAX_TOKENS, MAX_TOKENS + 1):
        batches = [batch_of(each, count) for each in (engine, plain)]
        ours, theirs = (
            each.drafter.prefill_rows(batch) for each, batch in zip((engine, plain), batches, strict=True)
        )
        assert batches[0].decision.is_graph is (count <= MAX_TOKENS)
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[device], rtol=TOLERANCE[device])
        held = ours.clone()
        engine.drafter.prefill_rows(batch_of(engine, max(1, count - 2), seed=9))
        assert torch.equal(ours, held)


def batch_of(engine: MtpEngine, count: int, seed: int = 0) -> ForwardBatch:
    """`count` rows of one request from its beginning on, with random ids and features."""
    pages, device = list(range(1, 1 + pages_for(count, PAGE_SIZE)))[::-1], engine.device
    generator = torch.Generator().manual_seed(seed + count)
    return ForwardBatch(
        input_ids=torch.tensor(random_ids(count, seed=seed + count), device=device),
        positions=torch.arange(count, device=device),
        slots=slots_for(pages, 0, count, PAGE_SIZE).to(device),
        page_table=build_page_table([pages], device),
        q_lens=[count],
        kv_lens=[count],
        capture_hidden=CaptureHidden.LAST,
        features=torch.randn(count, engine.drafter.feature_width, generator=generator).to(device),
    )
