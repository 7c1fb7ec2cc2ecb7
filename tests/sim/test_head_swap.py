"""Another head on a running decode worker: tokens stay, drafts change, nothing of the old head is reused."""

import json
import shutil
import time

import pytest
import torch
from baton.cluster.protocol.messages import SwapDraft
from baton.engine.hub import NGRAM
from baton.tests.parity.dflash_toys import write_dflash_oracle
from baton.tests.parity.eagle3_toys import ORACLE_IDS, successor, write_oracle, write_oracle_head
from baton.tests.parity.eagle_toys import write_eagle_oracle
from baton.tests.parity.every_drafter import KINDS
from baton.tests.sim.worker_pair import D, Pair, engine_of, name
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
ORACLES = {"eagle3": write_oracle, "eagle": write_eagle_oracle, "dflash": write_dflash_oracle}
SETTINGS = {"pages": 96, "spec_steps": STEPS, "max_running": 4, "chunk_size": 8}
TAPES = {"graphs": "on", "graph_self_test": False}  # of decode


def chain_of(first, length=9):
    """A prompt as the oracle's text goes on."""
    ids = [first]
    while len(ids) < length:
        ids.append(successor(ids[-1]))
    return ids


def copy_of(head, directory, change=lambda tensors: None, **config):
    """The head with changed tensors and fields of its config."""
    shutil.copytree(head, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    known = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(known | config))
    return directory


def randomise(tensors):
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)


@pytest.fixture(
    scope="module",
    params=["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle", "dflash"))],
)
def heads(request, tmp_path_factory):
    """(target, a head whose drafts are all accepted, one of random weights)"""
    base = tmp_path_factory.mktemp(request.param)
    target, good = ORACLES[request.param](base)
    return target, good, copy_of(good, base / "bad", randomise)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory):
    base = tmp_path_factory.mktemp("eagle3 alone")
    target, good = write_oracle(base)
    return target, good, copy_of(good, base / "bad", randomise)


def ordered(pair, number, action, path=""):
    """The worker's status once the order is done; the pair goes on meanwhile."""
    order = name(1000 + number)
    message = SwapDraft(instance=D, order=order, action=action, path=str(path))
    pair.decode.handle(message, pair.clock.now)
    deadline = time.monotonic() + 60
    while True:
        pair.turn()
        found = pair.decode.stats().draft
        assert found.order == order
        if found.state != "busy":
            return found
        assert time.monotonic() < deadline
        time.sleep(0.002)


def asked(pair, number, prompt, count=13, **how):
    """Tokens and timeline of one request that runs alone."""
    pair.send(name(number), prompt, max_new_tokens=count, **how)
    pair.run(turns=1000)
    return pair.tokens[name(number)], pair.ends[name(number)].timeline


@pytest.mark.parametrize(
    ("is_local", "settings"),
    [
        pytest.param(False, TAPES | {"overlap": "on"}, id="handed over, tapes"),
        pytest.param(True, {}, id="local, eager"),
        pytest.param(True, TAPES, id="local, tapes", marks=pytest.mark.slow),
        pytest.param(False, {}, id="handed over, eager", marks=pytest.mark.slow),
    ],
)
def test_a_swapped_head_drafts_from_the_next_request_on(heads, is_local, settings):
    target, good, bad = heads
    pair = Pair(target, bad, theirs=settings, captured={"max_running": 1}, **SETTINGS)
    wanted, refused = asked(pair, 0, chain_of(5), is_local=is_local)
    assert refused.accepted_tokens == 0
    assert pair.decode.stats().graphs.decode + pair.decode.stats().graphs.verify > 0 or not settings
    before = pair.decode.stats().draft
    assert (before.path, before.verifies) == (str(bad), before.tokens)

    pair.send(name(1), chain_of(9), max_new_tokens=60, is_local=is_local)
    for _ in range(12):
        pair.turn()
    assert name(1) not in pair.ends, "it runs while the head changes"
    found = ordered(pair, 0, "swap", good)
    assert (found.state, found.path, found.previous) == ("done", str(good), before.fingerprint)
    assert found.fingerprint == found.found != before.fingerprint
    pair.run(turns=1000)
    assert pair.tokens[name(1)] == chain_of(successor(chain_of(9)[-1]), 60)
    assert pair.decode.stats().draft.verifies == 0, "a request that began before does not count"

    tokens, timeline = asked(pair, 2, chain_of(5), is_local=is_local)
    assert tokens == wanted
    assert timeline.have_tokens == 0, "draft KV of the old head is not found in the cache"
    assert timeline.accepted_tokens == timeline.drafted_tokens > 0
    counted = pair.decode.stats().draft
    assert counted.tokens == counted.verifies + timeline.accepted_tokens

    found = ordered(pair, 1, "back")
    assert (found.state, found.path, found.previous) == ("done", str(bad), "")
    tokens, timeline = asked(pair, 3, chain_of(5), is_local=is_local)
    assert (tokens, timeline.accepted_tokens) == (wanted, 0)
    pair.assert_nothing_is_held()


