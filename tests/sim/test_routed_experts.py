"""The experts that each token took are those of transformers' routers, on every path, for requests that ask.

The workers send them for each row once: prefill those of the prompt, decode those behind which it chose
tokens. The test keeps them as a router does.
"""

import random
from functools import cache

import numpy as np
import pytest
import torch
from baton.cluster.protocol.messages import FirstToken, Refused, RoutedExperts, Tokens
from baton.engine.errors import CheckpointError, LifecycleError
from baton.engine.runner.lifecycle import Phase
from baton.engine.runner.routed_experts import RoutedExperts as KeptExperts
from baton.engine.runner.routed_experts import keep_experts
from baton.engine.speculative.step.async_decoder import AsyncDecoder
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.pull_pair import PullPair
from baton.tests.sim.worker_pair import D, P, Pair, engine_of, name

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss")
NEW_TOKENS = 14
SETTINGS = {"pages": 200, "max_context": 200, "max_running": 6, "return_routed_experts": True}
GRAPHS = {"graphs": "on", "captured": {"chunk_size": 32, "max_running": 6}}
CHAIN, TREE = {"spec_steps": 3}, {"spec_steps": 3, "spec_topk": 2, "spec_tokens": 6}
WAYS = {
    "plain": {"no_draft": True},
    "chain": CHAIN,
    "tree": TREE,
    "lookup": {"draft": "ngram"},
    "plain graphs": {"no_draft": True} | GRAPHS,
    "chain graphs": CHAIN | GRAPHS,
    "tree ahead graphs": TREE | GRAPHS | {"overlap": "on"},
    "whole prompts": {"no_draft": True, "chunk_size": 0},
}
QUICK = {("qwen3_moe", "tree"), ("deepseek_v3", "plain graphs")}


class Kept:
    """What a router keeps of a pair's messages: the experts of each room, row by row."""

    def __init__(self, pair):
        self.pair = pair
        self.shape = pair.decode.engine.expert_shape
        self.rows, self.first, self.timelines = {}, 0, {}
        for link in pair.links.values():
            link.to_router = Watched(self)

    def take(self, message):
        if isinstance(message, RoutedExperts):
            rows = self.rows.setdefault(message.room, [])
            assert message.start == self.first + len(rows), "rows come in order"
            rows += self.split(message.ids, message.count)
        if isinstance(message, FirstToken):
            self.timelines[message.room] = message.timeline
        for item in message.items if isinstance(message, Tokens) else ():
            if item.experts:
                self.rows.setdefault(item.room, []).extend(self.split(item.experts, len(item.ids)))

    def split(self, ids, count):
        assert len(ids) == count * self.shape.row_bytes
        found = np.frombuffer(ids, f"<u{self.shape.id_bytes}")
        return found.reshape(count, len(self.shape.layers), self.shape.top_k).tolist()


class Watched(list):
    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def append(self, message):
        self.kept.take(message)
        super().append(message)


@pytest.fixture(scope="module")
def models(toy_checkpoint, tmp_path_factory):
    """(target, head) of a family."""
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())
    return cache(lambda family: (toy_checkpoint(family), head))


@pytest.fixture(scope="module")
def expected(models):
    """As `by_transformers`."""
    return by_transformers(models)


def by_transformers(models):
    """Of a family and a prompt: the tokens behind it, and the sorted experts of the rows before the last."""

    @cache
    def of(family, prompt):
        model, found = reference_model(models(family)[0]), []
        for layer in model.model.layers:
            part = layer.mlp
            router = getattr(part, "gate", None) or getattr(part, "router", None)
            if router is not None and hasattr(part, "experts"):
                router.register_forward_hook(lambda module, args, out: found.append(out))
        tokens = reference_greedy(model, list(prompt), NEW_TOKENS)
        found.clear()
        with torch.no_grad():
            model(torch.tensor([[*prompt, *tokens[:-1]]]))
        chosen = [experts_in(out, model.config) for out in found]
        return tokens, torch.stack(chosen, dim=1).sort(dim=2).values.tolist()

    return lambda family, prompt: of(family, tuple(prompt))


def experts_in(out, config):
    """Of a router's output: ids are its last part, of whole numbers."""
    parts = [part for part in out if isinstance(part, torch.Tensor) and not part.is_floating_point()]
    assert len(parts) == 1, [part.dtype for part in out]
    return parts[0].view(-1, config.num_experts_per_tok)


def pair_of(models, family, way="plain", **settings):
    target, head = models(family)
    shape = dict(WAYS[way])
    return Pair(target, shape.pop("draft", head), **{**SETTINGS, **shape, **settings})


def ordered(rows):
    return [[sorted(layer) for layer in row] for row in rows]


@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "local"])
@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=[] if (family, way) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for way in WAYS
    ],
)
def test_experts_are_those_of_transformers(models, expected, family, way, is_local):
    pair = pair_of(models, family, way)
    kept, half = Kept(pair), random_ids(20, seed=1)
    prompts = [half + half[:11], random_ids(5, seed=2), random_ids(41, seed=3)]
    for number, prompt in enumerate(prompts):
        pair.send(name(number), prompt, max_new_tokens=NEW_TOKENS, routed_experts=0, is_local=is_local)
    pair.send(name(9), prompts[0], max_new_tokens=NEW_TOKENS, is_local=is_local)
    pair.run(random.Random(3), turns=2000)
    for number, prompt in enumerate(prompts):
        tokens, rows = expected(family, prompt)
        assert pair.tokens[name(number)] == tokens
        assert ordered(kept.rows[name(number)]) == rows
    assert name(9) not in kept.rows, "nobody gets experts who does not ask"
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "local"])
def test_rows_before_the_first_wanted_one_may_come_from_the_cache(models, expected, is_local):
    pair, prompt = pair_of(models, "qwen3_moe", "chain"), random_ids(41, seed=3)
    kept, (tokens, rows) = Kept(pair), expected("qwen3_moe", prompt)
    for number, (first, cached) in enumerate(((0, 0), (0, 0), (26, 24), (41, 40), (-1, 40))):
        kept.first = first
        pair.send(name(number), prompt, max_new_tokens=NEW_TOKENS, routed_experts=first, is_local=is_local)
        pair.run()
        assert pair.tokens[name(number)] == tokens
        assert ordered(kept.rows.get(name(number), [])) == (rows[first:] if first >= 0 else [])
        timeline = pair.ends[name(number)].prefill if is_local else kept.timelines[name(number)]
        assert timeline.cached_tokens == cached, "rows that are wanted are computed"
    pair.assert_nothing_is_held()


