"""Samples of a decode worker follow the target's law: a chi-square test over sequences; wrong rules fail it.

The target is a Markov chain (no layer of it does anything, lm_head holds log-probabilities), so the law of a
sequence is a product that can be written down. Requests go the real way: admission, prefill, batch, steps
with drafts of a random head, frames of tokens.

Why the rule keeps the law. In every row the target draws its own token y from its own distribution p behind
that row's drafts, with noise that is a function of (seed, position) alone; drafts are kept while they equal
y, and what is emitted is always y. So each emitted token is a draw from p behind the tokens emitted before
it: there are no ratios, no residual and no bonus to get wrong, and no distribution of the drafter takes part.
The drafter may see the same noise, which makes matches likelier (a coupling by Gumbel noise), for it chooses
only whether a row's draw is used, on the condition that its prefix is what was emitted. The rules below bring
back what other rules have to get right.

Thresholds are quantiles of the chi-square distribution by Wilson and Hilferty's approximation. A million
sequences see a total variation of about 0.005 in 80 cells.
"""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from baton.cluster.protocol.messages import Reserve, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.hub import NGRAM
from baton.engine.loader import EngineLoader
from baton.engine.speculative.drafting.verify import verify_drafts
from baton.engine.speculative.step import fused_step
from baton.tests.parity.eagle3_toys import write_head
from safetensors.torch import save_file

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, HIDDEN, TOKENS = 3, 16, 4  # the first of them is prefill's
BATCH, D = 200, "d" * 32
LAW = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.6, 0.15]], dtype=torch.float64)
NORMAL_QUANTILE = 4.75  # one false alarm in a million
FEW, QUICK, MANY = 2000, 6000, 1_000_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("markov")
    return write_target(path / "target"), write_random_head(path / "head")


def write_target(path: Path) -> Path:
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB,
        "rms_norm_eps": 0.0,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    embed, lm_head = torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    embed[:, :VOCAB] = torch.eye(VOCAB)
    lm_head[:, :VOCAB] = (LAW.log().T / HIDDEN**0.5).float()
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": lm_head,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    save_file(tensors | layer("model.layers.0.", HIDDEN, 0.0), path / "model.safetensors")
    return path


def write_random_head(path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "intermediate_size": 4,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "vocab_size": VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]},
    }  # fmt: skip
    random = torch.Generator().manual_seed(4)
    tensors = layer("midlayer.", 2 * HIDDEN, 0.4) | {"midlayer.hidden_norm.weight": torch.ones(HIDDEN)}
    tensors |= {name: torch.randn(rows, HIDDEN, generator=random) * 0.4
                for name, rows in (("fc.weight", HIDDEN), ("lm_head.weight", VOCAB))}  # fmt: skip
    return write_head(path, config, tensors | {"norm.weight": torch.ones(HIDDEN)})


def layer(prefix: str, width: int, scale: float) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    shapes = {f"self_attn.{n}_proj": (8, width) for n in "qkv"} | {"self_attn.o_proj": (HIDDEN, 8)}
    shapes |= {"mlp.gate_proj": (4, HIDDEN), "mlp.up_proj": (4, HIDDEN), "mlp.down_proj": (HIDDEN, 4)}
    tensors = {
        f"{prefix}{name}.weight": scale * torch.randn(shape, generator=random)
        for name, shape in shapes.items()
    }
    return tensors | {
        f"{prefix}{n}.weight": torch.ones(HIDDEN) for n in ("input_layernorm", "post_attention_layernorm")
    }


class Ears:
    """The link of a worker, heard by the test."""

    def __init__(self) -> None:
        self.transport_counters: dict[str, float] = {}
        self.heard: list[object] = []

    def hand_over(self) -> None:
        pass

    def post(self, message: object) -> None:
        self.heard.append(message)


def worker_of(models: tuple[Path, Path | str], **shape: object) -> DecodeWorker:
    """One that computes the prompts itself; nothing is kept from one request to the next."""
    target, head = map(str, models)
    config = EngineConfig(
        model=target, draft=head, device="cpu", dtype="float32", page_size=4, pages=4 * BATCH, max_context=64,
        prefix_cache=False, max_running=BATCH, **shape,
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return DecodeWorker(loader.engine(), Ears(), instance=D, max_running=BATCH, local_prefill_tokens=BATCH)


def sample(models: tuple[Path, Path | str], count: int, **shape: object) -> torch.Tensor:
    """How often each of VOCAB ** TOKENS sequences came behind token 0, `[cells]` int64."""
    worker, cells = worker_of(models, **shape), torch.zeros(VOCAB**TOKENS, dtype=torch.int64)
    places = VOCAB ** torch.arange(TOKENS - 1, -1, -1)
    for first in range(0, count, BATCH):
        for seed in range(first, min(first + BATCH, count)):
            sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=TOKENS, ignore_eos=True)
            request = Reserve(
                room=f"{seed:032x}", epoch=0, instance=D, prompt_ids=[0], sampling=sampling, deadline_ms=0
            )
            worker.handle(request, now=0.0)
        while worker.num_rooms:
            worker.step()
        outputs: dict[str, list[int]] = {}
        for message in worker.link.heard:
            for item in message.items if isinstance(message, Tokens) else ():
                outputs.setdefault(item.room, []).extend(item.ids)
        worker.link.heard.clear()
        cells += torch.bincount((torch.tensor(list(outputs.values())) * places).sum(1), minlength=len(cells))
    counters = worker.stats().counters
    assert int(cells.sum()) == count
    assert counters["accepted_tokens"] > 0.1 * count, "drafts take part"
    return cells


