"""All ways in which a batch can meet the graphs, with their results: one matrix for tapes and a device.

A cell names the path (which graphs run), the size (requests in the batch and tokens of the prompts, both
around the edges of a bucket), the layers that the head asks for, the shape of the drafts, what graphs and
memory have been through before, and one of two pairs of models. The random pair's tokens depend on all of its
KV; the oracle's drafts are right exactly when the right features reach the draft. Before every step all
static inputs are poisoned, before every run all pages.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path

import torch
from baton.engine.capture.graph_set import GraphSet
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.cuda import CudaBackend
from baton.engine.graphs.tape.tape import TapeBackend
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle3_toys import (
    ORACLE_VOCAB,
    VOCAB,
    head_config,
    head_tensors,
    write_head,
    write_oracle,
)
from baton.tests.parity.feature_rows import FeatureRows
from baton.tests.parity.graph_engine import (
    BREAKABLE,
    FULL,
    arena,
    capture,
    enable,
    families,
    kv_of,
    poison,
    with_graphs,
)
from baton.tests.parity.overlap_engine import overlapped, run_ahead
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_model, write_toy_checkpoint

LAYERS, STEPS = 9, 3
MAX_BATCH, MAX_TOKENS = 6, 24  # buckets 1, 2, 4, 6 and 1, 2, 4, 8, 16, 24
PATHS = {"full": FULL, "breakable": BREAKABLE, "eager": set()}
SIZES = {
    "one": (1, 1),
    "edge - 1": (3, 15),
    "edge": (4, 16),
    "edge + 1": (5, 17),
    "above": (9, 25),
}  # requests, tokens
AUX_IDS = {"default": (1, 3, 5), "custom": (2, 3, 7), "unsorted": (7, 1, 5), "last layer": (0, 5, 8)}
SHAPES = {"chain": {"steps": STEPS}, "tree": {"steps": STEPS, "topk": 2, "tokens": 8}}
STATES = ("fresh", "churned")
PAIRS = ("random", "oracle")
# Both pairs take 1 + 2 * (1 + STEPS) tokens: the first, and two steps accepted in full.
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1 + 2 * (1 + STEPS), ignore_eos=True)
TOLERANCE = {"cpu": {"atol": 2e-4, "rtol": 1e-4}, "cuda": {"atol": 1e-3, "rtol": 1e-3}}


@dataclass(frozen=True, order=True)
class Cell:
    """One way of many; fields are keys of the tables above."""

    pair: str
    aux: str
    shape: str
    state: str
    path: str
    size: str

    def __str__(self) -> str:
        return "-".join(part.replace(" ", "") for part in astuple(self))


ALL = tuple(Cell(*values) for values in product(PAIRS, AUX_IDS, SHAPES, STATES, PATHS, SIZES))
# Whole steps as one graph, launched before the step before was read: as many requests as it has slots, and no
# more.
AHEAD = tuple(Cell(*values) for values in product(PAIRS, AUX_IDS, SHAPES, STATES, ["ahead"], [*SIZES][:-1]))
# One engine for each cell's first four fields. These eight have every pair of their values.
QUICK_ENGINES = {
    (PAIRS[(i // 2 + k) % 2 ^ (i % 2)], aux, ("chain", "tree")[k], STATES[(i // 2) ^ k])
    for i, aux in enumerate(AUX_IDS)
    for k in (0, 1)
}


def combined_in(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
    """Every two of a cell's values, and the three that say which code runs: models, shape and path."""
    values = list(enumerate(astuple(cell)))
    return {*combinations(values, 2), (values[0], values[2], values[4])}


def quick_ahead() -> tuple[Cell, ...]:
    """A chain of the random pair and a tree of the oracle, on engines that exist anyway."""
    engines = {(pair, shape): (pair, aux, shape, state) for pair, aux, shape, state in sorted(QUICK_ENGINES)}
    return Cell(*engines["random", "chain"], "ahead", "edge - 1"), Cell(
        *engines["oracle", "tree"], "ahead", "edge + 1"
    )


