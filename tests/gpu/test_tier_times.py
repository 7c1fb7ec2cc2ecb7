"""20 conversations of 10 turns behind documents of 2000 tokens, a pool for 4 of them: the time to token 1.

The model has the shape of Llama-3.1-8B and random weights. The worker computes its prompts itself.
"""

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from baton.bench.engine.checkpoint import write_checkpoint
from baton.cluster.protocol.messages import Reserve, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.tests.parity.test_sampled_law import D, Ears
from baton.tests.sim.tiered_decode import GIB, settled
from baton.worker.tier_startup import open_tiers, page_keys_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHATS, TURNS, DOCUMENT, QUESTION, ANSWER = 20, 10, 2000, 64, 16
PAGES = 720  # a conversation ends with 171
LEAST = 3.0  # times faster than without tiers, from turn 2 on
ROOM = 12  # GiB of each tier: all conversations
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def worker() -> Iterator[DecodeWorker]:
    if shutil.disk_usage(SHARED_MEMORY).free < 24 * GIB:
        pytest.skip("needs 24 GiB of shared memory for a checkpoint")
    folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    try:
        device = torch.device("cuda")
        write_checkpoint(
            folder, "llama-3.1-8b", 3, draft_vocab_size=1024, dtype=torch.bfloat16, device=device
        )
        torch.cuda.empty_cache()
        config = EngineConfig(
            model=str(folder / "target"), device="cuda", dtype="bfloat16", pages=PAGES, max_context=4096,
            max_running=4, aggregated=True, graphs="off", overlap="on",
        )  # fmt: skip
        loader = EngineLoader(config, has_drafter=True)
        for _, run in loader.phases():
            run()
        engine = loader.engine()
        engine.weights = None  # no thread hashes them
        made = DecodeWorker(engine, Ears(), instance=D, max_running=4, local_prefill_tokens=2048)
        first_token_ms(made, list(range(3, 40)), 0)
        yield made
    finally:
        shutil.rmtree(folder)


def first_token_ms(worker: DecodeWorker, prompt: list[int], number: int) -> float:
    """Asks for an answer; the time to its first token, in milliseconds."""
    sampling = Sampling(temperature=0.0, max_new_tokens=ANSWER, ignore_eos=True)
    order = Reserve(
        room=f"{number:032x}", epoch=0, instance=D, prompt_ids=prompt, sampling=sampling, deadline_ms=0
    )
    heard = worker.link.heard
    heard.clear()
    began, told = time.monotonic(), 0.0
    worker.handle(order, now=0.0)
    while worker.num_rooms:
        if not worker.step():
            time.sleep(0.0001)  # the threads that copy need the interpreter's lock
        if not told and any(isinstance(message, Tokens) for message in heard):
            told = time.monotonic() - began
    return 1000 * told


def medians(worker: DecodeWorker, numbers: Iterator[int]) -> list[float]:
    """The median time to token 1 of each turn, in milliseconds."""
    rng = random.Random(5)

    def draw(count: int) -> list[int]:
        return [rng.randrange(3, 128_000) for _ in range(count)]

    texts = [draw(DOCUMENT) for _ in range(CHATS)]
    found = []
    for _ in range(TURNS):
        times = []
        for text in texts:
            text += draw(QUESTION)
            times.append(first_token_ms(worker, text, next(numbers)))
            text += draw(ANSWER)  # as if it had answered this
        found.append(statistics.median(times))
    return found


def test_prefixes_below_the_pool_come_back_sooner_than_they_are_computed(
    worker: DecodeWorker, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    numbers, late, cache = iter(range(1, 10_000)), {}, worker.engine.cache
    for tier in ("no tier", "host", "disk"):
        if tier != "no tier":
            wanted = SimpleNamespace(
                host_cache_gib=ROOM * (tier == "host"),
                disk_cache=str(tmp_path / "disk") * (tier == "disk"),
                disk_cache_gib=ROOM,
            )
            worker.tiers = open_tiers(worker.engine, wanted, page_keys_of(worker.engine))  # type: ignore[arg-type]
            settled(worker)
        times = medians(worker, numbers)
        late[tier] = statistics.median(times[1:])
        counters = {} if worker.tiers is None else worker.tiers.counters
        moved = {name: f"{value / 1e9:.1f} GB" for name, value in counters.items() if "bytes" in name}
        others = {name: round(value) for name, value in counters.items() if "bytes" not in name and value}
        turns = " / ".join(f"{value:.0f}" for value in times)
        record_property(tier, f"median ms to token 1 by turn {turns}; {moved} {others}")
        if worker.tiers is not None:
            worker.tiers.close()
        cache.clear()
        worker.tiers, cache._watcher = None, None
    ratios = {tier: late["no tier"] / value for tier, value in late.items()}
    record_property("times faster from turn 2", {tier: round(ratio, 1) for tier, ratio in ratios.items()})
    assert ratios["host"] >= LEAST, (late, ratios)