def test_choices_of_tokens_do_not_depend_on_who_asks(models):
    """The last layer of a prompt's rows is computed where experts are kept, and skipped elsewhere."""
    prompt, found = random_ids(50, seed=4), []
    for is_kept in (False, True):
        pair = pair_of(models, "mixtral", "chain", return_routed_experts=is_kept)
        pair.send(name(0), prompt, max_new_tokens=NEW_TOKENS, temperature=0.9, seed=5)
        pair.run()
        found.append(pair.tokens[name(0)])
    assert found[0] == found[1]


def one_row_late(monkeypatch):
    rows = KeptExperts.rows
    monkeypatch.setattr(KeptExperts, "rows", lambda self, count: rows(self, count).roll(1, 0))


def one_layer_late(monkeypatch):
    put = KeptExperts.put
    monkeypatch.setattr(KeptExperts, "put", lambda self, place, ids: put(self, place * (place > 1), ids))


def rejected_drafts_too(monkeypatch):
    """The rows of a step from its last one on, among them those of rejected drafts."""
    of = AsyncDecoder._experts_of

    def late(self, request, packed, count, num_path):
        words = self.steps.step.expert_words
        if words:
            kept = packed[len(packed) - num_path * words :].reshape(num_path, words)
            kept[:] = kept[::-1].copy()
        return of(self, request, packed, count, num_path)

    monkeypatch.setattr(AsyncDecoder, "_experts_of", late)


@pytest.mark.parametrize("plant", [one_row_late, one_layer_late, rejected_drafts_too])
def test_each_planted_bug_is_found(models, expected, plant, monkeypatch):
    plant(monkeypatch)
    pair, prompt = pair_of(models, "qwen3_moe", "chain"), random_ids(31, seed=3)
    kept, (tokens, rows) = Kept(pair), expected("qwen3_moe", prompt)
    pair.send(name(0), prompt, max_new_tokens=NEW_TOKENS, routed_experts=0)
    pair.run()
    assert pair.tokens[name(0)] == tokens, "what is kept changes no token"
    assert ordered(kept.rows[name(0)]) != rows


def test_rows_that_are_asked_for_are_not_pulled(models, expected):
    """Prefill computes what a decode worker holds, as far as experts of these rows are asked for."""
    target, _ = models("qwen3_moe")
    pair = PullPair(target, no_draft=True, **SETTINGS)
    prompt = random_ids(41, seed=3)
    kept, (tokens, rows) = Kept(pair), expected("qwen3_moe", prompt)
    pair.send(name(0), prompt, max_new_tokens=NEW_TOKENS)
    pair.run()
    pair.prefill.engine.cache.clear()
    for number, (first, pulled) in enumerate(((0, 0), (40, 40)), 1):
        kept.first = first
        pull = pair.pull(prompt)
        pair.send(name(number), prompt, max_new_tokens=NEW_TOKENS, routed_experts=first, pull=pull)
        pair.run()
        assert pair.tokens[name(number)] == tokens
        assert ordered(kept.rows[name(number)]) == rows[first:]
        assert pair.counter("pulled_tokens") == pulled
        pair.prefill.engine.cache.clear()
    pair.end_leases()
    pair.assert_nothing_is_held()


def test_a_worker_that_keeps_none_refuses_in_one_line(models):
    pair = pair_of(models, "qwen3_moe", return_routed_experts=False)
    pair.send(name(0), random_ids(5), routed_experts=0)
    reasons = [m.reason for m in pair.links[P].to_router + pair.links[D].to_router if isinstance(m, Refused)]
    assert set(reasons) == {"this worker keeps no experts of tokens: start it with --return-routed-experts"}


def test_a_model_without_experts_and_a_late_start_are_refused(models):
    with pytest.raises(CheckpointError, match="this model has no experts"):
        engine_of({"model": str(models("llama")[0]), "return_routed_experts": True}, has_drafter=False)
    engine = ToyEngine(models("qwen3_moe")[0])
    with pytest.raises(LifecycleError, match="not from CAPTURED"):
        keep_experts(engine.model, 64, Phase.CAPTURED)


def test_a_forward_that_is_larger_than_graphs_has_room_of_its_own(models):
    engine = ToyEngine(models("qwen3_moe")[0])
    routed = engine.runner.routed_experts = keep_experts(engine.model, 16, Phase.LOADED)
    found = {}
    for count in (16, 17):
        batch = engine.batch((f"{count}", random_ids(17, seed=1)[:count]))
        batch.wants_experts = True
        found[count] = engine.runner.forward(batch).experts
    assert [len(rows) for rows in found.values()] == [16, 17]
    assert torch.equal(found[16], found[17][:16])
    routed.begin(3)
    with pytest.raises(LifecycleError, match="experts of 17 rows are kept, 16 at most"):
        routed.put(0, torch.zeros(17, 3, dtype=torch.int32))