def covering(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Some of `cells` that together have all that any of them combines."""
    left, chosen = sorted(cells), []
    missing = set().union(*map(combined_in, left))
    while missing:
        chosen.append(max(left, key=lambda cell: len(combined_in(cell) & missing)))
        missing -= combined_in(chosen[-1])
    return tuple(sorted(chosen))


QUICK = covering(cell for cell in ALL if astuple(cell)[:4] in QUICK_ENGINES)


def prompts_of(cell: Cell) -> list[list[int]]:
    """As many prompts as the size says, each of as many tokens."""
    count, length = SIZES[cell.size]
    vocab_size = VOCAB if cell.pair == "random" else ORACLE_VOCAB - 1
    return [random_ids(length, seed=10 * count + i, vocab_size=vocab_size) for i in range(count)]


# --- running a cell -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A run's results per request: tokens, accept lengths, features `[tokens - 1, K*H]`, both models' KV."""

    tokens: list[list[int]]
    accept_lens: list[list[int]]
    features: list[torch.Tensor]
    kv: list[torch.Tensor]
    paths: set[str]


def run(engine: Engine, prompts: list[list[int]], rows: FeatureRows, *, is_ahead: bool = False) -> Seen:
    """All of `prompts` in one batch to their end, on pages that hold NaN. What a graph of a step passes to
    the drafter is seen in the draft's KV alone."""
    engine.next_page, engine.results = 1, []
    rows.clear()
    for pool in (engine.runner.pool, engine.drafter.pool):
        pool.kv[1:] = float("nan")
    requests = [engine.prefill(prompt, GREEDY) for prompt in prompts]
    if is_ahead:
        engine.results = run_ahead(engine, requests)
        for request in requests:
            engine.decoder.forget(request)
    tokens = engine.run(requests)
    is_hidden = any(result.path == "graph" for result in engine.results)
    for pool in (engine.runner.pool, engine.drafter.pool):
        assert not bool(pool.kv[0].any()), "the sink stays zero"
    return Seen(
        tokens=tokens,
        accept_lens=[result.accept_lens for result in engine.results if result.tokens],
        features=[
            torch.stack(
                [rows.of(r.pages[0])[i] for i in range(r.num_prompt if is_hidden else r.num_tokens - 1)]
            )
            for r in requests
        ],
        kv=[part for request in requests for part in kv_of(engine, request)],
        paths={result.path for result in engine.results},
    )


class GraphedEngine:
    """An engine with every kind of graph, in the state that `cell` wants."""

    def __init__(self, models: tuple[Path, Path], cell: Cell, device: str) -> None:
        self.engine = Engine(*models, device=device, is_greedy=True, **SHAPES[cell.shape])
        self.backend: GraphBackend = CudaBackend() if device == "cuda" else TapeBackend(arena())
        self.graphs = with_graphs(
            self.engine, backend=self.backend, max_batch=MAX_BATCH, max_tokens=MAX_TOKENS
        )
        self.rows = FeatureRows(self.engine.drafter)
        self.other: Engine | None = None
        self.ahead = cache(
            lambda: self._ahead(Engine(*models, device=device, is_greedy=True, **SHAPES[cell.shape]))
        )
        if cell.state == "churned":
            self._capture_others(Engine(*models, device=device, steps=2, is_greedy=True))

    def _capture_others(self, other: Engine) -> None:
        """Other buckets' graphs in the same memory; half of them go again, the rest replays between cells."""
        graphs = capture(
            other.runner, other.drafter, other.decoder.steps, max_batch=3, max_tokens=12, backend=self.backend
        )
        enable(other, FULL)
        for family in families(other):
            if family.kind in BREAKABLE:
                graphs.pool.drop(family.kind)
        self.other = other

    def _ahead(self, engine: Engine) -> tuple[Engine, FeatureRows]:
        overlapped(engine, graphs=True, backend=self.backend)
        return engine, FeatureRows(engine.drafter)

    def run(self, cell: Cell) -> Seen:
        if cell.path == "ahead":
            engine, rows = self.ahead()
        if self.other is not None:
            self._churn(self.other)
        if cell.path == "ahead":
            return run(engine, prompts_of(cell), rows, is_ahead=True)
        enable(self.engine, PATHS[cell.path])
        poison(self.engine)
        return run(self.engine, prompts_of(cell), self.rows)

    def _churn(self, other: Engine) -> None:
        other.next_page = 1
        other.generate([[5, 3, 8], [9, 1]], GREEDY)
        with self.backend.eager_region():
            device = self.engine.device
            held = [torch.full((count, 96), float("nan"), device=device) for count in (4, 16, 1, 64, 24) * 8]
            del held[::2]


class Matrix:
    """Models, engines and references of all cells on one device, each made when a cell first needs it."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.directory = directory
        self.device = device
        self.models = cache(self._models)
        self.graphed = cache(self._graphed)
        self.plain = cache(self._plain)
        self.reference = cache(lambda pair, aux: LayerOutputs(self.models(pair, aux)[0]))

    def check(self, cell: Cell) -> None:
        """AssertionError unless the cell gives what its models, eagerly and by transformers, give."""
        bench = self.graphed(cell.pair, cell.aux, cell.shape, cell.state)
        before = bench.graphs.counters()
        seen, plain = bench.run(cell), self.plain(cell.pair, cell.aux, cell.shape, cell.size)
        if cell.path == "ahead":
            assert seen.paths == {"graph"}
        else:
            check_paths(cell, bench.engine, bench.graphs, before, seen)
        assert seen.tokens == plain.tokens
        assert seen.accept_lens == plain.accept_lens
        if cell.pair == "oracle":
            assert {n for step in seen.accept_lens for n in step} == {1 + STEPS}
        tolerance, reference = TOLERANCE[self.device], self.reference(cell.pair, cell.aux)
        torch.testing.assert_close(seen.kv, plain.kv, **tolerance)
        for prompt, tokens, features in zip(prompts_of(cell), seen.tokens, seen.features, strict=True):
            states, choices = reference(tuple(prompt + tokens[:-1]))
            assert choices[len(prompt) - 1 :] == tokens
            wanted = torch.cat([states[i] for i in AUX_IDS[cell.aux]], -1)[: len(features)]
            torch.testing.assert_close(features.cpu(), wanted, **tolerance)

    def _models(self, pair: str, aux: str) -> tuple[Path, Path]:
        path, ids = self.directory / f"{pair} {aux}", AUX_IDS[aux]
        if pair == "oracle":
            return write_oracle(path, ids, num_layers=LAYERS, attention=0.005)
        target = self.directory / "random target"
        if not target.exists():
            write_toy_checkpoint(target, "llama", num_hidden_layers=LAYERS)
        return target, write_head(path, head_config(2, ids), head_tensors())

    def _graphed(self, pair: str, aux: str, shape: str, state: str) -> GraphedEngine:
        return GraphedEngine(self.models(pair, aux), Cell(pair, aux, shape, state, "", ""), self.device)

    def _plain(self, pair: str, aux: str, shape: str, size: str) -> Seen:
        """Of an engine that never had a graph."""
        engine = Engine(*self.models(pair, aux), device=self.device, **SHAPES[shape])
        return run(engine, prompts_of(Cell(pair, aux, shape, "", "", size)), FeatureRows(engine.drafter))


class LayerOutputs:
    """Of transformers: every layer's output for a text, and the likeliest token behind each of its tokens."""

    def __init__(self, target: Path) -> None:
        self.model = reference_model(target)
        self._seen: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            layer.register_forward_hook(self._keep)
        self._known: dict[tuple[int, ...], tuple[list[torch.Tensor], list[int]]] = {}

    def _keep(self, module: object, args: object, output: object) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._seen.append(hidden[0])

    def __call__(self, ids: tuple[int, ...]) -> tuple[list[torch.Tensor], list[int]]:
        if ids not in self._known:
            self._seen = []
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0]
            self._known[ids] = self._seen, logits.argmax(-1).tolist()
        return self._known[ids]


def check_paths(cell: Cell, engine: Engine, graphs: GraphSet, before: dict[str, float], seen: Seen) -> None:
    """The graphs that the cell is about did run, and no other; what was too large for them was counted."""
    after = graphs.counters()
    made = {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}
    is_small = cell.size != "above"
    for family in families(engine):
        kind, wanted = family.kind.value, family.kind in PATHS[cell.path]
        reason = (
            ("tokens_over_max" if family.kind in BREAKABLE else "batch_over_planned")
            if wanted
            else "disabled"
        )
        assert (f"graph_replays_{kind}" in made) is (wanted and is_small), made
        assert (f"graph_fallback_{kind}_{reason}" in made) is not (wanted and is_small), made
    assert seen.paths == ({"graph"} if cell.path == "full" and is_small else {"eager"})