def is_refuted(cells: torch.Tensor) -> bool:
    """Whether counts like these come from the target's law once in a million times or less."""
    expected = []
    for tokens in product(range(VOCAB), repeat=TOKENS):
        chances = LAW[[0, *tokens[:-1]], list(tokens)]
        expected.append(chances.prod() * cells.sum())
    statistic = float(((cells - torch.stack(expected)).square() / torch.stack(expected)).sum())
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + NORMAL_QUANTILE * (2 / (9 * freedom)) ** 0.5) ** 3
    print(
        f"chi-square {statistic:.1f}, {freedom} degrees of freedom, limit {limit:.1f}, {int(cells.sum())} "
        "sequences"
    )
    return statistic > limit


def bonus_from_the_draft(shape, tokens, tree, targets, limits, nodes):
    """Wrong: behind the last kept draft stands the draft's next token instead of the target's."""
    accepted = verify_drafts(shape, tokens, tree, targets, limits, nodes)
    last = (accepted.accept_len - 1)[:, None]
    drafts = torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1)
    return accepted._replace(tokens=accepted.tokens.scatter(1, last, drafts.gather(1, last)))


def threshold_of_99_percent(shape, tokens, tree, targets, limits, nodes):
    """Wrong: a draft is kept one time in a hundred though the target chose another token."""
    is_lenient = torch.rand(targets.shape) < 0.01
    drafts = torch.cat((tokens[:, 1:], targets[:, -1:]), dim=1)
    return verify_drafts(shape, tokens, tree, torch.where(is_lenient, drafts, targets), limits, nodes)


def residual_not_normalised(shape, tokens, tree, targets, limits, nodes):
    """Wrong: where a draft was refused the target chooses anew from all its tokens, the refused one among
    them."""
    accepted = verify_drafts(shape, tokens, tree, targets, limits, nodes)
    last = (accepted.accept_len - 1)[:, None]
    anew = torch.multinomial(LAW[tokens.gather(1, last)[:, 0]], 1)
    was_refused = last < tokens.shape[1] - 1
    chosen = torch.where(was_refused, anew, accepted.tokens.gather(1, last))
    return accepted._replace(tokens=accepted.tokens.scatter(1, last, chosen))


def noise_of_the_first_row(shape, tokens, tree, targets, limits, nodes):
    """Wrong: all rows of a step choose with one coin."""
    return verify_drafts(shape, tokens, tree, targets[:, :1].expand(targets.shape), limits, nodes)


GROSS = [bonus_from_the_draft, residual_not_normalised, noise_of_the_first_row]
# with other drafters: the rule is the same code
GROSS_AGAIN = [GROSS[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in GROSS[1:])]


def test_sequences_of_a_decode_worker_have_the_targets_law(models):
    assert not is_refuted(sample(models, QUICK))


@pytest.mark.parametrize("rule", GROSS)
def test_a_wrong_rule_is_refuted(models, monkeypatch, rule):
    torch.manual_seed(1)
    monkeypatch.setattr(fused_step, "verify_drafts", rule)
    assert is_refuted(sample(models, FEW))


@pytest.fixture
def lookup(models: tuple[Path, Path]) -> tuple[Path, str]:
    """The same target, whose drafts are looked up: with three tokens the newest one has often come before."""
    return models[0], NGRAM


def test_sequences_with_drafts_by_lookup_have_the_targets_law(lookup):
    assert not is_refuted(sample(lookup, QUICK, ngram_min=1, ngram_max=2, spec_adaptive="off"))


@pytest.mark.parametrize("rule", [bonus_from_the_draft, residual_not_normalised])
def test_a_wrong_rule_for_drafts_by_lookup_is_refuted(lookup, monkeypatch, rule):
    torch.manual_seed(1)
    monkeypatch.setattr(fused_step, "verify_drafts", rule)
    assert is_refuted(sample(lookup, FEW, ngram_min=1, ngram_max=2, spec_adaptive="off"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "shape", [{}, {"spec_steps": 2, "spec_topk": 2, "spec_tokens": 5}], ids=["chain", "tree"]
)
def test_a_million_sequences_have_the_targets_law(models, shape):
    assert not is_refuted(sample(models, MANY, **shape))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_sequences_with_drafts_by_lookup_have_the_targets_law(lookup):
    assert not is_refuted(sample(lookup, MANY, ngram_min=1, ngram_max=2, spec_adaptive="off"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_sequences_refute_a_threshold_of_99_percent(models, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(fused_step, "verify_drafts", threshold_of_99_percent)
    assert is_refuted(sample(models, MANY))