def test_pages_of_a_request_of_the_old_head_stay_out_of_the_cache(eagle3):
    target, good, bad = eagle3
    pair = Pair(target, bad, **SETTINGS)
    pair.send(name(0), chain_of(5), max_new_tokens=60)
    for _ in range(8):
        pair.turn()
    ordered(pair, 0, "swap", good)
    pair.run(turns=1000)
    assert pair.decode.engine.cache.num_cached == 0
    asked(pair, 1, chain_of(5))
    assert pair.decode.engine.cache.num_cached > 0
    pair.assert_nothing_is_held()


def test_a_check_reads_the_head_and_changes_nothing(eagle3):
    target, good, bad = eagle3
    pair = Pair(target, bad, **SETTINGS)
    before = pair.decode.stats().draft
    found = ordered(pair, 0, "check", good)
    assert (found.state, found.fingerprint, found.previous) == ("checked", before.fingerprint, "")
    assert found.found == ordered(pair, 1, "swap", good).fingerprint


def test_an_order_is_performed_once(eagle3):
    target, good, bad = eagle3
    pair = Pair(target, bad, **SETTINGS)
    ordered(pair, 0, "swap", good)
    assert ordered(pair, 0, "swap", good).previous == ordered(pair, 1, "back").fingerprint


def test_a_head_that_is_swapped_in_twice_leads_back_to_the_one_before(eagle3):
    target, good, bad = eagle3
    pair = Pair(target, bad, **SETTINGS)
    old = pair.decode.stats().draft.fingerprint
    ordered(pair, 0, "swap", good)
    assert ordered(pair, 1, "swap", good).previous == old
    assert ordered(pair, 2, "back").fingerprint == old


def torn(head, path):
    shutil.copytree(head, path)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return path


def of_numbers(value):
    def change(tensors):
        next(tensor for tensor in tensors.values() if tensor.is_floating_point()).view(-1)[0] = value

    return lambda head, path: copy_of(head, path, change)


