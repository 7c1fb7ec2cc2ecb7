"""Hand-offs in virtual time under seeded loss, duplicates, reordering, bit flips, cuts, cancels, restarts."""

import random
from dataclasses import replace

import pytest
from baton.tests.sim.transfer_world import KINDS, Faults, run

pytestmark = pytest.mark.usefixtures("one_thread")


def draw_faults(seed: int) -> Faults:
    """A mix of its own for each seed: each fault is off in half of them."""
    rng = random.Random(-seed - 1)

    def maybe(limit: float) -> float:
        return rng.choice([0.0, limit * rng.random()])

    return Faults(
        loss=maybe(0.3),
        duplicate=maybe(0.3),
        reorder=maybe(0.5),
        flip=maybe(0.6),
        garbage=maybe(0.1),
        cut=maybe(0.05),
        restart=maybe(0.03),
        cancel=maybe(0.1),
    )


def test_without_faults_every_room_completes_and_is_released() -> None:
    total = 0
    for seed in range(20):
        world = run(seed, Faults())
        assert (
            world.outcomes.get("decode Complete", 0) == world.num_rooms == world.outcomes["prefill Released"]
        )
        total += world.num_rooms
    assert total > 100


@pytest.mark.parametrize("num_seeds", [70, pytest.param(500, marks=pytest.mark.slow)])
def test_under_any_mix_of_faults_bytes_are_right_and_nothing_is_left(num_seeds: int) -> None:
    totals: dict[str, int] = {}
    for seed in range(num_seeds):
        for outcome, count in run(seed, draw_faults(seed)).outcomes.items():
            totals[outcome] = totals.get(outcome, 0) + count
    for kind in ("Complete", *KINDS):
        assert totals.get(f"decode {kind}", 0) > 0, f"no seed reached {kind}: {totals}"
    assert totals["decode Complete"] > 1.5 * num_seeds, totals


def test_loss_and_reordering_alone_lose_few_rooms() -> None:
    completed = opened = 0
    for seed in range(20):
        world = run(seed, Faults(loss=0.05, duplicate=0.1, reorder=0.3))
        completed += world.outcomes.get("decode Complete", 0)
        opened += world.num_rooms
    assert completed > 0.95 * opened, (completed, opened)


def test_rare_bit_flips_are_healed_by_pulling_again() -> None:
    for seed in range(20):
        world = run(seed, Faults(flip=0.02))
        assert world.outcomes.get("decode Complete", 0) == world.num_rooms


def test_one_seed_run_twice_is_the_same_run() -> None:
    for seed in (3, 4):
        first, second = (run(seed, draw_faults(seed)) for _ in range(2))
        assert first.trace.hexdigest() == second.trace.hexdigest()
        assert first.outcomes == second.outcomes


def test_without_faults_every_room_takes_device_memory_and_none_is_left() -> None:
    for seed in range(10):
        outcomes = run(seed, Faults(), has_devices=True).outcomes
        assert outcomes.get("decode Complete", 0) == outcomes["prefill Released"] > 0
        assert outcomes["by device memory"] > 0.5 * outcomes["decode Complete"], outcomes


@pytest.mark.parametrize("num_seeds", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_under_any_mix_of_faults_device_memory_is_right_and_given_back(num_seeds: int) -> None:
    """Late moves, stray writes and killed processes leave no wrong byte, no touched page and no memory."""
    totals: dict[str, int] = {}
    for seed in range(num_seeds):
        faults = replace(draw_faults(seed), plant=0.4 * (seed % 2))
        for outcome, count in run(seed, faults, has_devices=True).outcomes.items():
            totals[outcome] = totals.get(outcome, 0) + count
    assert totals["by device memory"] > num_seeds, totals
    assert totals["decode Complete"] > 1.5 * num_seeds, totals
