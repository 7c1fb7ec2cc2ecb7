"""Another head under captured graphs of a device: drafts change at once, tokens and graphs stay."""

import secrets
import time
from pathlib import Path

import pytest
import torch
from baton.cluster.protocol.messages import Reserve, Sampling, SwapDraft, Tokens
from baton.decode.worker import DecodeWorker
from baton.tests.gpu.test_local_prefill import worker_of
from baton.tests.parity.test_sampled_law import D
from baton.tests.sim.test_head_swap import ORACLES, chain_of, copy_of, randomise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def begin(worker: DecodeWorker, first: int, count: int) -> str:
    room = secrets.token_hex(16)
    sampling = Sampling(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    order = Reserve(
        room=room, epoch=0, instance=D, prompt_ids=chain_of(first), sampling=sampling, deadline_ms=0
    )
    worker.handle(order, now=0.0)
    return room


def said(worker: DecodeWorker) -> dict[str, list[int]]:
    """The tokens of all rooms once they have ended."""
    for _ in range(2000):
        worker.step()
        if not worker.num_rooms:
            break
    found: dict[str, list[int]] = {}
    for message in worker.link.heard:
        for item in message.items if isinstance(message, Tokens) else ():
            found.setdefault(item.room, []).extend(item.ids)
    worker.link.heard.clear()
    return found


def obeyed(worker: DecodeWorker, action: str, path: Path | str = "") -> None:
    order = SwapDraft(instance=D, order=secrets.token_hex(16), action=action, path=str(path))
    worker.handle(order, now=0.0)
    deadline = time.monotonic() + 60
    while worker.stats().draft.state == "busy":
        worker.step()
        assert time.monotonic() < deadline
    found = worker.stats().draft
    assert (found.state, found.fault) == ("done", "")


def accepted(worker: DecodeWorker) -> list[float]:
    """Accepted and drafted tokens of four requests that run together."""
    before = worker.stats().counters
    rooms = [begin(worker, first, 17) for first in (5, 9, 13, 17)]
    found = said(worker)
    for room, first in zip(rooms, (5, 9, 13, 17), strict=True):
        assert found[room] == chain_of(chain_of(first)[-1], 18)[1:]
    after = worker.stats().counters
    return [after[name] - before[name] for name in ("accepted_tokens", "drafted_tokens")]


@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_head_changes_under_graphs_and_requests(kind: str, graphs: bool, tmp_path: Path) -> None:
    target, good = ORACLES[kind](tmp_path)
    bad = copy_of(good, tmp_path / "bad", randomise)
    worker = worker_of(target, bad, DEVICE, graphs=graphs)
    few, drafted = accepted(worker)
    assert few < drafted / 4
    long = begin(worker, 5, 100)
    for _ in range(5):
        worker.step()
    obeyed(worker, "swap", good)
    assert worker.num_rooms == 1, "a request ran meanwhile"
    assert said(worker)[long][-90:] == chain_of(chain_of(5)[-1], 101)[1:][-90:]
    most, all_drafted = accepted(worker)
    assert most == all_drafted > 0
    obeyed(worker, "back")
    assert accepted(worker) == [few, drafted]
    if graphs:
        assert not worker.stats().counters.get("captures_after_ready")
        assert worker.stats().counters["graph_replays_decode_step"] > 0
