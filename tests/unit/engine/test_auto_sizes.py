"""Laws of automatic sizes: a CPU keeps its own, a GPU is used within its share, misfits name what fits."""

import re
from dataclasses import replace

import pytest
from baton.engine.auto_sizes import (
    BUFFER_ALIGNMENT,
    CONTEXT_BYTES,
    GRAPH_ROWS,
    LATE_ROWS,
    Card,
    EngineRole,
    GivenSizes,
    ModelSizes,
    check_weights,
    choose_sizes,
)
from baton.engine.errors import CheckpointError
from baton.engine.graphs.buckets import token_buckets
from baton.engine.kv.budget import PageBudget, WindowBudget
from baton.engine.prompt_budget import MIN_BUFFER_ROWS, alone_tokens
from baton.engine.runner.target_graphs import whole_buckets
from baton.kernels.gather_context import ROW_ALIGNMENT
from baton.kernels.invariant_splits import MAX_PARTIAL_BYTES, partial_bytes

GIB, MIB = 1 << 30, 1 << 20


def card(name, gib, capability):
    total = int(gib * GIB)
    return Card(name=name, total=total, free=total - CONTEXT_BYTES, capability=capability)


CPU = Card()
SMALL = card("24 GB", 23.6, (8, 9))
H100 = card("H100", 79.2, (9, 0))
H200 = card("H200", 139.8, (9, 0))


def model(weights, layers, hidden, intermediate, heads, kv_heads, vocab, context):
    sizes = ModelSizes(
        hidden_size=hidden, intermediate_size=intermediate, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=hidden // heads, vocab_size=vocab, max_context=context, dtype_bytes=2,
        num_layers=layers, num_weights=int(weights), weight_bytes=int(2 * weights),
    )  # fmt: skip
    return sizes, 2 * layers * kv_heads * sizes.head_dim * 2


TINY = model(0.135e9, 30, 576, 1536, 9, 3, 49152, 8192)
EIGHT = model(8.03e9, 32, 4096, 14336, 32, 8, 128256, 131072)
SEVENTY = model(70.6e9, 80, 8192, 28672, 64, 8, 128256, 131072)
MODELS = {"135M": TINY, "8B": EIGHT, "70B": SEVENTY}

PREFILL = EngineRole(is_decode=False, num_features=3)
DECODE = EngineRole(
    is_decode=True, num_features=3, num_nodes=4, num_shapes=4, spare_slots=4, late_rows=LATE_ROWS
)
PLAIN = EngineRole(is_decode=True)


