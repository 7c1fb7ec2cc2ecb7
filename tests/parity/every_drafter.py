"""Every drafter on one random target, with drafts that are right as often as a test wants.

A random head hardly ever drafts the target's choice. `tell` replaces its drafts by the coming tokens, some of
them wrong, so that some steps accept all of them and some few. All else of the drafter runs as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from baton.engine.hub import NGRAM
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.protocol import Drafter, DraftPrefill, DraftView, Proposal
from baton.engine.speculative.drafting.shape import DraftShape
from baton.tests.parity.dflash_toys import dflash_config, dflash_tensors, write_dflash
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.eagle_toys import SourcedEngine
from baton.tests.parity.mtp_oracles import write_oracle_modules, write_oracle_target
from baton.tests.parity.mtp_toys import random_modules, write_mtp
from baton.tests.parity.ngram_search import NgramEngine
from baton.tests.parity.oracles import write_memory_oracle
from baton.tests.parity.test_eagle import HEADS
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_logits, reference_model

LAYERS, IDS = 4, (0, 1, 3)  # of the target, and the outputs that EAGLE3 heads and blocks read
NUM_PROMPTS, NUM_TOKENS, MAX_PROMPT = 26, 64, 30
MARGIN = 1e-3  # between the two largest logits, above the noise of float32 on any device
Answers = Mapping[tuple[int, ...], list[int]]


@dataclass(frozen=True)
class Kind:
    """One drafter. `write` makes its checkpoint for a target; `shape` are its steps, topk and tokens."""

    write: Callable[[Path, Path], str | Path]
    shape: dict[str, int] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, int]:
        """`shape` by the names of an engine's settings."""
        return {f"spec_{name}": value for name, value in self.shape.items()}


def head_of(name: str) -> Callable[[Path, Path], Path]:
    """A head of `test_eagle`, or a plain EAGLE3 one, that reads the outputs IDS where it reads several."""

    def write(path: Path, target: Path) -> Path:
        config, tensors = (head_config(2), head_tensors()) if name == "eagle3" else HEADS[name]()
        if "eagle_config" in config:
            config["eagle_config"] |= {"eagle_aux_hidden_state_layer_ids": list(IDS)}
        return write_head(path, config, tensors)

    return write


def blocks(path: Path, target: Path) -> Path:
    return write_dflash(path, dflash_config(IDS), dflash_tensors())


def modules(dialect: str, count: int) -> Callable[[Path, Path], Path]:
    return lambda path, target: write_mtp(path, target, dialect, random_modules(target, count))


TREE = {"steps": 3, "topk": 2, "tokens": 7}
KINDS: dict[str, Kind] = {
    "eagle3": Kind(head_of("eagle3")),
    "eagle3 tree": Kind(head_of("eagle3"), TREE),
    "eagle3 of three layers": Kind(head_of("eagle3 of three layers")),
    "parallel eagle3": Kind(head_of("parallel eagle3")),
    "eagle": Kind(head_of("eagle")),
    "eagle tree": Kind(head_of("eagle"), TREE),
    "dflash": Kind(blocks, {"steps": 7}),
    "mtp shared": Kind(modules("qwen", 1)),
    "mtp shared tree": Kind(modules("qwen", 1), TREE),
    "mtp chained": Kind(modules("deepseek", 3)),
    "mtp independent": Kind(modules("mimo_v2", 3)),
    "ngram": Kind(lambda path, target: NGRAM, {"steps": 4}),
}


def write_kinds(path: Path, target: Path) -> dict[str, str | Path]:
    """The checkpoints of all KINDS."""
    return {name: kind.write(path / name, target) for name, kind in KINDS.items()}


def engine_of(kind: str, target: Path, head: str | Path, device: str = "cpu") -> Engine:
    """An engine that drafts with `head`, whose greedy steps can be captured."""
    shape = KINDS[kind].shape
    if head == NGRAM:
        return NgramEngine(target, device=device, is_greedy=True, **shape)
    return SourcedEngine(target, Path(head), device=device, is_greedy=True, **shape)


def greedy(count: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


def answers_of(target: Path, count: int = NUM_PROMPTS) -> Answers:
    """Random prompts and transformers' answers, by a clear margin and equal to those without drafts."""
    model, engine, found = reference_model(target), Engine(target), {}
    for seed in range(10 * count):
        prompt = random_ids(1 + 7 * seed % MAX_PROMPT, seed=100 + seed)
        engine.next_page = 1
        (tokens,) = engine.generate([prompt], greedy())
        best = reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :].topk(2)
        if float((best.values[:, 0] - best.values[:, 1]).min()) < MARGIN:
            continue
        assert best.indices[:, 0].tolist() == tokens
        found[tuple(prompt)] = tokens
        if len(found) == count:
            return found
    raise AssertionError("the target hesitates too often")