BAD = {
    "absent": (lambda head, path: path, "no directory of this host"),
    "torn": (torn, "safetensors"),
    "infinite": (of_numbers(float("inf")), "not finite"),
    "wider": (lambda head, path: copy_of(head, path, intermediate_size=128), "intermediate_size is 128"),
    "less context": (
        lambda head, path: copy_of(head, path, max_position_embeddings=16), "max_position_embeddings is 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_head_that_does_not_fit_is_refused_and_none_changes(eagle3, tmp_path, kind):
    target, good, _ = eagle3
    make, fault = BAD[kind]
    pair = Pair(target, good, **SETTINGS)
    before = {key: tensor.clone() for key, tensor in pair.decode.engine.drafter.parameters()}
    found = ordered(pair, 0, "swap", make(good, tmp_path / "head"))
    assert found.state == "refused"
    assert fault in found.fault
    assert "\n" not in found.fault
    assert found.path == str(good)
    for key, tensor in pair.decode.engine.drafter.parameters():
        assert torch.equal(tensor, before[key]), key
    _, timeline = asked(pair, 0, chain_of(5))
    assert timeline.accepted_tokens == timeline.drafted_tokens > 0


def test_a_head_of_another_kind_or_of_other_layers_is_refused(eagle3, tmp_path):
    target, good, _ = eagle3
    pair = Pair(target, good, **SETTINGS)
    _, other = write_dflash_oracle(tmp_path / "dflash")
    assert "its kind is Dflash, that of the head in use Eagle3" in ordered(pair, 0, "swap", other).fault
    found = ordered(pair, 1, "swap", write_oracle_head(tmp_path / "turned", ORACLE_IDS[::-1]))
    assert "give prefill --feature-layers" in found.fault
    assert ordered(pair, 2, "back").fault.startswith("no weights from before")


def test_a_head_of_another_shape_is_read_whole_and_taken_by_a_restart_only(eagle3, tmp_path):
    target, good, _ = eagle3
    other = write_oracle_head(tmp_path / "turned", ORACLE_IDS[::-1])
    pair, link = Pair(target, good, **SETTINGS), tmp_path / "current"
    link.symlink_to(good)
    swap, left = pair.decode.head_swap, []
    swap.named, swap.on_restart = str(link), lambda: left.append(True)
    found = ordered(pair, 0, "check", other)
    assert (found.state, found.found_ids, found.link) == ("other", ORACLE_IDS[::-1], str(link))
    assert "--feature-layers 5,3,1" in found.fault
    assert ordered(pair, 1, "check", of_numbers(float("nan"))(other, tmp_path / "nan")).state == "refused"
    assert "does not lead to" in ordered(pair, 2, "restart", other).fault
    assert not left
    link.unlink()
    link.symlink_to(other)
    assert ordered(pair, 3, "restart", other).state == "leaving"
    assert left == [True]
    assert swap.is_leaving
    assert pair.decode.stats().draft.path == str(good)


UNREAD = "eagle.stack.0.input_norm.weight"  # memory without weights, which no forward reads


def reachable(value, name="", seen=None):
    """Every tensor below an object, by the names that lead there."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield from [] if name == UNREAD else [(name, value)]
    elif id(value) not in seen:
        seen.add(id(value))
        parts = vars(value) if hasattr(value, "__dict__") else value if isinstance(value, dict) else {}
        if isinstance(value, (list, tuple)):
            parts = dict(enumerate(value))
        for key, part in parts.items():
            yield from reachable(part, f"{name}.{key}", seen)


QUICK = ("parallel eagle3", "dflash", "mtp chained")
WITH_WEIGHTS = [kind for kind in KINDS if kind != "ngram" and "tree" not in kind]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in WITH_WEIGHTS],
)
def test_every_tensor_of_a_swapped_head_is_that_of_a_fresh_start(toy_checkpoint, tmp_path, kind):
    target = toy_checkpoint("llama", num_hidden_layers=4)
    old = KINDS[kind].write(tmp_path / "old", target)
    new = copy_of(old, tmp_path / "new", randomise)
    settings = {"model": str(target), "pages": 32, "max_running": 2} | KINDS[kind].settings
    swapped, fresh = (engine_of(settings | {"draft": str(path)}, has_drafter=True) for path in (old, new))
    assert swapped.head.version.fingerprint != fresh.head.version.fingerprint
    first = {name: one.clone() for name, one in reachable(swapped.drafter.head, kind)}
    kept = swapped.head.keep()
    swapped.head.apply(swapped.head.stage(new), kept)
    wanted = dict(reachable(fresh.drafter.head, kind))
    changed = 0
    for key, tensor in reachable(swapped.drafter.head, kind):
        assert torch.equal(tensor, wanted[key]), key
        changed += not torch.equal(tensor, first[key])
    assert changed > 5
    assert swapped.head.version == fresh.head.version
    swapped.head.apply(swapped.head.stage_previous(), None)
    for key, tensor in reachable(swapped.drafter.head, kind):
        assert torch.equal(tensor, first[key]), key


def test_lookup_has_no_head_and_ignores_orders(eagle3):
    pair = Pair(eagle3[0], NGRAM, **SETTINGS)
    message = SwapDraft(instance=D, order=name(1), action="swap", path=str(eagle3[1]))
    pair.decode.handle(message, pair.clock.now)
    pair.turn()
    assert pair.decode.stats().draft is None
