"""Dispatch of kernel calls, refused arguments, and the compilation of every kernel for its GPU."""

import importlib
import re
from collections.abc import Callable

import pytest
import torch
from baton.kernels import skinny_linear
from baton.kernels.attention_form import AttentionForm
from baton.kernels.chain_verify import chain_verify, chain_verify_triton
from baton.kernels.choose_ranked import Ranking, choose_ranked, choose_ranked_triton
from baton.kernels.choose_token import choose_token, choose_token_triton
from baton.kernels.compact_kv import compact_kv, compact_kv_triton
from baton.kernels.context_attention import (
    NARROW_TILE,
    WIDE_TILE,
    ContextKV,
    context_attention,
    context_attention_triton,
    tile_of,
)
from baton.kernels.digest_spans import DIGEST_FIELDS, digest_spans_triton
from baton.kernels.expanded_attention import expanded_attention_triton
from baton.kernels.expert_mlp import ExpertForm, expert_mlp, expert_mlp_triton
from baton.kernels.extend_attention import paged_extend, paged_extend_triton
from baton.kernels.few_experts import FewExperts, few_experts_triton
from baton.kernels.fp8_expert_rows import fp8_expert_rows_triton
from baton.kernels.fp8_experts import Fp8Matrices, fp8_experts, fp8_experts_triton
from baton.kernels.fp8_few_rows import few_rows_product, few_rows_tile
from baton.kernels.fp8_linear import fp8_linear_triton
from baton.kernels.fp8_many_rows import fp8_blocks_triton
from baton.kernels.fp8_rows import fp8_rows_triton, scaled_fp8_triton, sum_fp8_triton
from baton.kernels.fp8_scales import BLOCK, FP8, Fp8Weight
from baton.kernels.gather_context import gather_context, gather_context_triton
from baton.kernels.int4_linear import dequantise_int4_triton
from baton.kernels.int4_mma import int4_mma_triton
from baton.kernels.int4_rows import MAX_ROWS as MOST_INT4_ROWS
from baton.kernels.int4_rows import scaled_int4_triton, sum_int4_triton
from baton.kernels.int4_values import Int4Weight
from baton.kernels.int4_wgmma import int4_wgmma_triton
from baton.kernels.invariant_attention import Rows, invariant_attention_triton
from baton.kernels.kv_store import store_kv_triton
from baton.kernels.latent_attention import latent_extend_triton, latent_verify_triton
from baton.kernels.latent_step import (
    LatentRows,
    LatentSizes,
    attend_latents_triton,
    prepare_latents_triton,
)
from baton.kernels.latent_store import store_latent_triton
from baton.kernels.look_up_rows import Lookup, look_up_rows, look_up_rows_triton
from baton.kernels.match_ngrams import NgramSizes, match_ngrams, match_ngrams_triton
from baton.kernels.move_rows import ROW_FIELDS, move_rows_triton
from baton.kernels.move_spans import RUN_FIELDS, SPAN_FIELDS, move_spans_triton
from baton.kernels.norm_pair import norm_pair, norm_pair_triton
from baton.kernels.normed_linear import UnscaledRows, scaled_linear_triton, sum_linear_triton
from baton.kernels.packed_experts import MXFP4, PackedMatrices, packed_experts, packed_experts_triton
from baton.kernels.paged_tile import TileShape
from baton.kernels.penalise_logits import RowEdits, penalise_logits, penalise_logits_triton
from baton.kernels.put_rows import Put, put_rows, put_rows_triton
from baton.kernels.quantise_rows import quantise_rows_triton
from baton.kernels.rms_norm import NextNorm, add_rms_norm, rms_norm_triton
from baton.kernels.rope import apply_rope_triton
from baton.kernels.rotary_product import rotary_product, rotary_product_triton
from baton.kernels.rotate_store import rotate_store_triton
from baton.kernels.route_experts import Routing, route_experts, route_experts_triton
from baton.kernels.select_rows import select_last_rows, select_last_rows_triton
from baton.kernels.silu_mul import silu_mul_reference, silu_mul_triton
from baton.kernels.skinny_linear import (
    FEW_OUTPUTS,
    SkinnyShape,
    gated_linear,
    linear,
    linear_triton,
    vector_shape,
)
from baton.kernels.step_glue import (
    PlaceSizes,
    step_outcome,
    step_outcome_triton,
    step_places,
    step_places_triton,
)
from baton.kernels.top_logprobs import top_logprobs, top_logprobs_triton
from baton.kernels.tree_verify import tree_verify, tree_verify_triton
from baton.kernels.verify_attention import (
    MAX_SPLITS,
    choose_splits,
    least_split,
    paged_verify,
    paged_verify_triton,
)
from baton.kernels.wgmma_attention import wgmma_attention_triton
from baton.tests.kernels import bench_kernels
from baton.tests.kernels.cases import randn
from torch._subclasses.fake_tensor import FakeTensorMode

SHARED_BYTES = 227 * 1024  # what one program may use on an H100 or H200
OPERATIONS = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "silu_mul": "silu_mul",
    "linear": "skinny_linear",
    "gated_linear": "skinny_linear",
    "apply_rope": "rope",
    "store_kv": "kv_store",
    "paged_verify": "verify_attention",
    "paged_extend": "extend_attention",
    "gather_context": "gather_context",
    "context_attention": "context_attention",
    "tree_verify": "tree_verify",
    "compact_kv": "compact_kv",
    "select_last_rows": "select_rows",
    "look_up_rows": "look_up_rows",
    "put_rows": "put_rows",
    "norm_pair": "norm_pair",
    "choose_token": "choose_token",
    "choose_ranked": "choose_ranked",
    "penalise_logits": "penalise_logits",
    "top_logprobs": "top_logprobs",
    "step_places": "step_glue",
    "step_outcome": "step_glue",
    "chain_verify": "chain_verify",
    "match_ngrams": "match_ngrams",
    "route_experts": "route_experts",
    "group_experts": "group_experts",
    "expert_mlp": "expert_mlp",
}


class Launched(Exception):
    """A launcher was called."""