class Told:
    """The coming tokens of the requests of a drafter, by its state rows; see `tell`."""

    def __init__(
        self, drafter: Drafter, answers: Answers, vocab_size: int, device: torch.device | str
    ) -> None:
        self.texts = [[*prompt, *tokens] for prompt, tokens in answers.items()]
        self.vocab_size = vocab_size
        width = max(map(len, self.texts)) + 64  # places behind the end, whose drafts are never kept
        self.table = torch.zeros((256, width), dtype=torch.int64, device=device)
        self.propose = drafter.propose

    def note(self, row: int, known: Sequence[int]) -> None:
        """State row `row` is of the request whose text begins with `known`."""
        text = next(text for text in self.texts if text[: len(known)] == list(known))
        self.table[row, : len(text)] = torch.tensor(text, device=self.table.device)

    def told(self, view: DraftView, shape: DraftShape) -> Proposal:
        """The drafter's own proposal with other tokens, by request, place and node right or wrong."""
        proposal = self.propose(view, shape)
        nodes = torch.arange(proposal.drafts.shape[1], device=self.table.device)
        is_chain = proposal.tree is None
        depths, share = (nodes + 1, 6) if is_chain else (proposal.tree.depths[:, 1:], 7)  # of 8
        at = view.lens[:, None] + depths
        truth = self.table.index_select(0, view.states).gather(1, at)
        is_right = (40503 * at + 9973 * nodes + 313 * view.states[:, None]) % 251 % 8 < share
        drafts = torch.where(is_right, truth, (truth + 1) % self.vocab_size)
        found = proposal.found if proposal.found is None else torch.full_like(proposal.found, drafts.shape[1])
        return proposal._replace(drafts=drafts, found=found)


def tell(drafter: Drafter, answers: Answers, vocab_size: int, device: torch.device | str = "cpu") -> None:
    """Has `drafter` propose the coming tokens, some of them wrong, to the requests of `answers`.

    Comes before the capture of graphs.
    """
    told = Told(drafter, answers, vocab_size, device)
    prefill, begin = drafter.prefill, getattr(drafter, "begin", None)

    def prefill_noted(items: Sequence[DraftPrefill]) -> None:
        for item in items:
            told.note(item.state_row, item.known_ids)
        prefill(items)

    def begin_noted(requests: Sequence[tuple[int, Sequence[int]]]) -> None:
        for row, known in requests:
            told.note(row, known)
        begin(requests)

    drafter.propose, drafter.prefill = told.told, prefill_noted
    if begin is not None:
        drafter.begin = begin_noted


def check_batches(engine: Engine, answers: Answers, batch: int) -> None:
    """All prompts of `answers`, `batch` at a time, their draft rows written in chunks of 16, 64 or all.

    Raises AssertionError unless each gets its answer, and steps accept few and many drafts.
    """
    prompts, chunks = list(answers), (16, 64, 1000)
    engine.results = []
    for i in range(0, len(prompts), batch):
        engine.next_page = 1
        some = prompts[i : i + batch]
        count = len(answers[some[0]])
        requests = [engine.prefill(prompt, greedy(count), chunk=chunks[i // batch % 3]) for prompt in some]
        assert engine.run(requests) == [answers[prompt] for prompt in some]
    lengths = {n for result in engine.results for n in result.accept_lens}
    wanted = {2, 3} if engine.shape.is_tree else {1, 2, 1 + engine.steps}  # a right node may be a leaf
    assert lengths >= wanted, lengths


# Pairs of models whose drafts are right exactly if rows, positions and states are, over a vocabulary of 16.
ORACLES: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "eagle3": write_memory_oracle,
    "parallel eagle3": lambda path: write_memory_oracle(path, 3),
    "mtp shared": lambda path: oracle_modules(path, 1, "embed"),
    "mtp shared by hidden": lambda path: oracle_modules(path, 1, "hidden"),
    "mtp chained": lambda path: oracle_modules(path, 3, "embed"),
    "mtp chained by hidden": lambda path: oracle_modules(path, 3, "hidden"),
}
ORACLE_TOKENS = 1 + 10 * 4  # ten steps of three drafts


def oracle_modules(path: Path, count: int, source: str) -> tuple[Path, Path]:
    """`count` chained MTP modules and their target; `source` as in `mtp_oracles`."""
    target = write_oracle_target(path / "target")
    return target, write_oracle_modules(path / "head", target, count, source=source)


def check_oracle(engine: Engine, plain: Engine) -> None:
    """Eight prompts at once, and two alone: AssertionError unless each step accepts all drafts."""
    prompts = [random_ids(14 + seed, seed=seed, vocab_size=16) for seed in range(8)]
    wanted = plain.generate(prompts, greedy(ORACLE_TOKENS))
    engine.results = []
    assert engine.generate(prompts, greedy(ORACLE_TOKENS)) == wanted
    engine.next_page = 1
    assert [engine.generate([prompt], greedy(ORACLE_TOKENS))[0] for prompt in prompts[:2]] == wanted[:2]
    assert {n for result in engine.results for n in result.accept_lens} == {1 + engine.steps}
