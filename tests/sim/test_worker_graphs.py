"""Both workers with graphs answer as without, with NaN in free pages; device waits per step are counted."""

import random

import pytest
import torch
from baton.engine.graphs.guard import HOST_READS
from baton.engine.graphs.modes import DispatchMode
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head, write_oracle
from baton.tests.sim.test_workers import prompts
from baton.tests.sim.worker_pair import Pair, name
from baton.tests.variants import slow
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def random_pair(toy_checkpoint, tmp_path_factory):
    target = toy_checkpoint("llama", num_hidden_layers=4)
    return target, write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 3)), head_tensors())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return write_oracle(tmp_path_factory.mktemp("oracle"))


def serve(model, draft, wanted, *, seed=None, **settings):
    """A pair that has answered `wanted`, all at once and in any order of events."""
    pair = Pair(model, draft, pages=96, max_running=6, **settings)
    for i, prompt in enumerate(wanted):
        pair.send(name(i), prompt, temperature=float(i % 2), seed=i)
    pair.run(None if seed is None else random.Random(seed), turns=2000)
    pair.assert_nothing_is_held()
    return pair


@pytest.mark.parametrize("drafts", [True, False])
def test_a_pair_gives_the_same_tokens_with_and_without_graphs(random_pair, drafts):
    target, head = random_pair
    wanted = prompts(random.Random(5), 6)
    pairs = [
        serve(target, head if drafts else "", wanted, graphs=graphs, seed=seed)
        for graphs, seed in (("off", None), ("on", 1))
    ]
    assert pairs[0].tokens == pairs[1].tokens
    assert len(pairs[0].tokens) == 6
    prefill, decode = pairs[1].prefill.stats(), pairs[1].decode.stats()
    assert prefill.graphs.prefill > 0
    assert (
        prefill.graphs.decode,
        prefill.graphs.verify,
        prefill.graphs.draft,
        prefill.graphs.draft_extend,
    ) == (0,) * 4
    assert decode.graphs.prefill == 0
    kinds = ("decode_step", "draft_prefill") if drafts else ("decode_step",)
    for kind in kinds:
        assert decode.counters[f"graph_replays_{kind}"] > 0, decode.counters
    assert prefill.counters["graph_replays_target_prefill"] > 0
    assert not any(key.startswith("graph_fallback") for key in {*prefill.counters, *decode.counters})
    without = {*pairs[0].prefill.stats().counters, *pairs[0].decode.stats().counters}
    assert not any(key.startswith("graph_") for key in without)


@pytest.mark.slow  # parity/test_oracle_paths says it of one engine
def test_m2_9_accept_lengths_are_the_same_with_graphs(oracle):
    wanted = [[1, 2, 3], [9], list(range(30)), [40, 41]]
    lengths = [serve(*oracle, wanted, graphs=on).decode.stats().accept_length for on in ("off", "on")]
    assert lengths[0] == lengths[1] > 1.0


class HostReads(TorchFunctionMode):
    """Counts what makes the host wait for the device, as methods of tensors and as operations."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.operations = Syncs(self.seen)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in HOST_READS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Syncs(DispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def dispatch(self, func, args, kwargs):
        if torch.Tag.data_dependent_output in func.tags:
            self.seen.append(str(func))
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("temperature", "settings"),
    [
        slow(0.0, {}, id="greedy"),
        slow(1.0, {}, id="sampled"),
        pytest.param(1.0, {"spec_topk": 3, "spec_tokens": 8}, id="tree"),
    ],
)
def test_a_step_reads_only_its_report_from_the_device(random_pair, temperature, settings):
    pair = Pair(*random_pair, pages=96, max_running=6, graphs="on", **settings)
    for i in range(3):
        pair.send(name(i), [5 + i, 7, 9], max_new_tokens=30, temperature=temperature, seed=i)
    pair.run(until=lambda: len(pair.tokens) == 3 and all(len(ids) > 2 for ids in pair.tokens.values()))
    reads = HostReads()
    for _ in range(3):
        with reads, reads.operations:
            assert pair.decode.step()
    assert reads.seen == [], "the report comes in one piece, behind an event"
    assert pair.decode.stats().counters["graph_replays_decode_step"] >= 3


def test_the_steps_in_use_and_how_often_each_was_chosen_are_reported(random_pair, oracle):
    """A head that is never right is soon not asked, one that always is drafts on; each has its graphs."""
    for model, is_right in ((random_pair, False), (oracle, True)):
        pair = Pair(
            *model,
            pages=96,
            max_running=6,
            graphs="off" if is_right else "on",
            spec_adaptive="on",
            graph_self_test=False,
        )
        for i in range(4):
            pair.send(name(i), [5 + i, 7, 9], max_new_tokens=40)
        pair.run(
            until=lambda pair=pair: (
                len(pair.tokens) == 4 and all(len(ids) > 30 for ids in pair.tokens.values())
            )
        )
        stats = pair.decode.stats()
        chosen = [count for key, count in stats.counters.items() if key.startswith("steps_of_")]
        assert (stats.spec_steps > 0) is is_right, stats.counters
        assert sum(chosen) == stats.counters["steps"] > 0
        assert stats.counters["spec_steps_changes"] > 0
        counts = (stats.graphs.decode, stats.graphs.verify)
        assert counts == ((0, 0) if is_right else (15, 45)), "three kinds of five sizes of each shape"
        assert not any(key.startswith("graph_fallback") for key in stats.counters)
    fixed = Pair(*oracle, pages=96).decode.stats()
    assert (fixed.spec_steps, [key for key in fixed.counters if "steps_of" in key]) == (3, [])
    assert Pair(oracle[0], pages=96).decode.stats().spec_steps is None


def test_a_head_with_no_accepted_draft_is_warned_of_once(random_pair, oracle, caplog):
    for model, count in ((random_pair, 1), (oracle, 0)):
        caplog.clear()
        pair = Pair(*model, pages=96, max_running=6)
        for i in range(4):
            pair.send(name(i), [5 + i, 7, 9], max_new_tokens=20)
        pair.run()
        messages = [
            record.getMessage()
            for record in caplog.records
            if "drafts are not accepted" in record.getMessage()
        ]
        assert len(messages) == count, pair.decode.stats().accept_length
