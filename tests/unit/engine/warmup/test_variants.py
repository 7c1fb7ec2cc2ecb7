"""The dry run before serving finds every kernel variant that a workload launches."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.attention.registry import attention_for
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.batch.forward_batch import ForwardBatch
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.graphs.breakable import Breaks
from baton.engine.graphs.token_graphs import AttendContext
from baton.engine.hub import NGRAM
from baton.engine.kv.page_table import pages_for
from baton.engine.loader import EngineLoader
from baton.engine.request import Request
from baton.engine.runner.target_graphs import body_of, bridge_of
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.protocol import (
    MAX_PREFILL_ROWS,
    DraftPrefill,
    draft_pools,
    reads_features,
)
from baton.engine.speculative.step.fused_step import StepContext
from baton.engine.warmup.plan_file import kept_launches
from baton.engine.warmup.variants import ExtendShape, Reach, VariantPlanner, extend_shapes, sizes
from baton.kernels import skinny_linear
from baton.kernels.triton_jit import Launch, planned_launches
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

CHUNK, MAX_BATCH, MAX_RUNNING = 96, 5, 9
TREE = {"spec_topk": 3, "spec_tokens": 7}
DRAFTS = {
    "chain": {"spec_adaptive": "on"},
    "tree": TREE,
    "eager chain": {"spec_steps": 4},
    "lookup": {"draft": NGRAM, "spec_adaptive": "on"},
    "prefill": {},
    "prefill of short contexts": {"max_context": 40},
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take the road of CUDA tensors, which ends in planned launches."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(skinny_linear, "shared_bytes", lambda device: skinny_linear.SHARED_BYTES)


@pytest.fixture
def loaded(
    request: pytest.FixtureRequest, toy_checkpoint: Callable[..., Path], tmp_path: Path
) -> tuple[Engine, Reach]:
    """An engine with the attention of GPUs, and what it can reach. The head reads layers, too, that a dry run
    leaves out."""
    head = write_head(tmp_path / "head", head_config(2, (0, 3, 4)), head_tensors())
    config = EngineConfig(
        model=str(toy_checkpoint("llama", num_hidden_layers=6)), device="cpu",
        dtype="bfloat16", pages=64, chunk_size=CHUNK, max_batch=MAX_BATCH, max_running=MAX_RUNNING,
        **({"draft": str(head), "spec_adaptive": "off", "max_context": 200} | DRAFTS[request.param]),
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=not request.param.startswith("prefill"))
    for _, run in loader.phases():
        run()
    engine = loader.engine()
    engine.runner.attention = attention_for(engine.pool, "triton")
    for pool in draft_pools(engine.drafter):
        engine.drafter._attention = attention_for(pool, "triton")
    return engine, replace(loader.reach(), prompt_rows=min(loader.reach().prompt_rows, CHUNK))


def planned(engine: Engine, reach: Reach) -> set[tuple[str, ...]]:
    launches = VariantPlanner(engine.runner, engine.drafter, engine.steps, reach).launches()
    return {launch.variant for launch in launches}


def request_of(num_tokens: int, page_size: int) -> Request:
    request = Request(room="", epoch=0, prompt_ids=[1] * num_tokens, sampling=SamplingParams())
    request.pages = [1] * pages_for(num_tokens, page_size)
    return request


def random_lens(rng: random.Random, rows: int, prompts: int, context: int) -> tuple[list[int], list[int]]:
    """Rows and prefixes of up to `prompts` prompts; every third time they are equally short."""
    count = rng.randint(1, prompts)
    longest = max(1, min(rows // count, context))
    if rng.random() < 0.3:
        q_lens = [rng.randint(1, min(longest, 16))] * count
    else:
        q_lens = [rng.randint(1, longest) for _ in range(count)]
    return q_lens, [rng.randint(0, context - q_len) if rng.random() < 0.7 else 0 for q_len in q_lens]


def forward_across_breaks(engine: Engine, batch: ForwardBatch) -> None:
    """The body of the target over `batch` as a graph records it, with attention in breaks."""
    runner = engine.runner
    read = runner.attention.bind_reads(runner.attention.plan(batch))
    bridge = bridge_of(runner.model, batch.num_tokens, engine.pool.device)
    breaks = Breaks(AttendContext(num_rows=batch.num_tokens, read=read))
    attend = bridge.attend(breaks, engine.pool, batch.slots)
    body_of(runner.model, batch.input_ids, batch.positions, attend)


def workload(engine: Engine, reach: Reach, seed: int, num_forwards: int) -> list[Launch]:
    """The launches of random forwards within `reach`, by the engine's own ways into them."""
    rng, size = random.Random(seed), engine.page_size
    batches = []
    if engine.steps is not None:
        engine.steps.step.state.reserve_edits(4, has_counts=True)
    for _ in range(num_forwards):
        lens = random_lens(rng, reach.prompt_rows, reach.max_prompts, reach.max_context)
        ranges = [(request_of(p + q, size), p, p + q) for q, p in zip(*lens, strict=True)]
        batches.append(extend_batch(ranges, page_size=size, device=engine.pool.device))
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), planned_launches() as found:
        for batch in batches:
            engine.runner.forward(batch)
            forward_across_breaks(engine, batch)
            if reads_features(engine.drafter):
                context = min(reach.max_context, engine.drafter.max_context)
                lens = random_lens(rng, MAX_PREFILL_ROWS, reach.max_requests, context)
                items = [
                    DraftPrefill(
                        pages=request_of(p + q, size).pages, start=p, next_ids=[1] * q, state_row=1,
                        features=torch.zeros((q, engine.drafter.feature_width), dtype=torch.bfloat16),
                        is_final=rng.random() < 0.5,
                    )
                    for q, p in zip(*lens, strict=True)
                ]  # fmt: skip
                engine.drafter.prefill(items)
            if engine.steps is not None:
                count = rng.randint(1, reach.max_requests)
                slots = torch.zeros(count, dtype=torch.int64)
                kind = rng.choice(engine.steps.kinds)
                shape = rng.choice([kind.shape, *reach.eager_shapes])
                watched = None if shape.steps else kind.watched
                wanted = replace(kind, shape=shape, watched=watched)
                engine.steps.step.run(slots, wanted, Breaks(StepContext(num_rows=count)))
    return found


