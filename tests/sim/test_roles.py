"""Production's router moves workers between the roles by itself, and a load that shifts finds its split.

The workers are costs in virtual time (`role_world`). `test_role_scaler.py` has the rules of single moves.
"""

import logging
from unittest.mock import patch

import pytest
from baton.router.scheduling.role_moves import RoleMoves
from baton.router.scheduling.role_scaler import RoleScaler
from baton.tests.sim.role_world import RoleWorld

LONG_PROMPTS, LONG_ANSWERS = (4000, 100), (200, 1000)  # tokens in, tokens out
NUM_WORKERS, NUM_CLIENTS = 4, 160
PHASE_S, STEADY_S = 300.0, 90.0
SHARE = 0.85


@pytest.fixture(autouse=True)
def quiet():
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(level)


def best(phase):
    """The answers per second of the best fixed split, once all clients are served by it."""
    rates = []
    for num_prefill in range(1, NUM_WORKERS):
        world = RoleWorld(num_prefill, NUM_WORKERS, NUM_CLIENTS)
        world.run(phase, STEADY_S / 3)
        rates.append(world.run(phase, STEADY_S))
        assert not world.failures
    return max(rates)


def shifted(phases, num_prefill=2):
    """The answers per second of each phase, from its first moment on, and the split at its end."""
    world = RoleWorld(num_prefill, NUM_WORKERS, NUM_CLIENTS, scaler=RoleScaler())
    found = [(world.run(phase, PHASE_S), world.split) for phase in phases]
    assert world.failures == [], "no request fails by a move"
    assert world.dispatcher.events["worker_lost"] == 0
    assert world.dispatcher.events["role_moved"] == world.num_moved
    return found


def test_prefill_gets_workers_though_the_places_of_decode_are_held():
    world = RoleWorld(1, NUM_WORKERS, 60, scaler=RoleScaler())
    world.run(LONG_PROMPTS, 75.0)
    assert world.split[0] > 1
    assert world.failures == []


@pytest.mark.slow
def test_places_counted_as_the_load_of_decode_keep_a_bad_split():
    def held(self, worker, now):
        return min(1.0, worker.num_taken / max(1, worker.hello.max_running))

    with patch.object(RoleMoves, "_load_of", held):
        world = RoleWorld(1, NUM_WORKERS, 160, scaler=RoleScaler())
        world.run(LONG_PROMPTS, 75.0)
    assert world.split == (1, 3)


@pytest.mark.slow
def test_a_load_that_shifts_keeps_within_15_percent_of_the_best_split():
    phases = [LONG_PROMPTS, LONG_ANSWERS, LONG_PROMPTS]
    most = {phase: best(phase) for phase in set(phases)}
    found = shifted(phases)
    for phase, (rate, split) in zip(phases, found, strict=True):
        print(f"{phase}: {rate:.2f} answers/s with {split} at the end, best fixed split {most[phase]:.2f}")
    assert all(rate >= SHARE * most[phase] for phase, (rate, _) in zip(phases, found, strict=True)), (
        found,
        most,
    )
    fixed = RoleWorld(2, NUM_WORKERS, NUM_CLIENTS)
    rates = [fixed.run(phase, STEADY_S) for phase in phases]
    assert any(rate < SHARE * most[phase] for phase, rate in zip(phases, rates, strict=True))