def trap_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: object, **__: object) -> None:
        raise Launched

    for name in set(OPERATIONS.values()):
        module = importlib.import_module(f"baton.kernels.{name}")
        launchers = [attribute for attribute in vars(module) if attribute.endswith("_triton")]
        assert launchers, name
        for launcher in launchers:
            monkeypatch.setattr(module, launcher, launched)


def test_cpu_tensors_never_reach_a_launcher(monkeypatch: pytest.MonkeyPatch):
    trap_launchers(monkeypatch)
    for bench in bench_kernels.registry("cpu", is_small=True):
        bench.run()


def test_cuda_tensors_always_reach_a_launcher(monkeypatch: pytest.MonkeyPatch):
    trap_launchers(monkeypatch)
    monkeypatch.setattr(skinny_linear, "shared_bytes", lambda device: SHARED_BYTES)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for bench in bench_kernels.registry("cuda", is_small=True):
            with pytest.raises(Launched):
                bench.run()


@pytest.mark.parametrize("num_bytes", [0, 99 * 1024, 163 * 1024])
def test_a_device_too_small_for_the_tiles_uses_the_librarys_matmul(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    trap_launchers(monkeypatch)
    monkeypatch.setattr(skinny_linear, "shared_bytes", lambda device: num_bytes)
    monkeypatch.setattr(skinny_linear, "silu_mul", silu_mul_reference)
    with FakeTensorMode():
        x, weight = (torch.zeros(rows, 64, dtype=torch.bfloat16, device="cuda") for rows in (1, 96))
        assert linear(x, weight).shape == (1, 96)
        assert gated_linear(x, weight).shape == (1, 48)


def test_every_operation_is_in_the_bench_registry():
    benches = list(bench_kernels.registry("cpu", is_small=True))
    assert {bench.name.split()[0] for bench in benches} == set(OPERATIONS)
    assert len({bench.name for bench in benches}) == len(benches)
    by_name = {bench.name: bench for bench in benches}
    # 3 rows of 4096 bf16 in, as many out, one row of weights; 40 rows of 2 x 8 heads x 128 bf16 for each of 2
    # requests, and a query in, a row out, each multiplied and added twice per context row
    assert by_name["rms_norm 3"].num_bytes == 7 * 8192
    assert by_name["paged_verify decode 2x40"].num_bytes == 2 * 40 * 4096 + 2 * 2 * 8192
    assert by_name["paged_verify decode 2x40"].num_flops == 2 * 40 * 4 * 4096
    assert by_name["paged_extend 1x40"].num_flops == sum(4 * 4096 * (row + 1) for row in range(40))
    assert all(bench.num_bytes > 0 for bench in benches)


def check_compiled(compiled: list[tuple[str, object]]) -> None:
    """Each kernel has code for the GPU and fits its shared memory."""
    for name, kernel in compiled:
        assert kernel.asm["cubin"], name
        assert kernel.metadata.shared <= (
            skinny_linear.SHARED_BYTES if name == "_skinny_kernel" else SHARED_BYTES
        ), name
        check_chained(name, kernel)


def check_chained(name: str, kernel: object) -> None:
    """A kernel that starts before the one in front of it ends waits before it touches memory, and only then
    lets the next one start.
    """
    ptx = kernel.asm["ptx"]
    waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx)]
    releases = [match.start() for match in re.finditer(r"griddepcontrol\.launch_dependents", ptx)]
    if not kernel.metadata.launch_pdl:
        assert waits == releases == [], name
        return
    touched = re.search(r"\b(ld|st|red|atom)\.global|\bcp\.async|\bcp\.reduce", ptx)
    assert touched is not None, name
    assert len(waits) == 1, name
    assert waits[0] < min([touched.start(), *releases]), name


def test_kernels_of_a_plain_decode_step_compile_for_an_h200(compiled_for_h200: list[tuple[str, object]]):
    x, projected = randn(3, 4096, dtype=torch.bfloat16), randn(3, 48, 128, dtype=torch.bfloat16)
    pool, table, lens = bench_kernels.paged(2, 40, "cpu")
    rms_norm_triton(x, x[0], 1e-5, x)
    rotate_store_triton(
        pool, 1, torch.zeros(3, dtype=torch.int64), projected, projected[:, 0], projected[:, 1]
    )
    queries = randn(2, 1, 32, 128, dtype=torch.bfloat16)
    paged_verify_triton(queries, pool, 1, table, lens, 0.1, None, num_splits=8)
    names = {name for name, _ in compiled_for_h200}
    assert names == {"_rms_norm_kernel", "_rotate_store_kernel", "_verify_kernel", "_merge_kernel"}
    check_compiled(compiled_for_h200)


@pytest.mark.slow
def test_kernels_of_windows_caps_and_sinks_compile_for_an_h200(compiled_for_h200: list[tuple[str, object]]):
    """With the shapes of gpt-oss (64 heads of 64 values) and of Gemma (8 heads of 256)."""
    for heads, kv_heads, head_dim, window, softcap in ((64, 8, 64, 128, 0.0), (8, 4, 256, 4096, 50.0)):
        pool = torch.zeros(9, 2, 2, 16, kv_heads, head_dim, dtype=torch.bfloat16)
        table, lens = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([40, 40])
        sinks = torch.zeros(heads, dtype=torch.bfloat16) if softcap == 0.0 else None
        form = AttentionForm(window, softcap, sinks)
        q = randn(3, heads, head_dim, dtype=torch.bfloat16)
        starts = torch.tensor([0, 1, 3])
        paged_extend_triton(q, pool, 1, table, starts, lens, 64, 0.1, None, form)
        queries = randn(2, 8, heads, head_dim, dtype=torch.bfloat16)
        for mask in (None, torch.zeros(2, 8, 8, dtype=torch.bool)):
            for splits in (1, 8):
                arguments = queries, pool, 1, table, lens, 0.1, mask
                paged_verify_triton(*arguments, num_splits=splits, form=form)
            places = Rows(lens, uniform=8, tree_mask=mask)
            for limit in (0, 1 << 30):
                flat = queries.flatten(0, 1)
                invariant_attention_triton(
                    flat, pool, 1, table, places, 0.1, form=form, base_split=64, max_partial_bytes=limit
                )
        keys = torch.zeros(256, kv_heads, head_dim, dtype=torch.bfloat16)
        places = starts, torch.tensor([0, 128, 256]), lens, 0.1
        for rows in (1, 1 << 20):
            tile = tile_of(rows, heads, 0, q.dtype, head_dim)
            context_attention_triton(q, ContextKV(keys, keys), *places, tile=tile, form=form)
    x = randn(3, 2880, dtype=torch.bfloat16)
    rms_norm_triton(x, x[0], 1e-5, x, 1.0)
    linear_triton(x, torch.cat((x, x)), is_gated=True, is_gelu=True)
    silu_mul_triton(x, True)
    projected = randn(3, 12, 96, dtype=torch.bfloat16)
    apply_rope_triton(projected, projected[:, 0, :72], projected[:, 1, :72])
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    gate_up, down = torch.zeros(4, 128, 2880, dtype=x.dtype), torch.zeros(4, 2880, 64, dtype=x.dtype)
    experts = ExpertForm(gate_up[..., 0].contiguous(), down[..., 0].contiguous(), 7.0, 1.702)
    expert_mlp_triton(x, ids, weights, gate_up, down, form=experts)
    for is_grouped in (False, True):
        part = experts._replace(first=4, total=8)
        expert_mlp_triton(
            x, ids, weights, gate_up, down, form=part, is_grouped=is_grouped, is_prompt=is_grouped
        )
    check_compiled(compiled_for_h200)


