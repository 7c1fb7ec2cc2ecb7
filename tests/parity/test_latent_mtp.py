"""MTP modules of DeepSeek-V3: layers of attention over latents and of experts, with latents of their own.

The reference runs the layers of `transformers` behind the target's over all rows, without a cache.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from baton.engine.kv.layouts import MLALayout
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_engine import record_drafts
from baton.tests.parity.graph_engine import arena, with_graphs
from baton.tests.parity.mtp_toys import MtpEngine
from baton.tests.parity.quant_toys import EXPERTS, SHAPE, write_quantised
from baton.tests.parity.tensor_memory import memory
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 2
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=14, ignore_eos=True)
PROMPTS = ([5, 9, 200, 31, 7, 7, 90, 18, 3], [17], list(range(40, 64)), [250, 3, 250, 3, 250, 3])
PARTS = {"eh_proj": (1, 2), "enorm": (1,), "hnorm": (1,), "shared_head.norm": (1,)}  # times the hidden size


@dataclass(frozen=True)
class Toy:
    """`whole` has the modules' layers behind the target's; `target` and `draft` are its two halves."""

    whole: Path
    target: Path
    draft: Path
    num_modules: int

    @classmethod
    def of(cls, whole: Path, folder: Path, num_modules: int) -> "Toy":
        config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
        tensors = load_file(whole / "model.safetensors")
        generator = torch.Generator().manual_seed(5)
        shapes = {name: [each * config["hidden_size"] for each in shape] for name, shape in PARTS.items()}
        modules = {
            f"model.layers.{LAYERS + k}.{name}.weight": torch.randn(shape, generator=generator)
            * (0.2 if len(shape) == 1 else 0.1)
            + (1 if len(shape) == 1 else 0)
            for k in range(num_modules)
            for name, shape in shapes.items()
        }
        behind = tuple(f"model.layers.{LAYERS + k}." for k in range(num_modules))
        modules |= {name: tensor for name, tensor in tensors.items() if name.startswith(behind)}
        target = {name: tensor for name, tensor in tensors.items() if name not in modules}
        for path, held, count in ((folder / "target", target, 0), (folder / "draft", modules, num_modules)):
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
            save_file(held, path / "model.safetensors")
        return cls(whole, folder / "target", folder / "draft", num_modules)

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """`count` greedy drafts behind `ids`, of which the last has no hidden of the target yet."""
        model, modules = reference_model(self.whole), load_file(self.draft / "model.safetensors")
        body, rows = model.model, len(ids) - 1
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            x = body.embed_tokens(torch.tensor([ids[:-1]]))
            turn = body.rotary_emb(x, torch.arange(rows)[None])

            def layer(index: int, x: torch.Tensor) -> torch.Tensor:
                out = body.layers[index](x, attention_mask=mask, position_embeddings=turn)
                return out[0] if isinstance(out, tuple) else out

            for index in range(LAYERS):
                x = layer(index, x)
            hidden, tokens, found = body.norm(x), ids[1:], []
            for k in range(count):
                weight = {name: modules[f"model.layers.{LAYERS + k}.{name}.weight"] for name in PARTS}
                normed = rms(body.embed_tokens(torch.tensor([tokens])), weight["enorm"])
                both = torch.cat((normed, rms(hidden, weight["hnorm"])), -1)
                out = rms(layer(LAYERS + k, both @ weight["eh_proj"].T), weight["shared_head.norm"])
                found.append(int(model.lm_head(out)[0, -1].argmax()))
                tokens, hidden = [*tokens[1:], found[-1]], out
        return found


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@pytest.fixture(scope="module", params=[1, 2])
def toy(
    request: pytest.FixtureRequest,
    toy_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Toy:
    whole = toy_checkpoint("deepseek_v3", num_hidden_layers=LAYERS + request.param)
    return Toy.of(whole, tmp_path_factory.mktemp("mtp"), request.param)


def test_drafts_are_those_of_a_full_recompute_without_a_cache(toy: Toy):
    engine = MtpEngine(toy.target, toy.draft, steps=toy.num_modules)
    layout = engine.drafter.pool.layout
    assert isinstance(layout, MLALayout)
    assert layout.num_layers == toy.num_modules
    request = engine.prefill(random_ids(60, seed=2), GREEDY)
    for _ in range(4):
        before = list(request.all_ids)
        drafts = record_drafts(engine, request)
        assert drafts == toy.drafts(before, toy.num_modules)


def test_parameters_are_the_memory_of_all_tensors_with_experts_as_one(toy: Toy):
    drafter = MtpEngine(toy.target, toy.draft, steps=toy.num_modules).drafter
    parameters = list(drafter.parameters())
    for module in drafter.head.modules:
        assert memory(module.tensors()).items() <= memory(parameters).items()
        assert any(".experts.0." in name for name, _ in module.tensors())
    assert not any(".experts.0." in name for name, _ in parameters)


def test_tokens_are_those_of_transformers_eagerly_and_in_graphs(toy: Toy):
    expected = [reference_greedy(reference_model(toy.target), prompt, 14) for prompt in PROMPTS]
    assert MtpEngine(toy.target, toy.draft, steps=toy.num_modules).generate(PROMPTS, GREEDY) == expected
    graphed = MtpEngine(toy.target, toy.draft, steps=toy.num_modules, is_greedy=True)
    with_graphs(graphed, arena())
    assert graphed.generate(PROMPTS, GREEDY) == expected


@pytest.mark.slow
def test_quantised_modules_and_their_target_say_what_their_values_say(
    toy_checkpoint: Callable[..., Path], tmp_path: Path
):
    """As DeepSeek-V3 is published: matrices in blocks of 128, the projection of both streams in floats."""
    sizes = SHAPE | EXPERTS["deepseek_v3"] | {"num_hidden_layers": LAYERS + 1}
    whole = tmp_path / "blocks"
    values = write_quantised(toy_checkpoint("deepseek_v3", **sizes), whole, "block")
    toys = []
    for path in (whole, values):
        (tmp_path / f"of {path.name}").mkdir()
        toys.append(Toy.of(path, tmp_path / f"of {path.name}", 1))
    stored, reference = toys
    engine = MtpEngine(stored.target, stored.draft, steps=1)
    request = engine.prefill(random_ids(60, seed=2), GREEDY)
    for _ in range(4):
        before = list(request.all_ids)
        assert record_drafts(engine, request) == reference.drafts(before, 1)
    expected = [reference_greedy(reference_model(reference.target), prompt, 14) for prompt in PROMPTS]
    graphed = MtpEngine(stored.target, stored.draft, steps=1, is_greedy=True)
    with_graphs(graphed, arena())
    assert graphed.generate(PROMPTS, GREEDY) == expected