def budget(of, role):
    sizes, kv_bytes = of
    if role is PLAIN:
        return PageBudget(kv_bytes=kv_bytes)
    if role.is_decode:
        return PageBudget(kv_bytes=kv_bytes, draft_bytes=kv_bytes // 32, has_staging=True)
    return PageBudget(kv_bytes=kv_bytes, feature_bytes=3 * sizes.hidden_size * 2)


def chosen(on, of, role, **given):
    return choose_sizes(on, of[0], role, budget(of, role), GivenSizes(**given))


def refusal(*args, **given):
    with pytest.raises(CheckpointError) as caught:
        chosen(*args, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("of", MODELS.values(), ids=MODELS)
def test_a_cpu_keeps_the_sizes_that_it_always_had(of):
    prefill, decode = chosen(CPU, of, PREFILL), chosen(CPU, of, DECODE)
    assert (prefill.chunk_size, prefill.max_batch, prefill.slab_bytes) == (256, 8, 256 * MIB)
    assert (decode.max_running, decode.local_prefill_tokens) == (16, 128)
    for sizes, role in ((prefill, PREFILL), (decode, DECODE)):
        assert not sizes.has_graphs
        assert (sizes.page_size, sizes.max_context) == (16, of[0].max_context)
        assert sizes.num_pages == budget(of, role).times(16).num_pages(1024 * MIB)


def test_streams_wait_for_shorter_forwards_where_experts_slow_them():
    """As gpt-oss-20b, of whose 2048 tokens an H200 takes 34 ms: as many floating-point operations as a dense
    model would do in 20.
    """
    dense = replace(EIGHT[0], num_weights=3_660_000_000), EIGHT[1]
    routed = replace(dense[0], has_experts=True), EIGHT[1]
    assert chosen(H200, dense, PLAIN).local_prefill_tokens == 4096
    decode, prefill = chosen(H200, routed, PLAIN), chosen(H200, routed, PREFILL)
    assert decode.local_prefill_tokens == 2048
    assert decode.reasons["local_prefill_tokens"] == "33 ms a forward"
    assert prefill.chunk_size == chosen(H200, dense, PREFILL).chunk_size == 4096
    assert prefill.reasons["chunk_size"] == "67 ms a forward"


@pytest.mark.parametrize(
    ("on", "of", "chunk", "running"),
    [
        (SMALL, TINY, 8192, 256),
        (H100, TINY, 8192, 256),
        (H100, EIGHT, 2048, 192),
        (H200, EIGHT, 2048, 256),
        (H200, TINY, 8192, 256),
    ],
)
def test_a_gpu_gets_chunks_and_batches_for_card_and_model(on, of, chunk, running):
    prefill, decode = chosen(on, of, PREFILL), chosen(on, of, DECODE)
    assert (prefill.chunk_size, decode.max_running) == (chunk, running)
    assert prefill.has_graphs
    assert decode.has_graphs
    assert decode.local_prefill_tokens == chunk
    assert prefill.max_batch == max(8, chunk // 64)
    assert 256 * MIB <= prefill.slab_bytes <= 1024 * MIB


@pytest.mark.parametrize("role", [EngineRole(is_decode=False), PLAIN], ids=["prefill", "decode"])
def test_a_gpu_serves_a_model_whose_layers_all_have_windows(role):
    """A page has no memory of its own there, only its window page."""
    sizes, kv_bytes = EIGHT
    windows = WindowBudget(kv_bytes=kv_bytes, window=4096, max_context=sizes.max_context)
    found = choose_sizes(H200, sizes, role, PageBudget(kv_bytes=0, windows=windows), GivenSizes())
    assert found.num_pages * found.page_size >= sizes.max_context
    assert found.num_window_pages * found.page_size >= 4096


@pytest.mark.parametrize("role", [PREFILL, DECODE, PLAIN], ids=["prefill", "decode", "plain"])
@pytest.mark.parametrize("share", [0.0, 0.45, 0.9, 1.0])
@pytest.mark.parametrize(("on", "of"), [(SMALL, TINY), (H100, EIGHT), (H200, EIGHT), (H200, TINY)])
def test_everything_together_stays_within_the_share_of_the_card(on, of, role, share):
    sizes = chosen(on, of, role, gpu_memory_share=share)
    pools = budget(of, role).times(sizes.page_size).total(sizes.num_pages)
    used = CONTEXT_BYTES + of[0].weight_bytes + sizes.reserved + pools
    assert used <= on.total * (share or 0.9)
    assert used > 0.97 * on.total * min(share or 0.9, 1 - CONTEXT_BYTES / on.total), "nothing is left over"


@pytest.mark.parametrize("rows", [256, 512, 2048, 8192])
def test_outputs_of_all_prefill_graphs_have_reserved_rows(rows):
    buckets = token_buckets(rows)
    assert sum(buckets) + sum(whole_buckets(buckets)) <= GRAPH_ROWS * rows


def test_features_of_unread_prompt_parts_and_late_rows_are_reserved():
    blind = replace(DECODE, num_features=0)
    with_features, without = (
        chosen(H200, EIGHT, role, local_prefill_tokens=2048) for role in (DECODE, blind)
    )
    late = 2 * (with_features.max_running + 1) * LATE_ROWS
    assert with_features.reserved - without.reserved == (2 * 8192 + late) * 3 * 4096 * 2


def test_a_drafter_that_observes_every_step_reserves_no_late_rows():
    late, prompt = (
        chosen(H200, EIGHT, replace(DECODE, late_rows=rows), max_running=64) for rows in (LATE_ROWS, 0)
    )
    assert late.reserved - prompt.reserved == 2 * 65 * LATE_ROWS * 3 * 4096 * 2


@pytest.mark.parametrize(("role", "copies"), [(PREFILL, 1), (DECODE, 2)], ids=["prefill", "decode"])
def test_the_deterministic_mode_reserves_the_parts_of_its_attention(role, copies):
    def parts(of, **given):
        modes = (replace(role, is_deterministic=mode) for mode in (True, False))
        invariant, fastest = (chosen(H200, of, mode, **given).reserved for mode in modes)
        return invariant - fastest

    assert parts(EIGHT, max_running=64, max_context=4096) == copies * MAX_PARTIAL_BYTES
    short = replace(EIGHT[0], max_context=512), EIGHT[1]
    few = {"max_running": 1, "local_prefill_tokens": 256, "chunk_size": 256}
    rows = 256 if role is PREFILL else alone_tokens(256)
    assert parts(short, **few) == copies * partial_bytes(2, rows * 32, 128)


def test_an_aggregated_engine_reserves_its_prefill_graphs():
    aggregated = replace(PLAIN, is_aggregated=True)
    graphed = chosen(H200, EIGHT, aggregated)
    outputs = GRAPH_ROWS * graphed.prompt_graph_tokens * 4096 * 2
    assert graphed.reserved >= chosen(H200, EIGHT, PLAIN).reserved + outputs


@pytest.mark.parametrize("role", [PREFILL, PLAIN], ids=["prefill", "decode"])
def test_context_buffers_are_reserved_for_the_longest_context(role):
    def reserved(on, max_context):
        return chosen(on, EIGHT, role, max_context=max_context, max_running=64).reserved

    row = 2 * 8 * 128 * 2
    assert reserved(H200, 131072) - reserved(H200, 4096) == row * (131072 - MIN_BUFFER_ROWS)
    older = replace(H200, capability=(8, 9))
    assert reserved(older, 131072) == reserved(older, 4096)
    assert BUFFER_ALIGNMENT >= ROW_ALIGNMENT


def test_memory_that_others_hold_is_not_counted_on():
    busy = replace(H100, free=30 * GIB)
    sizes = chosen(busy, EIGHT, DECODE)
    assert EIGHT[0].weight_bytes + sizes.reserved + sizes.kv_bytes <= 30 * GIB
    assert "free" in sizes.reasons["kv_memory_mb"]
    assert sizes.max_running < chosen(H100, EIGHT, DECODE).max_running


def test_a_long_context_is_cut_to_what_the_pool_holds_and_says_so():
    sizes = chosen(SMALL, EIGHT, PLAIN)
    assert sizes.max_context == (sizes.num_pages - 1) * 16 - 1 < 131072
    assert sizes.reasons["max_context"] == "what the KV pool holds"
    assert chosen(H200, EIGHT, PLAIN).max_context == 131072


def test_a_context_beyond_the_pool_is_refused_with_the_one_that_fits():
    message = refusal(SMALL, EIGHT, PLAIN, max_context=131072)
    fits = int(re.search(r"lower it to at most (\d+)", message)[1])
    need = int(re.search(r"give the pool (\d+) MiB", message)[1])
    assert chosen(SMALL, EIGHT, PLAIN, max_context=fits).max_context == fits
    assert "max_context" in refusal(SMALL, EIGHT, PLAIN, max_context=fits + 1)
    assert chosen(H100, EIGHT, PLAIN, max_context=131072, kv_memory_mb=need).max_context == 131072
    assert "131072" in refusal(H200, EIGHT, PLAIN, max_context=131073)


@pytest.mark.parametrize(("name", "given"), [("kv_memory_mb", 200_000), ("pages", 500_000)])
def test_a_pool_that_does_not_fit_is_refused_with_the_one_that_does(name, given):
    def settings(size):
        return {name: size, "max_running": 64}

    message = refusal(H100, EIGHT, DECODE, **settings(given))
    assert message.startswith(f"{name} {given}:")
    most = int(re.search(r"give at most (\d+)", message)[1])
    assert chosen(H100, EIGHT, DECODE, **settings(most)).num_pages > 2
    assert name in refusal(H100, EIGHT, DECODE, **settings(int(1.02 * most)))


def test_weights_beyond_the_share_name_both_numbers_and_a_remedy():
    check_weights(H200, 0.0, EIGHT[0].weight_bytes)
    with pytest.raises(CheckpointError, match=r"134658 MiB.*smaller model or a card with more memory"):
        check_weights(H100, 0.0, SEVENTY[0].weight_bytes)
    with pytest.raises(CheckpointError, match=r"--gpu-memory-share of more than 0\.2"):
        check_weights(H100, 0.15, EIGHT[0].weight_bytes)
    with pytest.raises(CheckpointError, match="end the other processes"):
        check_weights(replace(H100, free=8 * GIB), 0.0, EIGHT[0].weight_bytes)


def test_the_share_that_a_refusal_names_is_enough():
    message = refusal(H100, EIGHT, DECODE, gpu_memory_share=0.2)
    share = float(re.search(r"--gpu-memory-share of more than ([\d.]+)", message)[1])
    assert chosen(H100, EIGHT, DECODE, gpu_memory_share=share + 0.01).num_pages > 2


def test_given_sizes_are_kept_and_named_as_given():
    wanted = {"graphs": "off", "page_size": 32, "max_running": 7, "local_prefill_tokens": 99}
    wanted["kv_memory_mb"] = 4096
    sizes = chosen(H200, EIGHT, DECODE, **wanted)
    assert {name: sizes.values()[name] for name in wanted} == wanted
    assert {sizes.reasons[name] for name in wanted} == {"given"}
    assert chosen(H200, EIGHT, PREFILL, chunk_size=0).chunk_size == 0
    assert chosen(CPU, EIGHT, PREFILL, graphs="on").has_graphs


def test_memory_for_prefixes_is_kept_free_on_a_gpu():
    without, given = chosen(H200, EIGHT, DECODE), chosen(H200, EIGHT, DECODE, prefix_slab_mb=512)
    assert (without.device_slab_bytes, given.device_slab_bytes) == (0, 512 * MIB)
    assert given.reserved >= without.reserved + 512 * MIB
    assert given.num_pages < without.num_pages
    assert chosen(CPU, EIGHT, DECODE, prefix_slab_mb=512).device_slab_bytes == 0
    assert chosen(H200, EIGHT, PREFILL, prefix_slab_mb=512) == chosen(H200, EIGHT, PREFILL)


def test_the_line_of_a_role_names_its_sizes_only():
    prefill, decode = str(chosen(H200, EIGHT, PREFILL)), str(chosen(H200, EIGHT, DECODE))
    assert "chunk_size 2048" in prefill
    assert "max_running" not in prefill
    assert "max_running 256" in decode
    assert "slab_mb" not in decode
