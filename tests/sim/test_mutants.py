"""With a defence switched off some seed breaks an invariant, and with it on the same seed breaks none.

Without that the simulator proves nothing about the defence. `SEEDS` names for each defence seeds that have
shown it to be off; a change of production code moves every trace, so there are several, of which one must
still do it. If none does, `python -m baton.tests.sim.test_mutants` looks for others and prints the table
anew.
"""

import sys

import pytest
import torch
from baton.tests.sim.cluster_seams import SEAMS
from baton.tests.sim.cluster_world import run

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = {
    "digest": (0, 1, 3, 5, 7, 8),
    "tracker": (5, 6, 10, 29, 37),
    "lease": (0, 4, 5, 12, 15, 20),
    "epoch": (1, 3, 6, 20, 21, 24),
    "instance": (7, 8, 16, 17, 18, 19),
    "dedup": (0, 2, 3, 4, 8, 9),
    "explicit cancel": (1, 3, 4, 6, 7, 8),
    "pages held until Release": (3, 4, 5, 6, 7, 8),
    "pages held until read": (0, 2, 4, 5, 7, 8),
    "prompt pages held until read": (0, 1, 2, 3, 4, 7),
    "pages of the next step": (0, 1, 2, 3, 4, 5),
    "pages on the device": (0, 1, 2, 3, 4, 5),
    "grant of a retracted room": (1, 6, 8, 11, 12, 15),
    "retraction is no failure": (8, 32, 33, 46, 59, 79),
    "prompt shared when complete": (0, 1, 2),
    "copy of the common page": (0, 1, 2),
    "owners of shared pages": (0, 1, 2),
    "pages of a changed prompt": (0, 1, 2),
    "word of a lost prompt": (0, 10, 12, 16, 17, 20),
    "retry budget": (0, 2, 7, 8, 12, 13),
    "attempts of a room": (0, 1, 2, 3, 5, 6),
    "third chance": (29, 42, 98, 148, 189),
    "deadline": (1, 2, 8, 10, 11, 14),
    "heartbeat": (0, 1, 5, 7, 8, 9),
    "generation": (24, 31, 37, 39),
    "broken connection": (53, 82, 86, 91, 97),
    "repeated orders": (0, 1, 2, 3, 4, 5),
    "lost router": (0, 2, 3, 5, 6, 7),
    "stall": (0, 6, 11, 12, 13, 17),
    "pause of the router": (1, 3, 4, 7, 9, 10),
    "running clock": (2, 8, 10, 11, 17, 18),
    "fingerprint at the router": (2, 3, 4, 5, 6, 8),
    "fingerprint anywhere": (0, 1, 4, 5, 8, 9),
    "digest of a stored page": (0, 1, 2),
    "digest of a torn page": (15, 33, 38),
    "pages held until saved": (1, 3, 6, 7, 8, 9),
    "pages held until restored": (0, 1, 2, 5, 7, 8),
    "slots held until read": (0, 1, 2, 4, 7, 8),
    "patience with a disk": (2, 4, 8, 9, 10, 11),
    "fingerprint of a disk": (0, 1, 2),
    "pages being saved": (5, 7, 14, 20, 22, 24),
    "digest of a pulled page": (0, 1, 2, 3, 4, 5),
    "patience with a pull": (9, 13, 16, 22, 23, 27),
    "owner of pulled pages": (1, 2, 3, 4, 5, 6),
    "owner of offered pages": (10, 50, 62, 67, 69),
    "end of an offer": (0, 1, 2),
    "end of a pull": (0, 1, 2),
    "landed part of a pull": (0, 1, 2),
    "pulled pages are bare": (0, 3, 4, 8, 12, 13),
    "bare pages for those who take them": (0, 2, 3, 4, 5, 6),
    "word of decode for bare pages": (10, 12, 14, 17, 19, 20),
    "question after a missed message": (0, 1, 2),
    "pages that are gone are told": (0, 1, 2),
    "grant against urgent rooms": (4, 5, 6, 9, 12, 15),
    "pages kept on prefill": (4, 5, 6, 7, 8, 9),
    "way for urgent rooms": (5, 13, 16, 26, 32, 37),
    "cancel decode admitting": (4, 6, 17, 28, 37),
    "cancel decode restoring": (0, 1, 3, 6, 9, 10),
    "cancel decode prefilling": (1, 2, 3, 4, 5, 6),
    "cancel decode pulling": (0, 1, 2, 3, 4, 5),
    "cancel decode warming": (3, 6, 9, 10, 11, 12),
    "cancel decode running": (0, 1, 2, 3, 4, 5),
    "cancel decode sharing": (2, 3, 4, 5, 7, 8),
    "cancel prefill queued": (0, 1, 3, 4, 5, 6),
    "cancel prefill running": (0, 1, 2, 3, 8, 12),
    "cancel prefill handed": (0, 1, 2, 3, 4, 5),
}
SLOW = {
    "patience with a pull",
    "owner of pulled pages",
    "owner of offered pages",
    "end of an offer",
    "bare pages for those who take them",
    "word of decode for bare pages",
    "question after a missed message",
    "pages that are gone are told",
}  # their conversations have many turns
NUM_SEEDS = 6  # per defence in the table
SEARCHED = range(40)  # for the table
FRESH = range(1000, 1120)  # that no table was made from


def kills(name, seed):
    """What the seed breaks without the defence; "" when nothing, or when it breaks something with it, too."""
    switched_off, options = SEAMS[name]()
    with switched_off:
        violation = run(seed, options).violation
    return violation if violation and not run(seed, options).violation else ""


def search(name, seeds, wanted):
    """The first `wanted` of `seeds` that show the defence to be off."""
    found = []
    for seed in seeds:
        if len(found) < wanted and kills(name, seed):
            found.append(seed)
    return found


def test_every_defence_has_its_seeds():
    assert set(SEEDS) == set(SEAMS)
    assert all(SEEDS.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SEEDS]
)
def test_a_disabled_defence_fails_one_of_its_seeds(name):
    noticed = any(kills(name, seed) for seed in SEEDS[name])
    assert noticed, f"no seed notices that the defence is off: {name}; see the top of this file"


@pytest.mark.slow
@pytest.mark.parametrize("name", SEAMS)
def test_a_disabled_defence_fails_unselected_seeds(name):
    assert search(name, FRESH, 1), f"none of {FRESH} notices that the defence is off: {name}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SEAMS:
        print(f'    "{name}": {tuple(search(name, SEARCHED, NUM_SEEDS))},', flush=True)