@pytest.mark.slow
def test_kernels_of_few_rows_compile_for_an_h200(compiled_for_h200: list[tuple[str, object]]):
    x = randn(4, 2048, dtype=torch.bfloat16)
    weight, norm = torch.zeros(3072, 2048, dtype=torch.bfloat16), NextNorm(x[0], 1e-5)
    for num_rows in (1, 4):
        _, rows = sum_linear_triton(x[:num_rows], weight[:2048], None, x[:num_rows], norm)
        for is_gated in (False, True):
            scaled_linear_triton(rows, weight, is_gated=is_gated)
        for hidden, head_dim, num_heads in ((4096, 128, 32), (576, 64, 9)):
            z, kv_heads = torch.zeros(num_rows, hidden, dtype=torch.bfloat16), num_heads // 3
            wide = torch.zeros((num_heads + 2 * kv_heads) * head_dim, hidden, dtype=torch.bfloat16)
            for dtype in (torch.bfloat16, FP8):
                rotary_product_triton(
                    torch.zeros(8, 2, 2, 16, kv_heads, head_dim, dtype=dtype), 1,
                    torch.zeros(num_rows, dtype=torch.int64), rows._replace(z=z), wide, None,
                    *[z[:, :head_dim]] * 2,
                )  # fmt: skip
    wide = torch.zeros(4, 5760, 2880, dtype=torch.bfloat16), torch.zeros(4, 2880, 2880, dtype=torch.bfloat16)
    _, long = sum_linear_triton(x[:1, :2000], torch.zeros(2880, 2000).bfloat16(), None, wide[1][0, :1], norm)
    choice = Routing(top_k=4, is_normalised=True)
    few_experts_triton(long, FewExperts(choice, wide[1][0, :4], *wide), wide[1][0, :1], norm)
    for is_gated, in_size, out_size in (
        (False, 2880, 64),
        (False, 576, 64),
        (True, 2048, 64),
        (True, 4096, 64),
        (True, 576, 64),
        (True, 576, 5000),
    ):
        one = torch.zeros(1, in_size, dtype=torch.bfloat16)
        shape = vector_shape(in_size, out_size, is_gated=is_gated)
        linear_triton(one, one.expand(64, -1).contiguous(), is_gated=is_gated, shape=shape, max_tile_rows=1)
    linear_triton(one.expand(3, -1), one.expand(64, -1).contiguous(), shape=FEW_OUTPUTS)
    eighths = Fp8Weight(torch.zeros(2048, 2048, dtype=FP8), torch.zeros(2048))
    blocks = eighths._replace(scales=torch.zeros(16, 16))
    for count, given in ((2, eighths), (3, eighths), (4, blocks)):
        many, tiles = weight[:count], [few_rows_tile(count, is_gated) for is_gated in (False, True)]
        product = few_rows_product(many, given, has_pairs=True)
        _, rows = product.summed(many, many, norm, tiles[0])
        for is_gated in (False, True):
            product.scaled(rows, tiles[is_gated], is_gated=is_gated)
            assert "prmt.b32" in compiled_for_h200[-1][1].asm["ptx"]
    for given in (eighths, blocks):
        _, rows = sum_fp8_triton(x[:1], given, x[:1], norm)
        for is_gated in (False, True):
            scaled_fp8_triton(rows, given, is_gated=is_gated)
    quarters = Int4Weight(torch.zeros(2048, 256, dtype=torch.int32), torch.zeros(16, 2048).int())
    for count in range(1, MOST_INT4_ROWS + 1):
        _, few = sum_int4_triton(weight[:count, :2048], quarters, weight[:count, :2048], norm, has_pairs=True)
        for is_gated in (False, True):
            scaled_int4_triton(few, quarters, is_gated=is_gated, has_pairs=True)
            assert "fma.rn.bf16x2" in compiled_for_h200[-1][1].asm["ptx"]
    shared = torch.zeros(5632, 2048, dtype=torch.bfloat16), torch.zeros(2048, 2816, dtype=torch.bfloat16)
    up, down = (torch.zeros(6, *shape, dtype=torch.bfloat16) for shape in ((2816, 2048), (2048, 1408)))
    routing = Routing(top_k=6, is_normalised=False)
    experts = FewExperts(routing, x[:1].expand(6, -1), up, down, None, True, *shared)
    few_experts_triton(rows, experts, x[:1], norm)
    for split in (1, BLOCK):  # scales of outputs, and of blocks
        both = [
            Fp8Matrices(
                torch.zeros(8, *shape, dtype=FP8),
                torch.zeros(8, shape[0] // split, *([count] if split > 1 else [])),
            )
            for shape, count in (((1536, 2048), 16), ((2048, 768), 6))
        ]
        few_experts_triton(rows, FewExperts(routing, x[:1].expand(8, -1), *both), x[:1], norm)
    for top_k, inner, group in ((4, 2880, MXFP4), (8, 768, 128)):
        matrices = [
            PackedMatrices(
                torch.zeros(8, *shape, dtype=torch.int16),
                torch.zeros(8, shape[1] // 32, shape[0], dtype=torch.int32),
                group,
            )
            for shape in ((2 * inner, 512), (2048, -(-inner // 128) * 32))
        ]
        form = ExpertForm(torch.zeros(8, 2 * inner).bfloat16(), torch.zeros(8, 2048).bfloat16(), 7.0, 1.702)
        routing = Routing(top_k=top_k, is_normalised=True)
        packed = FewExperts(routing, x[:1].expand(8, -1), *matrices, router_bias=x[0, :8], form=form)
        few_experts_triton(rows, packed, x[:1], norm, has_pairs=True)
        assert "fma.rn.bf16x2" in compiled_for_h200[-1][1].asm["ptx"]
    sizes, made = LatentSizes(128, 64, 128, 512, True), torch.zeros(16, 256, 512, dtype=torch.bfloat16)
    latents = torch.zeros(10, 2, 1, 16, 1, 576, dtype=torch.bfloat16)
    table = torch.zeros(1, 8, dtype=torch.int64)
    new = LatentRows(weight.view(-1)[None, :3072], x[:1, :576], x[0, :512], 1e-5, x[:1, :64], x[:1, :64])
    q = prepare_latents_triton(latents, 1, table[0, :1], new, made, sizes)
    attend_latents_triton(q, latents, 1, table, torch.ones(1, dtype=torch.int64), 0.1, made, sizes)
    assert {name for name, _ in compiled_for_h200} == {
        "_normed_kernel", "_skinny_kernel", "_fp8_rows_kernel", "_fp8_few_rows_kernel", "_int4_rows_kernel",
        "_logits_kernel", "_first_kernel", "_second_kernel", "_first_packed_kernel", "_second_packed_kernel",
        "_prepare_kernel", "_latent_kernel", "_values_kernel", "_rotary_kernel",
    }  # fmt: skip
    check_compiled(compiled_for_h200)


@pytest.mark.slow
def test_a_norm_behind_a_norm_rounds_its_products_before_their_sum(
    compiled_for_h200: list[tuple[str, object]],
):
    x = randn(3, 123, dtype=torch.bfloat16)
    norm = NextNorm(x[0], 1e-5)
    rms_norm_triton(x, norm.weight, 1e-5, x, None, norm)
    assert "fma" not in compiled_for_h200[0][1].asm["ptx"]


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200_and_fits_its_shared_memory(
    compiled_for_h200: list[tuple[str, object]],
):
    x, projected = randn(3, 4096, dtype=torch.bfloat16), randn(3, 48, 128, dtype=torch.bfloat16)
    q, k, v = projected.split([32, 8, 8], dim=1)
    pool, table, lens = bench_kernels.paged(2, 40, "cpu")
    tables, rows = (projected[:, 0], projected[:, 1]), torch.zeros(3, dtype=torch.int64)
    rms_norm_triton(x, x[0], 1e-5, x)
    silu_mul_triton(x)
    linear_triton(x, x, is_gated=False)
    for many in (x, randn(33, 4096, dtype=torch.bfloat16)):
        for weight in (torch.cat((x, x, x, x)), x[:1].expand(10240, -1).contiguous()):
            linear_triton(many, weight, is_gated=True)
    eighths = torch.zeros(8192, 4096, dtype=FP8)
    scales = (torch.zeros(8192), torch.zeros(8192 // BLOCK, 4096 // BLOCK))
    for form in scales:
        fp8_linear_triton(x, eighths, form, is_gated=form is scales[1], is_rounded=True)
    many, wide = randn(64, 4096, dtype=torch.bfloat16), torch.zeros(4096, 8320, dtype=FP8)
    fp8_linear_triton(many, eighths.repeat(3, 1), scales[1].repeat(3, 1), is_gated=True, is_rounded=True)
    fp8_linear_triton(wide[:64].to(x.dtype), wide, torch.zeros(32, 65), is_rounded=True, splits=0)
    for count in (1, 2, 4):
        many = eighths[:count, :4096].to(torch.bfloat16)
        for form, is_gated in ((scales[0], False), (scales[1], True)):
            fp8_rows_triton(many, Fp8Weight(eighths, form), is_gated=is_gated)
    for many, group in ((x, 4096), (x.repeat(30, 1), 4096), (x, BLOCK)):
        quantise_rows_triton(many, group)
    fp8_blocks_triton(randn(300, 4096, dtype=torch.bfloat16), eighths, scales[1])
    for group in (32, 64, 128):
        packed, groups = torch.zeros(8192, 512, dtype=torch.int32), torch.zeros(4096 // group, 8192).int()
        dequantise_int4_triton(packed, groups, torch.bfloat16)
        for dtype, is_gated in ((torch.bfloat16, True), (torch.float16, False)):
            for int4_triton, num_rows in (
                (int4_mma_triton, 3), (int4_mma_triton, 16), (int4_wgmma_triton, 8), (int4_wgmma_triton, 100)
            ):  # fmt: skip
                given = torch.zeros(num_rows, 4096, dtype=dtype), packed, groups
                int4_triton(*given, torch.zeros(8192, dtype=dtype), is_gated=is_gated)
    apply_rope_triton(projected, *tables)
    store_kv_triton(pool, 1, rows, k, v)
    rotate_store_triton(pool, 1, rows, projected, *tables)
    select_last_rows_triton(x, lens[:1])
    look_up_rows_triton(Lookup(x, rows), *[Lookup(tables[0].contiguous(), rows)] * 2)
    states = Put(x, x[: rows.shape[0]]), Put(x.float(), x[: rows.shape[0]].float())
    put_rows_triton(rows, *states, counts=rows)
    put_rows_triton(rows, *states)
    norm_pair_triton(x, NextNorm(x[0], 1e-5), x, NextNorm(x[0], 1e-5))
    tree_verify_triton(table, table, table, lens)
    compact_kv_triton(pool, table, table)
    paged_extend_triton(q, pool, 1, table, torch.tensor([0, 1, 3]), lens, 64, 0.1)
    places = torch.tensor([0, 128, 256]), lens
    keys = torch.zeros(256, 8, 128, dtype=torch.bfloat16)
    gather_context_triton(pool, 1, table, *places, keys, keys)
    for tile in (NARROW_TILE, WIDE_TILE):
        context_attention_triton(q, ContextKV(keys, keys), torch.tensor([0, 1, 3]), *places, 0.1, tile=tile)
    tiles = ContextKV(keys, keys).tile_descriptors()
    wgmma_attention_triton(q, tiles, 8, torch.tensor([0, 1, 3]), *places, 0.1)
    logits, doubles = randn(3, 4096), torch.ones(3, dtype=torch.float64)
    for min_p, ids in ((doubles, torch.arange(4096)), (None, None)):
        choose_token_triton(logits, rows, rows, doubles, min_p, rows.bool(), ids)
    ranking = Ranking(rows, doubles, rows, doubles, doubles, rows.bool())
    choose_ranked_triton(logits, rows, ranking, rows, rows.bool(), 1024)
    penalties, seen, drafts = torch.ones(3, 3), torch.zeros(3, 4096, dtype=torch.int32), rows.new_zeros(3, 0)
    top_logprobs_triton(logits, rows, rows, 20)
    penalise_logits_triton(logits, RowEdits(rows, penalties, seen, drafts))
    state, flags = torch.ones(3, 20, dtype=torch.int64), torch.zeros(12, dtype=torch.bool)
    step_places_triton(state, PlaceSizes(4, 4, 4, 16, 1024, 64, 32))
    step_outcome_triton(state, rows, state[:, :4], state[:, :4], rows, flags, flags, rows)
    chain_verify_triton(state, state, rows)
    match_ngrams_triton(state.int(), rows, rows, NgramSizes(2, 5, 3))
    trees = torch.ones(2, 16, 16, dtype=torch.bool)
    for num_rows, mask in ((1, None), (16, trees)):
        queries = randn(2, num_rows, 32, 128, dtype=torch.bfloat16)
        paged_verify_triton(queries, pool, 1, table, lens, 0.1, mask, num_splits=8)
    for num_rows, mask in ((1, None), (16, trees)):
        queries = randn(2 * num_rows, 32, 128, dtype=torch.bfloat16)
        uniform = Rows(lens, uniform=num_rows, tree_mask=mask)
        long_table = torch.zeros(2, 300, dtype=torch.int64)
        invariant_attention_triton(queries, pool, 1, long_table, uniform, 0.1)
        invariant_attention_triton(queries, pool, 1, table, uniform, 0.1)
    ragged = Rows(lens, starts=torch.tensor([0, 1, 3]), longest=64)
    invariant_attention_triton(q, pool, 1, table, ragged, 0.1)
    runs = torch.zeros(1, RUN_FIELDS, dtype=torch.int64)
    move_spans_triton(torch.zeros(1, SPAN_FIELDS, dtype=torch.int64), runs, rows[None])
    move_rows_triton(torch.zeros(1, ROW_FIELDS, dtype=torch.int64), runs, rows[None])
    digest_spans_triton(torch.zeros(1, DIGEST_FIELDS, dtype=torch.int64), rows[None])
    route_experts_triton(x[:, :128], Routing(top_k=8, is_normalised=True))
    latents = torch.zeros(10, 2, 1, 16, 1, 576, dtype=torch.bfloat16)
    store_latent_triton(latents, 1, rows, torch.zeros(rows.shape[0], 1, 576, dtype=torch.bfloat16))
    for num_rows, num_heads in ((1, 16), (2, 16), (4, 128)):
        queries = torch.zeros(2, num_rows, num_heads, 576, dtype=torch.bfloat16)
        latent_verify_triton(queries, latents, 1, table, lens, 0.1, 512, num_splits=8)
    starts = torch.tensor([0, 40, 41])
    latent_extend_triton(
        randn(41, 16, 576, dtype=torch.bfloat16), latents, 1, table, starts, lens, 40, 0.1, 512
    )
    made, firsts = randn(80, 16, 256, dtype=torch.bfloat16), torch.tensor([0, 40, 80])
    expanded_attention_triton(
        randn(41, 16, 192, dtype=torch.bfloat16), made, randn(80, 64, dtype=torch.bfloat16), starts, firsts,
        lens, 40, 0.1, randn(41, 16, 128, dtype=torch.bfloat16),
    )  # fmt: skip
    gate_up, down = (torch.zeros(4, *shape, dtype=torch.bfloat16) for shape in ((1536, 2048), (2048, 768)))
    for num_tokens in (1, 16, 64, 512):
        ids = torch.zeros(num_tokens, 2, dtype=torch.int32)
        rows_in = torch.zeros(num_tokens, 2048, dtype=torch.bfloat16)
        expert_mlp_triton(rows_in, ids, torch.ones(num_tokens, 2), gate_up, down)
    expert_mlp_triton(rows_in, ids, torch.ones(num_tokens, 2), gate_up, down, is_prompt=True)
    names = [name for name, _ in compiled_for_h200]
    assert set(names) == {
        "_rms_norm_kernel", "_silu_mul_kernel", "_rope_kernel", "_store_kv_kernel", "_rotate_store_kernel",
        "_select_last_rows_kernel", "_look_up_kernel", "_put_kernel", "_norm_pair_kernel",
        "_tree_verify_kernel", "_extend_kernel", "_verify_kernel",
        "_merge_kernel", "_compact_kv_kernel", "_highest_kernel", "_scores_kernel", "_pick_kernel",
        "_group_highest_kernel", "_cut_kernel", "_candidates_kernel", "_draw_kernel", "_penalise_kernel",
        "_logprobs_kernel",
        "_skinny_kernel", "_places_kernel", "_outcome_kernel", "_chain_verify_kernel",
        "_fp8_kernel", "_fp8_blocks_kernel", "_quantise_kernel", "_dequantise_kernel",
        "_quantise_wide_kernel", "_int4_mma_kernel", "_int4_wgmma_kernel", "_add_splits_kernel",
        "_fp8_rows_kernel", "_fp8_few_rows_kernel",
        "_match_ngrams_kernel",
        "_store_latent_kernel", "_latent_kernel", "_expanded_kernel",
        "_route_kernel", "_group_kernel", "_expert_kernel", "_prompt_kernel", "_combine_kernel",
        "_gather_kernel", "_context_kernel", "_wgmma_context_kernel", "_fold_kernel", "_join_kernel",
        "_move_spans_kernel", "_move_rows_kernel", "_digest_spans_kernel",
    }  # fmt: skip
    check_compiled(compiled_for_h200)
    by_name = dict(compiled_for_h200)
    for name in (
        "_extend_kernel",
        "_verify_kernel",
        "_context_kernel",
        "_wgmma_context_kernel",
        "_fold_kernel",
        "_expert_kernel",
        "_prompt_kernel",
        "_fp8_blocks_kernel",
        "_int4_wgmma_kernel",
    ):  # the last launched, with wide tiles: Hopper's matrix instructions
        assert "wgmma" in by_name[name].asm["ptx"], name
    for name in ("_context_kernel", "_wgmma_context_kernel", "_prompt_kernel"):
        assert "cp.async.bulk.tensor" in by_name[name].asm["ptx"], "bulk copies of whole tiles"
    groups = by_name["_wgmma_context_kernel"].asm["ptx"]
    assert "setmaxnreg" in groups, "the warp that copies leaves its registers to the others"
    for instruction in ("ld.global.v4.b32", "st.global.v4.b32"):  # 16 bytes per thread
        assert instruction in by_name["_move_spans_kernel"].asm["ptx"]
        assert instruction in by_name["_move_rows_kernel"].asm["ptx"]
    assert "ld.global.v4.b32" in by_name["_digest_spans_kernel"].asm["ptx"]
    for name in ("_quantise_kernel", "_quantise_wide_kernel"):
        assert "div.full" not in by_name[name].asm["ptx"], "approximate quotients"


@pytest.mark.slow
def test_kernels_of_quantised_experts_compile_for_an_h200(compiled_for_h200: list[tuple[str, object]]):
    """With the shapes of Qwen3-30B-A3B and gpt-oss, and every tile. Products of more than one row take
    Hopper's matrix instructions, so that their bits do not depend on the tile.
    """
    hidden, inner, weights = 2048, 768, {}
    for has_blocks in (False, True):
        weights[has_blocks] = tuple(
            Fp8Matrices(
                torch.zeros(4, out, size, dtype=FP8),
                torch.zeros(4, *((out // BLOCK, size // BLOCK) if has_blocks else (out,))),
            )
            for out, size in ((2 * inner, hidden), (hidden, inner))
        )
    packed = {
        group: tuple(
            PackedMatrices(
                torch.zeros(4, out, 32 * -(-size // 128), dtype=torch.int16),
                torch.zeros(4, -(-size // 128) * (128 // group if group else 1), out, dtype=torch.int32),
                group,
            )
            for out, size in ((2 * width, rows), (rows, width))
        )
        for group, rows, width in ((0, 2880, 2880), (32, 2048, 768), (128, 2048, 768))
    }
    for num_tokens in (1, 16, 64, 160, 600):
        ids, shares = torch.zeros(num_tokens, 2, dtype=torch.int32), torch.ones(num_tokens, 2)
        x = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)
        for matrices in weights.values():
            fp8_experts_triton(x, ids, shares, *matrices)
            if num_tokens == 1:
                fp8_expert_rows_triton(x, ids, shares, *matrices[0], *matrices[1])
        for group, matrices in packed.items():
            rows = x if group else torch.zeros(num_tokens, 2880, dtype=torch.bfloat16)
            bias = matrices[0].words[..., 0].to(x.dtype), matrices[1].words[..., 0].to(x.dtype)
            form = ExpertForm() if group else ExpertForm(*bias, 7.0, 1.702)
            packed_experts_triton(rows, ids, shares, *matrices, form=form, has_pairs=True)
    check_compiled(compiled_for_h200)
    for name, kernel in compiled_for_h200:
        if name in ("_fp8_experts_kernel", "_packed_experts_kernel"):
            assert "wgmma" in kernel.asm["ptx"], name


TILE = TileShape(rows=16, columns=64, dim=128, num_warps=2, num_stages=2)


def test_splits_fill_the_device_without_cutting_a_context_finer_than_pays():
    assert choose_splits(8, 100_000, TILE) == 33  # 8 x 33 = 264 programs, two per multiprocessor
    assert choose_splits(8, 300, TILE) == 5
    assert choose_splits(8, 1, TILE) == choose_splits(1000, 100_000, TILE) == 1
    assert choose_splits(1, 10_000_000, TILE) == MAX_SPLITS
    wide = TILE._replace(columns=32, dim=256)
    assert choose_splits(8, 300, wide, least_split(256)) == 10, "twice the bytes"
    assert choose_splits(640, 132, TILE) == 1, "a window: a last round of short programs takes no time"


@pytest.mark.parametrize(
    ("tile", "best"),
    [
        (TILE, {64: 6, 96: 5, 128: 4, 144: 3, 256: 2, 384: 1, 512: 1, 640: 3, 768: 2, 896: 1, 1024: 1}),
        (TILE._replace(dim=64), {64: 6, 128: 6, 192: 4, 256: 3, 384: 2, 512: 1, 768: 1, 896: 3, 1024: 3}),
        (TILE._replace(rows=32), {64: 6, 128: 4, 256: 2, 320: 3, 384: 4, 512: 2, 768: 2, 1024: 2}),
        (TILE._replace(dim=256), {64: 6, 144: 3, 256: 2, 320: 3, 512: 1, 640: 3, 768: 2, 1024: 1}),
    ],
    ids=["128", "64", "32 rows", "256"],
)
def test_splits_are_close_to_the_fastest_ones_measured_on_an_h200(tile, best):
    """As measured for 1024 to 4096 columns."""
    assert {num: choose_splits(num, 100_000, tile) for num in best} == best


INT64 = torch.int64
POOL = torch.zeros(3, 1, 2, 4, 2, 8)
ONE = torch.ones(1, dtype=INT64)
RANKING = Ranking(ONE, ONE.double(), ONE, ONE.double(), ONE.double(), ONE.bool())
TABLE = torch.ones(1, 2, dtype=INT64)
Q = torch.zeros(1, 1, 4, 8)
KEYS = torch.zeros(128, 2, 8)
CONTEXT = ContextKV(KEYS, KEYS)
STARTS = torch.tensor([0, 128])
IDS = torch.ones(1, 2, dtype=torch.int32)
UNSCALED = UnscaledRows(randn(1, 8), torch.ones(1, 2), 1e-5)
TABLES = randn(1, 8), randn(1, 8)
PLAIN_NORM = NextNorm(randn(8), 1e-5)
EXPERTS = randn(3, 8, 8), randn(3, 8, 4)
ROUTED = randn(1, 32), IDS, randn(1, 2)
EIGHTHS = Fp8Matrices(torch.zeros(3, 64, 32, dtype=FP8), torch.ones(3, 64))
EIGHTHS_DOWN = Fp8Matrices(torch.zeros(3, 32, 32, dtype=FP8), torch.ones(3, 32))
WORDS, WORDS_DOWN = (
    PackedMatrices(torch.zeros(3, out, 32, dtype=torch.int16), torch.zeros(3, 1, out, dtype=torch.int32))
    for out in (64, 32)
)


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("add_rms_norm", lambda: add_rms_norm(randn(2, 8), randn(2, 7), randn(8), 1e-5)),
        ("add_rms_norm", lambda: add_rms_norm(randn(2, 8), randn(2, 8).bfloat16(), randn(8), 1e-5)),
        ("rms_norm", lambda: rms_norm_triton(randn(2, 8), randn(7), 1e-5)),
        ("silu_mul", lambda: silu_mul_triton(randn(2, 7))),
        ("linear", lambda: linear_triton(randn(2, 8), randn(4, 7))),
        ("linear", lambda: linear_triton(randn(2, 8), randn(4, 8), randn(3))),
        ("gated_linear", lambda: gated_linear(randn(2, 8), randn(5, 8))),
        ("apply_rope", lambda: apply_rope_triton(randn(3, 2, 8), randn(2, 8), randn(2, 8))),
        ("store_kv", lambda: store_kv_triton(POOL, 0, ONE, randn(1, 3, 8), randn(1, 3, 8))),
        ("select_last_rows", lambda: select_last_rows(randn(5, 8), torch.ones(2, dtype=INT64))),
        ("select_last_rows", lambda: select_last_rows(randn(5, 8), torch.ones(0, dtype=INT64))),
        ("look_up_rows", look_up_rows),
        ("look_up_rows", lambda: look_up_rows(*[Lookup(randn(2, 8), ONE)] * 4)),
        ("look_up_rows", lambda: look_up_rows(Lookup(randn(2, 8), ONE), Lookup(randn(2, 8), TABLE[0]))),
        ("look_up_rows", lambda: look_up_rows(Lookup(randn(2, 8), ONE.int()))),
        ("look_up_rows", lambda: look_up_rows(Lookup(randn(8), ONE))),
        ("not contiguous", lambda: look_up_rows(Lookup(randn(8, 2).T, ONE))),
        ("put_rows", lambda: put_rows(ONE)),
        ("put_rows", lambda: put_rows(ONE, *[Put(randn(2, 8), randn(1, 8))] * 3)),
        ("put_rows", lambda: put_rows(ONE.int(), Put(randn(2, 8), randn(1, 8)))),
        ("put_rows", lambda: put_rows(ONE, Put(randn(2, 8), randn(1, 8)), counts=TABLE[0])),
        ("put_rows", lambda: put_rows(ONE, Put(randn(2, 8), randn(2, 8)))),
        ("put_rows", lambda: put_rows(ONE, Put(randn(2, 8), randn(1, 8).half()))),
        ("put_rows", lambda: put_rows(ONE, Put(randn(8, 2).T, randn(1, 8)))),
        ("norm_pair", lambda: norm_pair(randn(2, 8), PLAIN_NORM, randn(2, 7), PLAIN_NORM)),
        ("norm_pair", lambda: norm_pair(randn(2, 8), PLAIN_NORM, randn(2, 8).half(), PLAIN_NORM)),
        ("norm_pair", lambda: norm_pair(*[randn(2, 7), PLAIN_NORM] * 2)),
        ("norm_pair", lambda: norm_pair(*[randn(2, 8), PLAIN_NORM._replace(offset=1.0)] * 2)),
        ("rotary_product", lambda: rotary_product(POOL, 0, ONE, UNSCALED, randn(32, 8), None, *TABLES)),
        ("rotary_product", lambda: rotary_product(POOL, 0, ONE, UNSCALED, randn(44, 8), None, *TABLES)),
        ("rotary_product", lambda: rotary_product(
            POOL, 0, ONE, UNSCALED, randn(48, 8), None, *[randn(1, 4)] * 2)),
        ("normed linear", lambda: rotary_product(POOL, 0, ONE, UNSCALED, randn(48, 7), None, *TABLES)),
        ("store_kv", lambda: rotary_product(POOL, 0, TABLE[0], UNSCALED, randn(48, 8), None, *TABLES)),
        ("rotary_product", lambda: rotary_product_triton(
            POOL, 0, ONE, UNSCALED, randn(48, 8), None, *TABLES, shape=SkinnyShape(16, 32, 4, 2))),
        ("tree_verify", lambda: tree_verify(TABLE, TABLE, TABLE[:, :1], ONE)),
        ("tree_verify", lambda: tree_verify(TABLE, TABLE, TABLE.int(), ONE)),
        ("tree_verify", lambda: tree_verify(*[torch.zeros(1, 0, dtype=INT64)] * 3, ONE)),
        ("paged_verify", lambda: paged_verify(Q.bfloat16(), POOL, 0, TABLE, ONE, 1.0)),
        ("paged_verify", lambda: paged_verify(Q[:, :, :3], POOL, 0, TABLE, ONE, 1.0)),
        ("paged_verify", lambda: paged_verify(Q[0], POOL, 0, TABLE, ONE, 1.0)),
        ("paged_verify", lambda: paged_verify(Q, POOL, 0, TABLE.float(), ONE, 1.0)),
        ("paged_verify", lambda: paged_verify(Q, POOL, 0, TABLE, torch.ones(2, dtype=INT64), 1.0)),
        ("tree mask", lambda: paged_verify(Q, POOL, 0, TABLE, ONE, 1.0, torch.ones(1, 1, 1))),
        ("tree mask", lambda: paged_verify(Q, POOL, 0, TABLE, ONE, 1.0, torch.ones(1, 2, 2,
        dtype=torch.bool))),
        ("tree mask", lambda: paged_verify(Q, POOL, 0, TABLE, ONE, 1.0, torch.ones(1, 1, 0,
        dtype=torch.bool))),
        ("compact_kv", lambda: compact_kv(POOL, TABLE, TABLE[:, :1])),
        ("compact_kv", lambda: compact_kv(POOL, TABLE.int(), TABLE.int())),
        ("compact_kv", lambda: compact_kv_triton(POOL, *[torch.zeros(1, 257, dtype=INT64)] * 2)),
        ("choose_token", lambda: choose_token(randn(1, 8), ONE, ONE, ONE.double(), ONE.double(), ONE.bool(),
        TABLE[0])),
        ("choose_token", lambda: choose_token(randn(1, 2), ONE, ONE, ONE.double(), ONE, ONE.bool(),
        TABLE[0])),
        ("choose_ranked", lambda: choose_ranked(randn(1, 8), ONE, RANKING, ONE, ONE, 4)),
        ("choose_ranked", lambda: choose_ranked(
            randn(1, 8), ONE, RANKING._replace(top_p=ONE), ONE, ONE.bool(), 4)),
        ("top_logprobs", lambda: top_logprobs(randn(1, 8), ONE, ONE.int(), 2)),
        ("top_logprobs", lambda: top_logprobs(randn(2, 8), ONE, ONE, 2)),
        ("penalise_logits: seen", lambda: penalise_logits(
            randn(1, 8), RowEdits(ONE, randn(2, 3), ONE.int()[None], ONE[:, None][:, :0]))),
        ("penalise_logits: logits", lambda: penalise_logits(
            randn(1, 8), RowEdits(ONE, randn(2, 3), None, ONE[:, None]))),
        ("penalise_logits: penalties", lambda: penalise_logits(
            randn(1, 8), RowEdits(ONE, randn(2, 2), None, ONE[:, None][:, :0]))),
        ("contiguous", lambda: penalise_logits(
            randn(1, 8), RowEdits(ONE, randn(3, 2).T, None, ONE[:, None][:, :0]))),
        ("chain_verify", lambda: chain_verify(TABLE, TABLE[:, :1], ONE)),
        ("match_ngrams", lambda: match_ngrams(TABLE, ONE, ONE, NgramSizes(1, 1, 1))),
        ("match_ngrams", lambda: match_ngrams(torch.ones(2, 4).int(), ONE, ONE, NgramSizes(2, 4, 1))),
        ("step_places", lambda: step_places(TABLE, PlaceSizes(4, 4, 4, 16, 1024, 64, 32))),
        ("step_outcome", lambda: step_outcome(
            torch.ones(2, 20, dtype=INT64), ONE, TABLE, TABLE[:, :1], ONE, ONE.bool(), ONE.bool(), ONE)),
        ("route_experts", lambda: route_experts(randn(2, 4), Routing(top_k=5, is_normalised=True))),
        ("route_experts", lambda: route_experts(randn(4), Routing(top_k=1, is_normalised=True))),
        (
            "route_experts",
            lambda: route_experts(randn(2, 4), Routing(top_k=1, is_normalised=True), randn(3)),
        ),
        ("expert_mlp", lambda: expert_mlp(randn(1, 8), IDS, randn(1, 2), randn(3, 8, 8), randn(3, 8, 5))),
        ("expert_mlp", lambda: expert_mlp(randn(1, 8), IDS, randn(1, 1), randn(3, 8, 8), randn(3, 8, 4))),
        ("expert_mlp", lambda: expert_mlp(randn(1, 8), IDS.long(), randn(1, 2), *EXPERTS)),
        ("expert_mlp", lambda: expert_mlp(randn(1, 8).half(), IDS, randn(1, 2), *EXPERTS)),
        ("fp8_experts", lambda: fp8_experts(randn(1, 31), *ROUTED[1:], EIGHTHS, EIGHTHS_DOWN)),
        ("fp8_experts", lambda: fp8_experts(*ROUTED, EIGHTHS, EIGHTHS)),
        (
            "fp8_experts",
            lambda: fp8_experts(*ROUTED, EIGHTHS, EIGHTHS_DOWN._replace(scales=torch.ones(3, 31))),
        ),
        ("fp8_experts", lambda: fp8_experts(randn(1, 32), IDS.long(), randn(1, 2), EIGHTHS, EIGHTHS_DOWN)),
        ("packed_experts", lambda: packed_experts(randn(2, 32), *ROUTED[1:], WORDS, WORDS_DOWN)),
        ("packed_experts", lambda: packed_experts(*ROUTED, WORDS, WORDS)),
        ("packed_experts", lambda: packed_experts(*ROUTED, WORDS._replace(group=64), WORDS_DOWN)),
        (
            "packed_experts",
            lambda: packed_experts(*ROUTED, WORDS, WORDS_DOWN._replace(words=WORDS_DOWN.words.int())),
        ),
        ("paged_extend", lambda: paged_extend(Q[0], POOL, 0, TABLE, ONE, ONE, 1, 1.0)),
        ("gather_context", lambda: gather_context(POOL, 0, TABLE, STARTS, ONE, KEYS, KEYS.bfloat16())),
        ("gather_context", lambda: gather_context(POOL, 0, TABLE, STARTS, ONE, KEYS, KEYS[1:])),
        ("gather_context", lambda: gather_context(POOL, 0, TABLE, STARTS, ONE, *[KEYS[:, :1]] * 2)),
        ("context_attention", lambda: context_attention(Q[0, :, :3], CONTEXT, STARTS, STARTS, ONE, 1.0)),
        ("context_attention", lambda: context_attention(Q[0].half(), CONTEXT, STARTS, STARTS, ONE, 1.0)),
        ("paged_extend", lambda: paged_extend(Q, POOL, 0, TABLE, torch.tensor([0, 1]), ONE, 1, 1.0)),
    ],
)  # fmt: skip
def test_an_operand_that_does_not_fit_is_refused_by_name(word: str, call: Callable[[], object]):
    with pytest.raises(ValueError, match=word):
        call()
