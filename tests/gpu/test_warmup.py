"""Nothing is compiled, captured or taken from the driver after an engine is ready."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.batch.forward_batch import CaptureHidden, ForwardOutput
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.graphs.buckets import token_buckets
from baton.engine.loader import EngineLoader
from baton.engine.prompt_logprobs import most_scored, scores_of
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.step.async_decoder import AsyncDecoder
from baton.engine.warmup.compiler import compile_launches
from baton.engine.warmup.variants import VariantPlanner
from baton.kernels.launch_plan import decode_launches
from baton.kernels.rope import apply_rope
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHUNK, MAX_BATCH, MAX_RUNNING, NEW = 128, 4, 6, 9
GREEDY = SamplingParams(temperature=0.0)
WAYS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, seed=2, top_k=5, min_p=0.001),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9),
    SamplingParams(temperature=90.0, seed=4, top_p=0.999),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, logit_bias={5: 3.0, 9: -1.0}, presence_penalty=0.5),
    SamplingParams(temperature=0.8, seed=6, min_new_tokens=5, stop_token_ids=(3, 7), logprobs=20),
)
DRAFTS = {
    "no drafts": {"no_draft": True},
    "chain": {"spec_adaptive": "off"},
    "tree": {"spec_topk": 4, "spec_tokens": 8},
    "adaptive": {"spec_adaptive": "on"},
    "chain without graphs": {"spec_adaptive": "off", "graphs": "off"},
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2), head_tensors())


@pytest.fixture
def load(toy_checkpoint: Callable[..., Path], head: Path) -> Callable[..., Engine]:
    def load(role: str, **settings: object) -> Engine:
        config = EngineConfig(
            model=str(toy_checkpoint("llama", num_hidden_layers=12)), draft=str(head), device="cuda",
            pages=400, max_context=256, chunk_size=CHUNK, max_batch=MAX_BATCH, max_running=MAX_RUNNING,
            **({"graphs": "on", "dtype": "bfloat16"} | settings),
        )  # fmt: skip
        loader = EngineLoader(config, has_drafter=role == "decode")
        for _, run in loader.phases():
            run()
        engine = loader.engine()
        engine.begin_watch()
        return engine

    return load


class Workload:
    """Prompts and steps as workers run them, on `engine`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = random.Random(5)
        self._count = 0

    def request(self, length: int, params: SamplingParams = GREEDY) -> Request:
        self._count += 1
        request = Request(
            room=f"{self._count:032x}", epoch=0,
            prompt_ids=[self.rng.randrange(10, 250) for _ in range(length)],
            sampling=replace(params, max_new_tokens=NEW, ignore_eos=not params.stop_token_ids),
        )  # fmt: skip
        engine = self.engine
        request.pages = engine.cache.alloc(-(-(length + NEW + engine.shape.spare_slots) // engine.page_size))
        return request

    def forward(self, parts: Sequence[tuple[Request, int, int]]) -> ForwardOutput:
        engine = self.engine
        has_features = engine.features is not None or engine.drafter is not None
        batch = extend_batch(
            parts, page_size=engine.page_size, device=engine.pool.device,
            capture=CaptureHidden.FULL if has_features else CaptureHidden.NULL,
        )  # fmt: skip
        output = engine.runner.forward(batch)
        if engine.features is not None:
            engine.features.store(batch.slots, output.hidden)
        rows = [request.masked_row for request, _, end in parts if end == request.num_prompt]
        sampled = engine.sampler.sample(output.logits[: len(rows)], engine.sampler.build(rows))
        sampled.tokens.tolist()
        scores_of(parts, output.logits[len(rows) :])
        return output

    def prompts(self, lens: Sequence[int], prefix: int = 0, params: SamplingParams = GREEDY) -> None:
        requests = [self.request(prefix + length, params) for length in lens]
        parts: list[tuple[Request, int, int]] = []
        for request in requests:
            limit = most_scored(request, self.engine.model_config.vocab_size, parts)
            parts.append((request, prefix if limit is None else 0, request.num_prompt))
        self.forward(parts)
        self.release(requests)

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.cache.allocator.release(request.pages)

    def every_prompt(self, rows: int) -> None:
        """Every border of a bucket, prefixes within and of whole chunks, and several prompts at once."""
        borders = {size for bucket in token_buckets(rows) for size in (bucket - 1, bucket, bucket + 1)}
        for length in sorted(size for size in borders if 1 <= size <= rows):
            for prefix in (0, 1, 15, 16, 17, rows // 2, 256 - NEW - 8 - length):
                if 0 <= prefix <= 256 - NEW - 8 - length:
                    self.prompts([length], prefix)
        for lens in ([1] * MAX_BATCH, [9] * MAX_BATCH, [3, 1], [17, 9, 5], [rows // 2, 1, rows // 4]):
            self.prompts(lens)
            self.prompts(lens, 33)
        for params in WAYS:
            self.prompts([7], params=params)
            self.prompts([7, 20, 1], params=params)
        self.prompts([rows - 3], params=replace(GREEDY, prompt_logprobs=3))

    def every_step(self) -> None:
        """Batches of every size and way, which shrink by cancels, grow by joins, and mix all ways."""
        decoder = self.engine.decoder()
        for params in WAYS:
            for size in range(1, MAX_RUNNING + 1):
                self.decode(decoder, [params] * size)
        self.decode(decoder, WAYS[:MAX_RUNNING])
        self.decode(decoder, WAYS[2 : 2 + MAX_RUNNING])

    def decode(self, decoder: AsyncDecoder, ways: Sequence[SamplingParams]) -> None:
        requests = [self.request(self.rng.randrange(1, 60), params) for params in ways]
        for request in requests:
            output = self.forward([(request, 0, request.num_prompt)])
            request.num_computed = request.num_prompt
            request.append([11], ())
            if output.hidden is not None:
                half = request.num_prompt // 2
                if half:  # features land in pieces
                    decoder.draft_prefill(request, output.hidden[:half], 0)
                decoder.draft_prefill(request, output.hidden[half:], half)
        live = list(requests)
        while live:
            decoder.step(live)
            live = [request for request in live if not request.is_finished]
            if len(live) > 2 and self.rng.random() < 0.3:
                decoder.forget(live.pop(self.rng.randrange(len(live))))  # a cancel
        for request in requests:
            decoder.forget(request)
        self.release(requests)


def nothing_late(engine: Engine) -> dict[str, float]:
    """What the engine did after it was ready; empty if it did nothing of that kind."""
    torch.cuda.synchronize()
    return {name: count for name, count in engine.watch_counters.items() if count}


@pytest.mark.parametrize("graphs", ["on", "off"], ids=["graphs", "eager"])
def test_prefill_compiles_and_allocates_nothing_after_ready(load: Callable[..., Engine], graphs: str):
    engine = load("prefill", graphs=graphs)
    Workload(engine).every_prompt(CHUNK)
    assert not nothing_late(engine)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_decode_compiles_and_allocates_nothing_after_ready(load: Callable[..., Engine], drafts: str):
    engine = load("decode", **DRAFTS[drafts])
    workload = Workload(engine)
    workload.every_step()
    workload.every_prompt(CHUNK)
    assert not nothing_late(engine)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_kernels_of_a_plan_on_disk_can_be_compiled(
    load: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    load(role)
    (plan,) = tmp_path.glob("plan-*.json")
    launches = decode_launches(plan.read_text())
    assert len(launches) > 10
    assert compile_launches(launches, torch.device("cuda")) == 0
    monkeypatch.setattr(VariantPlanner, "launches", None)  # a second start needs no dry run
    load(role)


def test_a_kernel_for_a_new_shape_is_counted(load: Callable[..., Engine]):
    """The plant: an engine that serves more than it said compiles, and says so."""
    engine = load("prefill", graphs="off")
    q = torch.zeros((3, 5, 48), dtype=torch.float16, device="cuda")
    table = torch.zeros((3, 48), dtype=torch.float16, device="cuda")
    apply_rope(q, table, table)
    assert nothing_late(engine)["compilations_after_ready"] >= 1


def test_growth_of_device_memory_is_counted(load: Callable[..., Engine]):
    engine = load("prefill", graphs="off")
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free // 2 + (1 << 30), dtype=torch.uint8, device="cuda")
    assert nothing_late(engine) == {"allocations_after_ready": 1}
    del held
    torch.cuda.empty_cache()
