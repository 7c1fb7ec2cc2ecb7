"""The real model's tokens stay with every drafter: 26 prompts x 64 tokens, handed over and without prefill.

The EAGLE3 head and the MTP module are the shipped ones, and a parallel head is made of the former. The others
have random weights of the model's sizes. `tell` makes most drafts right, so that acceptance takes part. The
shipped ones draft by themselves, too.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.decode.worker import DecodeWorker
from baton.engine.hub import NGRAM
from baton.tests.parity.conftest import Reference
from baton.tests.parity.dflash_toys import write_dflash
from baton.tests.parity.eagle3_toys import write_head
from baton.tests.parity.every_drafter import TREE, Answers, Kind, modules, tell
from baton.tests.parity.test_accept_length import LargePair
from baton.tests.parity.test_aggregated import ask, worker_of
from baton.tests.parity.test_cluster_tokens import assert_same
from baton.tests.parity.test_dflash_cluster import random_blocks
from baton.tests.sim.worker_pair import name
from safetensors.torch import load_file, save_file

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("one_thread"),
]

ASSETS = Path(__file__).resolve().parents[2] / "assets"
SHIPPED = ASSETS / "smollm2-135m-eagle3"
HIDDEN, INNER, KV, VOCAB = 576, 1536, 192, 49152
MASK = 16  # a token without a text
BATCH, NUM_TOKENS = 8, 64
SIZES = {"page_size": 16, "pages": 700, "max_context": 2048, "max_running": BATCH}


def shipped(path: Path, target: Path) -> Path:
    return SHIPPED


def shipped_module(path: Path, target: Path) -> Path:
    return ASSETS / "smollm2-135m-mtp"


def parallel(path: Path, target: Path) -> Path:
    """The shipped head, whose drafts behind the first come from rows of a random mask."""
    shutil.copytree(SHIPPED, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"ptd_token_id": MASK}))
    tensors = load_file(path / "model.safetensors")
    mask = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    save_file(tensors | {"mask_hidden": mask.to(torch.bfloat16)}, path / "model.safetensors")
    return path


def eagle(path: Path, target: Path) -> Path:
    """A random EAGLE head."""
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "bias": False}
    shapes = {
        "fc": (HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
        "layers.0.self_attn.k_proj": (KV, HIDDEN),
        "layers.0.self_attn.v_proj": (KV, HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj": (INNER, HIDDEN),
        "layers.0.mlp.up_proj": (INNER, HIDDEN),
        "layers.0.mlp.down_proj": (HIDDEN, INNER),
    }
    random = torch.Generator().manual_seed(2)
    tensors = {
        f"{part}.weight": 0.05 * torch.randn(shape, generator=random) for part, shape in shapes.items()
    }
    return write_head(
        path, config, tensors | {"layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN)}
    )


def blocks(path: Path, target: Path) -> Path:
    return write_dflash(path, *random_blocks())


KINDS: dict[str, Kind] = {
    "eagle3": Kind(shipped),
    "eagle3 tree": Kind(shipped, TREE),
    "parallel eagle3": Kind(parallel),
    "eagle": Kind(eagle),
    "eagle tree": Kind(eagle, TREE),
    "dflash": Kind(blocks, {"steps": 7}),
    "mtp shared": Kind(shipped_module),
    "mtp shared tree": Kind(shipped_module, TREE),
    "mtp chained": Kind(modules("deepseek", 3)),
    "mtp independent": Kind(modules("mimo_v2", 3)),
    "ngram": Kind(lambda path, target: NGRAM, {"steps": 4}),
}
OWN = ("eagle3", "eagle3 tree", "mtp shared", "mtp shared tree")  # heads that draft without `tell`
CHUNKS = {"16": 16, "64": 64, "whole": 0}


@pytest.fixture(scope="module")
def references(reference_greedy: dict[str, Reference]) -> list[Reference]:
    found = list(reference_greedy.values())
    assert len(found) == 26
    return found


@pytest.fixture(scope="module")
def answers(references: list[Reference]) -> Answers:
    return {tuple(reference.prompt_ids): reference.output_ids for reference in references}


def check(
    references: list[Reference], batch: int, serve: Callable[[list[Reference]], list[list[int]]]
) -> None:
    """All answers are those of transformers, but for ties."""
    same = []
    for i in range(0, len(references), batch):
        some = references[i : i + batch]
        same += [assert_same(*pair) for pair in zip(some, serve(some), strict=True)]
    assert sum(same) >= len(same) - 2, "more ties than real text has"


def shortest(references: list[Reference]) -> list[Reference]:
    """Four of the shorter prompts, but longer than a page."""
    return sorted(references, key=lambda each: len(each.prompt_ids))[4:8]


def check_counters(worker: DecodeWorker) -> None:
    counters = worker.stats().counters
    assert counters["accepted_tokens"] > counters["verify_steps"]
    assert counters["have_tokens"] > 0


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_over_a_hand_off(smollm2_dir, tmp_path, references, answers, kind, chunk):
    """All, eight at a time; then some short ones, cached and alone."""
    head, number = KINDS[kind].write(tmp_path / "head", smollm2_dir), 0
    ours = {"draft": ""} if kind == "ngram" else None
    pair = LargePair(
        smollm2_dir, head, ours=ours, chunk_size=CHUNKS[chunk], overlap="on", **SIZES, **KINDS[kind].settings
    )
    tell(pair.decode.engine.drafter, answers, VOCAB)

    def serve(some: list[Reference]) -> list[list[int]]:
        nonlocal number
        rooms = [name(number + i) for i in range(len(some))]
        number += len(some)
        for room, reference in zip(rooms, some, strict=True):
            pair.send(room, reference.prompt_ids, max_new_tokens=NUM_TOKENS)
        pair.run(turns=100_000)
        return [pair.tokens[room] for room in rooms]

    check(references, BATCH, serve)
    check(shortest(references), 1, serve)
    check_counters(pair.decode)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("kind", "is_told"), [*((kind, True) for kind in KINDS), *((kind, False) for kind in OWN)]
)
def test_answers_of_an_aggregated_worker(smollm2_dir, tmp_path, references, answers, kind, is_told):
    head = KINDS[kind].write(tmp_path / "head", smollm2_dir)
    settings = SIZES | KINDS[kind].settings
    worker = worker_of(smollm2_dir, head, 64, overlap="on", **settings)
    if is_told:
        tell(worker.engine.drafter, answers, VOCAB)

    def serve(some: list[Reference]) -> list[list[int]]:
        return ask(worker, [tuple(reference.prompt_ids) for reference in some], NUM_TOKENS)

    check(references, BATCH, serve)
    check(shortest(references), 1, serve)
    check_counters(worker)
