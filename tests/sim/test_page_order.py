"""Both workers on a device whose work ends only when awaited: every block is copied in its pages' order."""

import random

import pytest
from baton.tests.sim.test_workers import prompts
from baton.tests.sim.worker_pair import Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("chunk_size", [4, 0])
def test_no_block_is_copied_before_the_forwards_that_use_its_pages(toy_checkpoint, chunk_size):
    pair = Pair(toy_checkpoint("llama", num_hidden_layers=2), chunk_size=chunk_size, pages=48)
    for worker in (pair.prefill, pair.decode):
        worker.engine.pool.order.check_uses()
    rng = random.Random(chunk_size)
    for i, prompt in enumerate(prompts(rng, 24)):  # more than the pools hold: pages change hands
        pair.send(name(i), prompt, max_new_tokens=4)
        pair.run(rng, until=lambda: pair.decode.num_rooms < 3)
    pair.run(rng)
    assert len(pair.ends) == 24
    pair.assert_nothing_is_held()
