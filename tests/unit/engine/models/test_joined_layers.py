"""Layers whose steps share launches: the same values, and fewer launches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from baton.bench.engine.shapes import FORMS, SHAPES, target_config
from baton.engine.kv.pool import KVPool
from baton.engine.models import moe
from baton.engine.models.interface import CausalLM, StoredForms
from baton.engine.models.registry import build_model
from baton.engine.row_plans import plan_rows
from baton.engine.speculative.drafters.eagle3 import draft_layout
from baton.engine.speculative.drafters.eagle3_head import DraftPhase
from baton.engine.speculative.drafters.eagle3_weights import load_eagle3
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.engine.speculative.drafting.choice import DraftSampling
from baton.kernels import int4_cpu, skinny_linear
from baton.kernels.few_experts import few_experts
from baton.kernels.fp8_scales import FP8
from baton.kernels.kv_store import kv_rows
from baton.kernels.row_ops import FASTEST, INVARIANT, JOIN_NAMES, NO_JOINS, Joins, named_joins
from baton.kernels.triton_jit import Launch, planned_launches
from baton.tests.parity.eagle3_toys import head_config, head_tensors, toy_target, write_head
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

PAGE_SIZE = 4
# Operations of torch that launch nothing: they make or describe tensors.
SILENT = {
    "view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "unsqueeze", "squeeze",
    "expand", "t", "transpose", "permute", "as_strided", "empty", "empty_like", "new_empty",
    "empty_strided", "detach", "alias", "_reshape_alias", "unbind", "empty_memory_format", "lift_fresh",
}  # fmt: skip
SMALL = {"num_hidden_layers": 4, "vocab_size": 64, "max_position_embeddings": 256}
FAMILIES = {
    "llama": SHAPES["toy"] | SMALL,
    "llama in 8 bits": SHAPES["toy"] | SMALL,
    "qwen3-moe": SHAPES["qwen3-30b-a3b"]
    | SMALL
    | {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
    "gpt-oss": SHAPES["toy-gpt-oss"] | SMALL,
    "gpt-oss in 4 bits": SHAPES["toy-gpt-oss"] | SMALL,
    "deepseek-v2": SHAPES["deepseek-v2-lite"]
    | SMALL
    | {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 16,
        "num_experts_per_tok": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    "gemma-3": SHAPES["gemma-3-1b"]
    | SMALL
    | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 16}, }  # fmt: skip
FAMILIES["qwen3-moe in 4 bits"] = FAMILIES["qwen3-moe"] | {"hidden_size": 128, "moe_intermediate_size": 128}
FAMILIES["qwen3-moe wholly in 4 bits"] = FAMILIES["qwen3-moe in 4 bits"] | {"head_dim": 64}
FAMILIES["qwen3-moe with attention in 8 bits"] = FAMILIES["qwen3-moe"] | {"moe_intermediate_size": 1024}
FAMILIES["qwen3-moe in 8 bits"] = FAMILIES["qwen3-moe"] | {"moe_intermediate_size": 48}
FAMILIES["qwen3-moe in blocks of 8 bits"] = FAMILIES["qwen3-moe wholly in 4 bits"]
FAMILIES["latents in blocks of 8 bits"] = FAMILIES["deepseek-v2"] | {  # 576 values of a latent: 4.5 blocks
    "hidden_size": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 128,
}  # fmt: skip
FAMILIES["llama in 4 bits"] = FAMILIES["llama"] | {"intermediate_size": 256}
QUANTISED = {
    "llama in 8 bits": "fp8", "gpt-oss in 4 bits": "mxfp4", "qwen3-moe in 4 bits": "int4",
    "llama in 4 bits": "int4", "qwen3-moe wholly in 4 bits": "int4",
    "qwen3-moe with attention in 8 bits": "fp8", "qwen3-moe in 8 bits": "fp8",
    "qwen3-moe in blocks of 8 bits": "fp8-blocks", "latents in blocks of 8 bits": "fp8-blocks",
}  # fmt: skip
# Modules that are not quantised, by the key of the form.
PLAIN = {
    "qwen3-moe in 4 bits": {"modules_to_not_convert": ["self_attn"]},
    "qwen3-moe with attention in 8 bits": {"ignore": ["re:.*mlp.*", "lm_head"]},
}


def model_of(
    family: str, joins: Joins | None, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CausalLM:
    form = QUANTISED.get(family, "none")
    monkeypatch.setitem(SHAPES, family, FAMILIES[family])
    if family in PLAIN:
        monkeypatch.setitem(FORMS, form, FORMS[form] | PLAIN[family])
    monkeypatch.setattr(int4_cpu, "can_pack", lambda *given: False)
    folder = Path(mkdtemp(dir=tmp_path))
    model = build_model(target_config(family, "", folder, form), dtype=dtype, joins=joins)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.tensors():
        scale = 0.3 if "norm" in name else weight.shape[-1] ** -0.5
        scale = scale / 0.02 if weight.dtype == FP8 else scale  # whose scales are 0.02
        offset = 1.0 if "norm" in name else 0.02 if "scale" in name else 0.0
        if not weight.is_floating_point():
            low, high = (120, 124) if weight.dtype == torch.uint8 and "scales" in name else (0, 256)
            weight.copy_(torch.randint(low, high, weight.shape, generator=generator))
            continue
        weight.copy_(
            torch.randn(weight.shape, generator=generator) * (0.0 if "scale" in name else scale) + offset
        )
    if isinstance(model, StoredForms):
        model.projections.finish()
    return model


def step(model: CausalLM, num_requests: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits of `num_rows` new rows of each request behind 5 random ones, the pool)."""
    pool = KVPool(1 + 4 * num_requests, model.kv_layout(PAGE_SIZE), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=generator))
    pool.kv[0] = 0
    table = torch.arange(1, 1 + 4 * num_requests).view(num_requests, 4)
    positions = torch.arange(5, 5 + num_rows).repeat(num_requests)
    ids = torch.randint(64, (num_requests * num_rows,), generator=generator)
    slots = table.repeat_interleave(num_rows, 0).gather(1, positions[:, None] // PAGE_SIZE)[:, 0] * PAGE_SIZE
    lens = torch.full((num_requests,), 5 + num_rows)
    rows = kv_rows(slots + positions % PAGE_SIZE, pool.kv)
    plan = plan_rows(pool, rows, table, lens, is_recorded=True)
    hidden, _ = model.body(model.embed(ids), positions, plan)
    return model.compute_logits(hidden), pool.kv


def slow_but(quick: set[tuple[object, ...]], cases: Iterable[tuple[object, ...]]) -> list[object]:
    """The cases as parameters of a test, those that are not `quick` marked slow."""
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


# Requests and rows of each: as many as are joined.
MOST_ROWS = {
    "llama in 8 bits": (2, 2), "llama in 4 bits": (2, 2), "gpt-oss in 4 bits": (2, 1),
    "qwen3-moe in 4 bits": (2, 1), "qwen3-moe wholly in 4 bits": (2, 1),
    "qwen3-moe with attention in 8 bits": (1, 3), "qwen3-moe in 8 bits": (2, 2),
    "qwen3-moe in blocks of 8 bits": (2, 2),
}  # fmt: skip
WITH_EXPERTS = ("qwen3-moe", "gpt-oss", "deepseek-v2")
QUICK = (
    "llama", "llama in 4 bits", "qwen3-moe", "qwen3-moe in blocks of 8 bits", "deepseek-v2",
    "gpt-oss in 4 bits",
)  # fmt: skip
NAMES = (("norms",), ("norms", "experts"), ("latents",), JOIN_NAMES)


@pytest.mark.parametrize(
    ("family", "names"),
    slow_but({(family, JOIN_NAMES) for family in QUICK}, product(FAMILIES, NAMES)),
)
@torch.no_grad()
def test_joined_steps_compute_what_they_do_apart(
    family: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows, calls = MOST_ROWS.get(family, (2, 3)), []
    monkeypatch.setattr(moe, "few_experts", lambda *given: calls.append(given) or few_experts(*given))
    logits, kv = step(model_of(family, NO_JOINS, torch.float32, tmp_path, monkeypatch), *rows)
    assert not calls
    joins = Joins(**dict.fromkeys(names, 6), everywhere=True)
    joined, joined_kv = step(model_of(family, joins, torch.float32, tmp_path, monkeypatch), *rows)
    assert bool(calls) is (family.startswith(WITH_EXPERTS) and {"norms", "experts"} <= set(names))
    torch.testing.assert_close(joined, logits, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(joined_kv, kv, rtol=1e-5, atol=2e-5)


class CountOps(TorchDispatchMode):
    """Counts operations of torch that launch something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace == "aten" and name not in SILENT:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def planned_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Collects the launches of kernels on an H200, without one."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        patch.setattr(skinny_linear, "shared_bytes", lambda device: skinny_linear.SHARED_BYTES)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        with FakeTensorMode(allow_non_fake_inputs=True), planned_launches() as planned:
            yield planned


@contextmanager
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collects the names of all launches of an H200, without one."""
    found: list[str] = []
    with planned_on_a_gpu(monkeypatch) as planned, CountOps() as counted:
        yield found
    found += [launch.kernel.__name__ for launch in planned] + counted.names


def one_row_each(model: CausalLM, num_rows: int) -> Callable[[], torch.Tensor]:
    """A step of one row of each of `num_rows` requests, to be run."""
    pool = KVPool(65, model.kv_layout(PAGE_SIZE), torch.device("cpu"))
    table, lens = torch.arange(1, 65).expand(num_rows, -1).contiguous(), torch.full((num_rows,), 6)
    places = torch.full((num_rows,), 5)

    def run() -> torch.Tensor:
        plan = plan_rows(pool, kv_rows(places + 4, pool.kv), table, lens, is_recorded=True)
        return model.body(model.embed(places), places, plan)[0]

    return run


def launches_a_layer(model: CausalLM, monkeypatch: pytest.MonkeyPatch, num_rows: int = 1) -> list[str]:
    """The launches of the third layer of four, in a step of one row of each of `num_rows` requests."""
    counts = []
    for num_layers in (2, 3):
        short = model.layers[:num_layers]
        with monkeypatch.context() as patch:
            patch.setattr(model, "layers", [*short, model.layers[-1]])
            run = one_row_each(model, num_rows)
            with as_on_a_gpu(monkeypatch) as found:
                run()
            counts.append(found)
    few, more = counts
    rest = list(more)
    for name in few:
        rest.remove(name)
    return rest


LIMITS = {
    ("llama", "none"): 9,
    ("llama", "norms"): 7,
    ("llama", "norms,rotary"): 6,
    ("llama", ""): 6,
    ("llama in 8 bits", "none"): 9,
    ("llama in 8 bits", ""): 7,
    ("llama in 4 bits", "none"): 9,
    ("llama in 4 bits", ""): 7,
    ("qwen3-moe", "none"): 12,
    ("qwen3-moe", "norms"): 12,
    ("qwen3-moe", ""): 8,
    ("qwen3-moe in 8 bits", "none"): 12,
    ("qwen3-moe in 8 bits", ""): 8,
    ("qwen3-moe in blocks of 8 bits", ""): 8,
    ("qwen3-moe in 4 bits", "none"): 12,
    ("qwen3-moe in 4 bits", ""): 8,
    ("gpt-oss", ""): 6,
    ("gpt-oss in 4 bits", "none"): 11,
    ("gpt-oss in 4 bits", ""): 6,
    ("deepseek-v2", "none"): 23,
    ("deepseek-v2", "norms,experts"): 17,
    ("deepseek-v2", "latents"): 14,
    ("deepseek-v2", ""): 8,
    ("gemma-3", ""): 9,
}


@pytest.mark.parametrize(("family", "names"), slow_but({(family, "") for family in QUICK}, LIMITS))
@torch.no_grad()
def test_a_decode_layer_of_one_row_has_few_launches(
    family: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without `names`, as a server has it."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    joins = named_joins(names) if names else None
    model = model_of(family, joins, torch.bfloat16, tmp_path, monkeypatch)
    found = launches_a_layer(model, monkeypatch)
    assert len(found) == LIMITS[family, names], found


@pytest.mark.parametrize(
    ("family", "kernel", "rounds"),
    [("llama in 8 bits", "_fp8_few_rows_kernel", True), ("llama in 4 bits", "_int4_rows_kernel", False)],
)
@torch.no_grad()
def test_small_weights_join_up_to_four_rows(
    family: str, kernel: str, rounds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    model = model_of(family, None, torch.bfloat16, tmp_path, monkeypatch)
    few, more = (launches_a_layer(model, monkeypatch, num_rows) for num_rows in (4, 5))
    assert (few.count(kernel), few.count("_rms_norm_kernel")) == (4, 0), few
    assert (more.count(kernel), more.count("_rms_norm_kernel")) == (0, 2), more
    assert ("_quantise_kernel" in more) is rounds, more
    half = model_of(family, None, torch.float16, tmp_path, monkeypatch)
    assert launches_a_layer(half, monkeypatch, 4).count(kernel) == 0


@pytest.mark.parametrize("family", ["gpt-oss", "gpt-oss in 4 bits", "qwen3-moe in 4 bits"])
def test_experts_are_joined_once_they_are_finished(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("baton.engine.models.quant.projections.Projections.finish", lambda self: None)
    model = model_of(family, None, torch.bfloat16, tmp_path, monkeypatch)
    assert not model.layers[1].mlp.joins(named_joins("all"), 1)
    monkeypatch.undo()
    model = model_of(family, None, torch.bfloat16, tmp_path, monkeypatch)
    assert model.layers[1].mlp.joins(named_joins("all"), 1)


def test_batch_invariant_operations_share_no_launches():
    assert INVARIANT.joins == NO_JOINS
    assert FASTEST.joins == named_joins("all")
    assert not FASTEST.joins.takes(torch.empty(1, 8, dtype=torch.bfloat16), FASTEST.joins.norms), "on a CPU"


@torch.no_grad()
def test_the_layer_of_an_eagle3_head_joins_its_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_head(tmp_path, head_config(1), head_tensors())
    layer = load_eagle3(load_draft_config(path, toy_target()), dtype=torch.float32).layer
    inputs = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    norms = 0

    def add_rms_norm(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal norms
        norms += 1
        return FASTEST.add_rms_norm(*arguments)

    def run(joins: Joins) -> torch.Tensor:
        layer.post_norm.ops = replace(FASTEST, joins=joins, add_rms_norm=add_rms_norm)
        return layer(*inputs, torch.ones(3, 16), torch.zeros(3, 16), lambda index, q, k, v, form: q)

    apart = run(NO_JOINS)
    assert norms == 1
    torch.testing.assert_close(run(Joins(norms=3, everywhere=True)), apart, rtol=1e-5, atol=1e-5)
    assert norms == 1


@torch.no_grad()
def test_a_chain_step_of_an_eagle3_head_has_few_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lookups, both norms, four products, attention in two, the norm of the logits, and a choice in three."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    path = write_head(tmp_path, head_config(1), head_tensors())
    target = toy_target(dtype="bfloat16")
    head = load_eagle3(load_draft_config(path, target), dtype=torch.bfloat16)
    table = torch.zeros(target.vocab_size, target.hidden_size, dtype=torch.bfloat16)
    head.share(table, table, 256)
    pool = KVPool(17, draft_layout(head.config, PAGE_SIZE, torch.bfloat16), torch.device("cpu"))
    pages, one = torch.arange(1, 17).view(1, 16), torch.tensor([5])
    sampling = DraftSampling(seeds=one, temperature=one.double(), is_drawn=torch.zeros(1, dtype=torch.bool))
    hidden = torch.zeros(1, target.hidden_size, dtype=torch.bfloat16)
    rows, lens = kv_rows(one + 4, pool.kv), one + 1
    with as_on_a_gpu(monkeypatch) as found:
        plan = plan_rows(pool, rows, pages, lens, is_recorded=True)
        out = head.forward(hidden, one, one, plan, DraftPhase.SELF_CHAIN)
        logits = head.compute_logits(head.feedback(out))
        sampling.choose(logits, one, head.target_ids)
    assert len(found) == 12, " ".join(found)