WORKLOADS = [
    *(pytest.param(name, 3, id=name) for name in ("chain", "prefill")),
    pytest.param("prefill of short contexts", 8, id="prefill of short contexts"),
    *(pytest.param(name, 10, id=f"{name}, long", marks=pytest.mark.slow) for name in DRAFTS),
]


@pytest.mark.parametrize(("loaded", "num_forwards"), WORKLOADS, indirect=["loaded"])
def test_the_dry_run_finds_every_variant_of_a_random_workload(
    loaded: tuple[Engine, Reach], num_forwards: int, as_on_a_gpu: None
):
    engine, reach = loaded
    if not engine.steps:
        assert reach.prompt_rows == CHUNK, "also where the longest context is shorter"
    before = dict(engine.runner.counters.forwards)
    known = planned(engine, reach)
    assert not engine.pool.kv.any(), "a dry run computes nothing"
    assert (engine.runner.counters.forwards, len(engine.model.layers)) == (before, 6)
    asked = {launch.variant for launch in workload(engine, reach, seed=1, num_forwards=num_forwards)}
    assert asked <= known, sorted(asked - known)
    assert len(known) < 73, "a variant per batch size would be many more"


@pytest.mark.parametrize("loaded", ["prefill"], indirect=True)
def test_a_size_that_the_dry_run_leaves_out_is_noticed(loaded: tuple[Engine, Reach], as_on_a_gpu: None):
    engine, reach = loaded
    asked = {launch.variant for launch in workload(engine, reach, seed=1, num_forwards=10)}
    known = planned(engine, replace(reach, prompt_rows=3, max_prompts=1))
    assert {variant[0] for variant in asked - known} >= {"_extend_kernel", "_skinny_kernel"}


@pytest.mark.parametrize("loaded", ["prefill", "tree"], indirect=True)
def test_variants_tell_apart_what_triton_compiles_apart(loaded: tuple[Engine, Reach], as_on_a_gpu: None):
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    engine, reach = loaded
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    pairs = set()
    for launch in workload(engine, reach, seed=2, num_forwards=6):
        kernel = launch.kernel
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = bind(*launch.arguments, **launch.options)
        pairs.add((launch.variant, (launch.variant[0], str(specialization), str(options))))
    ours, theirs = zip(*pairs, strict=True)
    assert len(set(ours)) == len(set(theirs)) == len(pairs), "one variant of ours for each of Triton's"


def test_sizes_are_the_borders_of_tiles():
    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 4, 6]
    assert sizes(300) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    shapes = list(extend_shapes(40, 4, 100))
    assert all(shape.num_rows <= 40 and shape.prefix + max(shape.q_lens) <= 100 for shape in shapes)
    assert {ExtendShape(q_lens=(32,)), ExtendShape(q_lens=(16, 1)), ExtendShape(q_lens=(4,) * 4)} < set(
        shapes
    )
    assert list(extend_shapes(1, 1, 1)) == [ExtendShape(q_lens=(1,))]
    together = [shape.num_rows for shape in extend_shapes(40, 4, 12) if shape.num_rows > 24]
    assert {32, 40} <= set(together), "several prompts have more rows than the longest"
    assert max(shape.num_rows for shape in extend_shapes(40, 2, 12)) == 24


def test_every_operation_has_a_form_for_the_dry_run():
    """Without `torch.library.register_fake`, an operation would end the dry run."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("baton::")]
    assert len(names) >= 7
    found = {name: torch._library.simple_registry.singleton.find(name).fake_impl.kernel for name in names}
    assert [name for name, kernel in found.items() if kernel is None] == []


@pytest.mark.parametrize("loaded", [pytest.param("chain", marks=pytest.mark.slow), "prefill"], indirect=True)
def test_a_plan_on_disk_has_the_same_launches_and_needs_no_dry_run(
    as_on_a_gpu: None, loaded: tuple[Engine, Reach], tmp_path: Path
) -> None:
    engine, reach = loaded
    planner = VariantPlanner(engine.runner, engine.drafter, engine.steps, reach)
    planned = kept_launches(tmp_path / "kernels", "key", planner.launches)

    def never() -> list[Launch]:
        raise AssertionError("planned again")

    kept = kept_launches(tmp_path / "kernels", "key", never)
    assert kept == planned
    assert all(one.kernel is other.kernel for one, other in zip(kept, planned, strict=True))
    with pytest.raises(AssertionError, match="planned again"):
        kept_launches(tmp_path / "kernels", "another key", never)
