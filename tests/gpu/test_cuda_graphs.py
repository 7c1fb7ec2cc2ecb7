"""Every law of the graph backends on CUDA graphs, and laws that need a device."""

import threading

import pytest
import torch
from baton.engine.graphs.breakable import BreakableGraph, ReplayContext
from baton.engine.graphs.cuda import CudaBackend
from baton.tests.parity.graph_laws import LAWS, ROWS, Law
from baton.tests.parity.graph_toys import HIDDEN, ToyBucket, ToyDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_hold_on_cuda(law: Law):
    law(CudaBackend(), "cuda")


def test_the_pool_is_shared_and_small_buckets_reuse_space_of_large_ones():
    backend, model = CudaBackend(), ToyDecoder(device="cuda")
    large = ToyBucket(backend, model, 1024)
    after_large = backend.pool_bytes()
    assert after_large >= large.static.numel() * large.static.element_size()
    small = [ToyBucket(backend, model, bucket) for bucket in (64, 16, 4)]
    assert backend.pool_bytes() <= 2 * after_large
    for seed, toy in enumerate([large, *small, large]):
        toy.check(seed, toy.static.shape[0] - 1)


def test_replays_run_on_the_stream_of_the_caller():
    backend, stream = CudaBackend(), torch.cuda.Stream()
    toy = ToyBucket(backend, ToyDecoder(device="cuda"), 8)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(20):
            toy.check(seed, 5)


def test_another_thread_may_allocate_and_synchronise_during_a_capture():
    backend, model = CudaBackend(), ToyDecoder(device="cuda")
    stop, errors = threading.Event(), []

    def transfer() -> None:
        try:
            while not stop.is_set():
                torch.empty(1 << 20, device="cuda").fill_(1).sum().item()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=transfer)
    thread.start()
    try:
        toys = [ToyBucket(backend, model, bucket) for bucket in (64, 32, 16, 8)]
    finally:
        stop.set()
        thread.join()
    assert errors == []
    for seed, toy in enumerate(toys):
        toy.check(seed, 7)


def test_registered_generators_draw_anew_at_each_replay():
    generator = torch.Generator("cuda").manual_seed(1)
    backend = CudaBackend(generators=[generator])
    graph: BreakableGraph[ReplayContext, torch.Tensor] = BreakableGraph(backend)
    graph.capture(lambda _: torch.rand(4, HIDDEN, device="cuda", generator=generator), ROWS)
    first = graph.replay(ROWS).clone()
    assert not torch.equal(first, graph.replay(ROWS))
