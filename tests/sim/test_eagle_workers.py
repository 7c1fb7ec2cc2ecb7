"""EAGLE and deep EAGLE3 heads on decode workers; prefill reads their configs or is told the layers."""

import pytest
from baton.tests.parity.eagle3_toys import write_head
from baton.tests.parity.eagle_toys import write_eagle_oracle
from baton.tests.parity.test_eagle import HEADS
from baton.tests.sim.worker_pair import Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED = list(range(40, 57))
PROMPTS = [SHARED, [*SHARED, 5, 6], [4], [*SHARED, 5, 9, 3]]


@pytest.fixture(scope="module")
def target(toy_checkpoint):
    return toy_checkpoint("llama", num_hidden_layers=12)


def said(pair, **sampling):
    for number, prompt in enumerate(PROMPTS):
        pair.send(name(number), prompt, seed=number, **sampling)
    pair.run(turns=1000)
    return [pair.tokens[name(number)] for number in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("is_local", "overlap"),
    [
        pytest.param(False, "off", id="handed over-off"),
        pytest.param(True, "on", id="local-on"),
        pytest.param(False, "on", id="handed over-on", marks=pytest.mark.slow),
        pytest.param(True, "off", id="local-off", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("head", HEADS)
def test_answers_are_those_without_drafts(target, tmp_path, head, is_local, overlap):
    draft = write_head(tmp_path / "head", *HEADS[head]())
    wanted = said(Pair(target, pages=96))
    pair = Pair(target, draft, pages=96, overlap=overlap, chunk_size=8)
    assert said(pair, is_local=is_local) == wanted
    assert pair.decode.stats().counters["verify_steps"] > 0
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("offered", ["", "7", "2,7,5"])
def test_an_oracle_head_is_accepted_in_full_behind_a_handoff(tmp_path, offered):
    """Prefill offers the output of the last layer; decode applies the target's final norm."""
    target, head = write_eagle_oracle(tmp_path)
    ours = {"draft": "", "feature_layers": offered} if offered else {}
    pair = Pair(target, head, pages=96, ours=ours, chunk_size=4)
    pair.send(name(0), [40, 7, 9, 11, 3], max_new_tokens=1 + 3 * 4)
    pair.run()
    timeline = pair.ends[name(0)].timeline
    assert (timeline.verify_steps, timeline.accepted_tokens) == (3, 9)
