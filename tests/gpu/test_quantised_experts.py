"""Quantised experts on a GPU: each number of rows, equal bits, graphs, and models against their values."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.invariance import check_invariance
from baton.engine.kv.pool import KVPool
from baton.engine.models.weights import load_model
from baton.engine.runner.model_runner import ModelRunner
from baton.kernels.expert_mlp import expert_mlp
from baton.kernels.fp8_experts import FEW_SHARE, Fp8Matrices, fp8_experts, fp8_experts_reference
from baton.kernels.fp8_linear import fp8_linear
from baton.kernels.fp8_scales import FP8_ROUNDING
from baton.kernels.int4_linear import int4_linear
from baton.kernels.mxfp4 import decode_mxfp4, pack_mxfp4
from baton.kernels.packed_experts import PackedMatrices, packed_experts, packed_experts_reference
from baton.kernels.row_ops import INVARIANT
from baton.tests.kernels.cases import randn
from baton.tests.kernels.expert_cases import choices
from baton.tests.kernels.quant_cases import fp8_weight, int4_weight
from baton.tests.kernels.quant_expert_cases import fp8_experts_of, packed_experts_of
from baton.tests.parity.quant_toys import EXPERTS, ORDERED, SHAPE, write_quantised
from baton.tests.parity.test_gpt_oss import write_packed
from baton.tests.parity.toy_engine import NUM_PAGES, PAGE_SIZE, ToyEngine, random_ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# Few slots, each of its own; tiles of 16, 32, 64 and 128 rows.
COUNTS = (1, 2, 5, 20, 60, 150, 250, 700)
EXPERTS_A_LAYER, CHOSEN, HIDDEN, INNER = 8, 3, 512, 256
SIZES = (COUNTS[-1], EXPERTS_A_LAYER, CHOSEN, HIDDEN, INNER)
GROUPS = (0, 32, 64, 128)
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def on_gpu(matrices: Fp8Matrices | PackedMatrices) -> Fp8Matrices | PackedMatrices:
    parts = (part.cuda() if isinstance(part, torch.Tensor) else part for part in matrices)
    return type(matrices)(*parts)


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = randn(COUNTS[-1], HIDDEN, dtype=torch.bfloat16)
    weights = torch.softmax(randn(COUNTS[-1], CHOSEN, seed=3), -1)
    return x, choices(COUNTS[-1], EXPERTS_A_LAYER, CHOSEN), weights


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (found.cpu().float() - expected).norm() / expected.norm()
    assert error <= tolerance, float(error)


def check_near(product: Product, reference: Product, tolerance: Callable[[int], float]) -> None:
    """`product` on the GPU, `reference` in float32 on the CPU, for each number of rows."""
    x, ids, weights = rows()
    for count in COUNTS:
        own = x[:count], ids[:count], weights[:count]
        expected = reference(own[0].float(), *own[1:])
        near(product(*(part.cuda() for part in own)), expected, tolerance(count))


@pytest.mark.parametrize("form", ["channel", "block"])
def test_experts_in_8_bits_are_near_the_values_for_any_rows(form: str):
    """Two roundings of rows are off by FP8_ROUNDING / sqrt(3) each at most."""
    matrices = fp8_experts_of(SIZES, form)
    on_device = [on_gpu(each) for each in matrices]
    check_near(
        lambda *own: fp8_experts(*own, *on_device),
        lambda *own: fp8_experts_reference(*own, *matrices),
        lambda count: 1.5 * FP8_ROUNDING,
    )


@pytest.mark.parametrize("form", ["channel", "block"])
def test_few_slots_of_many_experts_in_8_bits_take_the_values(form: str):
    """Their rows are not rounded, as those of more slots are."""
    num_experts = FEW_SHARE * CHOSEN
    matrices = fp8_experts_of((COUNTS[-1], num_experts, CHOSEN, HIDDEN, INNER), form)
    on_device = [on_gpu(each) for each in matrices]
    x, _, weights = (part[:2] for part in rows())
    ids = choices(2, num_experts, CHOSEN)
    for count, tolerance in ((1, 0.01), (2, 1.5 * FP8_ROUNDING)):
        own = x[:count], ids[:count], weights[:count]
        expected = fp8_experts_reference(own[0].float(), *own[1:], *matrices)
        found = fp8_experts(*(part.cuda() for part in own), *on_device)
        near(found, expected, tolerance)
        assert count == 1 or float((found.cpu().float() - expected).norm() / expected.norm()) > 0.01


@pytest.mark.parametrize("group", GROUPS)
def test_experts_in_4_bits_are_near_the_values_for_any_rows(group: int):
    matrices = packed_experts_of(SIZES, group)
    on_device = [on_gpu(each) for each in matrices]
    check_near(
        lambda *own: packed_experts(*own, *on_device),
        lambda *own: packed_experts_reference(*own, *matrices),
        lambda count: 0.01,
    )


@pytest.mark.parametrize("count", COUNTS)
def test_experts_in_mxfp4_have_the_bits_of_decoded_ones(count: int):
    """Their values are exact, also with scales far from each other, and multiplied in the same order."""
    x, ids, weights = (part[:count].cuda() for part in rows())
    generator, packed, decoded = torch.Generator().manual_seed(1), [], []
    for out, size, least in ((2 * INNER, HIDDEN, 100), (HIDDEN, INNER, 100)):
        shape = (EXPERTS_A_LAYER, out, size // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(least, 150, shape, generator=generator).to(torch.uint8)
        if out == 2 * INNER:
            scales[:, :INNER] = scales[:, :INNER].clamp(120, 124)  # of the gates
        pairs = [pack_mxfp4(*each) for each in zip(blocks, scales, strict=True)]
        packed.append(on_gpu(PackedMatrices(*(torch.stack(part) for part in zip(*pairs, strict=True)))))
        decoded.append(decode_mxfp4(blocks, scales, torch.bfloat16).cuda())
    found, expected = packed_experts(x, ids, weights, *packed), expert_mlp(x, ids, weights, *decoded)
    assert expected.isfinite().all()
    assert torch.equal(found, expected)


def invariant_products() -> dict[str, Callable[[int], torch.Tensor]]:
    """Products of the first rows, as many as are asked for."""
    x, ids, weights = (part.cuda() for part in rows())
    found: dict[str, Callable[[int], torch.Tensor]] = {}
    for form in ("channel", "block"):
        matrices = [on_gpu(each) for each in fp8_experts_of(SIZES, form)]
        found[f"experts, fp8 {form}"] = lambda count, matrices=matrices: fp8_experts(
            x[:count], ids[:count], weights[:count], *matrices, is_invariant=True
        )
        parts = [part.cuda() for part in fp8_weight(2 * INNER, HIDDEN, form)]
        for is_gated in (False, True):
            found[f"fp8 {form}, gate {is_gated}"] = lambda count, parts=parts, is_gated=is_gated: fp8_linear(
                x[:count], *parts, None, is_gated, is_invariant=True
            )
    for group in GROUPS:
        matrices = [on_gpu(each) for each in packed_experts_of(SIZES, group)]
        found[f"experts, 4 bits {group}"] = lambda count, matrices=matrices: packed_experts(
            x[:count], ids[:count], weights[:count], *matrices, is_invariant=True
        )
        if group:
            parts = [part.cuda() for part in int4_weight(2 * INNER, HIDDEN, group)]
            found[f"int4 {group}"] = lambda count, parts=parts: int4_linear(
                x[:count], *parts, None, is_invariant=True
            )
    return found


def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it():
    for name, product in invariant_products().items():
        whole = product(COUNTS[-1])
        for count in (*COUNTS, 16, 17, 64, 65, 129):
            assert torch.equal(product(count), whole[:count]), (name, count)


@pytest.mark.parametrize("count", [1, 3, 20, 100])
def test_graphs_follow_their_inputs(count: int):
    x, ids, weights = (part[:count].cuda() for part in rows())
    fp8 = [on_gpu(each) for each in fp8_experts_of(SIZES, "block")]
    packed = [on_gpu(each) for each in packed_experts_of(SIZES, 0)]
    for product, matrices in ((fp8_experts, fp8), (packed_experts, packed)):
        product(x, ids, weights, *matrices)  # compiled before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = product(x, ids, weights, *matrices)
        for seed in (1, 2):
            x.copy_(randn(count, HIDDEN, dtype=torch.bfloat16, seed=seed))
            ids.copy_(choices(count, EXPERTS_A_LAYER, CHOSEN, seed))
            graph.replay()
            assert torch.equal(out, product(x, ids, weights, *matrices)), seed


MODELS = [
    ("qwen3_moe", "block"),
    ("qwen3_moe", "channel"),
    ("mixtral", "awq"),
    ("glm4_moe", "gptq"),
    ("deepseek_v3", "block"),
    ("llama", ORDERED),
    ("gpt_oss", "mxfp4"),
]


# The only layer has experts.
ALL_EXPERTS = {
    "qwen3_moe": {"mlp_only_layers": []},
    "glm4_moe": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
}


def written(
    toy_checkpoint: Callable[..., Path], toy_copy: Callable[..., Path], path: Path, family: str, form: str
) -> Path:
    """A checkpoint of one layer of `family` in `form`."""
    if form == "mxfp4":
        write_packed(toy_copy(family, num_hidden_layers=1, hidden_size=256), path)
        return path
    sizes = SHAPE | EXPERTS.get(family, {}) | {"hidden_size": 256, "num_hidden_layers": 1}
    write_quantised(toy_checkpoint(family, **sizes | ALL_EXPERTS.get(family, {})), path, form)
    return path


@pytest.mark.parametrize(("family", "form"), MODELS)
def test_a_model_is_near_its_values(
    toy_checkpoint: Callable[..., Path],
    toy_copy: Callable[..., Path],
    tmp_path: Path,
    family: str,
    form: str,
):
    """A prompt and decoded tokens of one layer, against the float32 model on the CPU. A row that is near two
    choices may take another expert, so nine tenths of the rows count.
    """
    path = written(toy_checkpoint, toy_copy, tmp_path / "x", family, form)
    on_cpu = ToyEngine(path)
    model, _ = load_model(path, dtype=torch.bfloat16, device="cuda")
    runner = ModelRunner(
        model, KVPool(NUM_PAGES, model.kv_layout(PAGE_SIZE), "cuda", row_dtype=torch.bfloat16)
    )
    prompt = random_ids(100, seed=3)
    errors = []
    for chunk in (prompt[:80], prompt[80:81], *([each] for each in prompt[81:])):
        batch = on_cpu.batch(("a", chunk))
        expected = on_cpu.runner.forward(batch).logits[-1].clone()
        for name in ("input_ids", "positions", "slots", "page_table"):
            setattr(batch, name, getattr(batch, name).cuda())
        found = runner.forward(batch).logits[-1].cpu().float()
        errors.append(float((found - expected).norm() / expected.norm()))
    assert sorted(errors)[len(errors) * 9 // 10] <= (0.45 if form in ("block", "channel") else 0.2), errors


@pytest.mark.parametrize(("family", "form"), [case for case in MODELS if case[0] != "deepseek_v3"])
def test_this_device_may_be_deterministic_with_quantised_weights(
    toy_checkpoint: Callable[..., Path],
    toy_copy: Callable[..., Path],
    tmp_path: Path,
    family: str,
    form: str,
):
    path = written(toy_checkpoint, toy_copy, tmp_path / "x", family, form)
    model, _ = load_model(path, dtype=torch.bfloat16, device="cuda", is_invariant=True)
    check_invariance(model, INVARIANT)
