"""Prompts that decode computes on a device: the tokens of the CPU, launched without waiting."""

import secrets
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.cluster.protocol.messages import Reserve, Sampling, Tokens
from baton.decode.local_prefill import LaunchedPrompts, LocalPrefill
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_sampled_law import D, Ears
from baton.tests.parity.toy_engine import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 5, "logprobs": 2},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {5: 3.0}, "min_new_tokens": 4, "ignore_eos": False},
)
LENGTHS = (3, 40, 17, 64, 29)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("llama", num_hidden_layers=12)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2), head_tensors())


class Unwaiting(LocalPrefill):
    """Raises RuntimeError if a launch waits for the device."""

    num_launched = 0

    def _launch(self, *args, **settings) -> LaunchedPrompts | None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch calls it a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            launched = super()._launch(*args, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.num_launched += launched is not None
        return launched


def worker_of(target: Path, draft: Path | None, device: str, *, graphs: bool) -> DecodeWorker:
    config = EngineConfig(
        model=str(target), draft=str(draft or ""), device=device, dtype="float32", page_size=16, pages=64,
        max_context=160, max_running=8, aggregated=True, graphs="on" if graphs else "off", prefix_cache=False,
        spec_adaptive="off",
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return DecodeWorker(loader.engine(), Ears(), instance=D, max_running=8, local_prefill_tokens=32)


def ask(worker: DecodeWorker) -> list[list[int]]:
    rooms = [secrets.token_hex(16) for _ in WAYS]
    for room, length, way in zip(rooms, LENGTHS, WAYS, strict=True):
        sampling = Sampling(**{"max_new_tokens": 12, "ignore_eos": True, **way})
        prompt = random_ids(length, seed=length)
        order = Reserve(room=room, epoch=0, instance=D, prompt_ids=prompt, sampling=sampling, deadline_ms=0)
        worker.handle(order, now=0.0)
    for _ in range(200):
        worker.step()
    assert worker.num_rooms == 0
    said: dict[str, list[int]] = {room: [] for room in rooms}
    for message in worker.link.heard:
        for item in message.items if isinstance(message, Tokens) else ():
            said[item.room] += item.ids
    worker.link.heard.clear()
    return [said[room] for room in rooms]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_prompts_launch_without_waiting_and_give_the_tokens_of_the_cpu(
    target: Path, head: Path, drafts: bool, graphs: bool
) -> None:
    draft = head if drafts else None
    expected = ask(worker_of(target, draft, "cpu", graphs=False))
    worker = worker_of(target, draft, "cuda", graphs=graphs)
    assert ask(worker) == expected, "kernels are compiled"
    worker.local = local = Unwaiting(worker.engine, worker.decoder, 32, lambda: 0.0, worker.link.post, D)
    assert ask(worker) == expected
    assert local.num_launched >= sum(LENGTHS) // 128
