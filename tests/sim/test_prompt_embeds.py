"""Prompts that are embeddings: the tokens, and the drafts, of the ids that the embeddings stand for."""

import pytest
import torch
from baton.cluster.protocol.messages import Cancel, Failed, Refused, Reserve, Sampling
from baton.decode.queues import DecodeState
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.prefill.queues import PrefillState
from baton.tests.embeds import embeddings_of
from baton.tests.parity.dflash_toys import dflash_config, dflash_tensors, write_dflash
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head, write_oracle
from baton.tests.parity.mtp_laws import write_kinds
from baton.tests.sim.worker_pair import D, P, Pair, name
from baton.worker.prompt_embeds import OFF
from msgspec.structs import replace

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [40, 7, 9, 11, 3, 21, 22, 5, 17, 30, 31, 2, 6, 8, 13, 50, 51, 4, 1]
OTHER = [*PROMPT[:-1], 2]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return write_oracle(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module", params=["handed over", "local"])
def pair(request, oracle):
    """One for all tests of this file, which name other rooms each; chunks of 16 tokens."""
    pair = Pair(*oracle, pages=96, overlap="on", chunk_size=16)
    pair.decode.local.budget = pair.decode.local.budget_alone = 16
    pair.is_local = request.param == "local"
    return pair


def embedded(pair, ids):
    """The embeddings that the target itself gives these ids."""
    return embeddings_of(pair.prefill.engine.runner.model.embed(torch.tensor(ids)))


def begin(pair, ids, *, as_embeds, **more):
    """The name of a new room for these ids."""
    room = name(1000 + len(pair.tokens) + len(pair.ends) + pair.prefill.num_rooms + pair.decode.num_rooms)
    assert room not in pair.tokens
    given = embedded(pair, ids) if as_embeds else None
    more = {"is_local": getattr(pair, "is_local", False)} | more
    pair.send(room, [0] * len(ids) if as_embeds else ids, embeds=given, **more)
    return room


def said(pair, ids, **more):
    """(tokens of one request alone, its verify steps, drafts, accepted drafts)"""
    room = begin(pair, ids, **more)
    pair.run()
    timeline = pair.ends[room].timeline
    accounts = timeline.verify_steps, timeline.drafted_tokens, timeline.accepted_tokens
    return pair.tokens[room], accounts


def test_embeddings_of_ids_give_the_tokens_and_the_drafts_of_the_ids(pair):
    worker = pair.decode if pair.is_local else pair.prefill
    before = worker.stats().counters["embedded_tokens"]
    asked = PROMPT, [4], [*PROMPT, *OTHER]
    for ids in asked:
        wanted = said(pair, ids, as_embeds=False)
        assert said(pair, ids, as_embeds=True) == wanted
        assert wanted[1][2] > 6, "drafts are accepted"
    assert worker.stats().counters["embedded_tokens"] - before == sum(map(len, asked))
    pair.assert_nothing_is_held()


def test_tokens_are_those_of_another_forward_over_the_embeddings(toy_checkpoint):
    transformers = pytest.importorskip("transformers")
    target = toy_checkpoint("llama", num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    width = model.config.hidden_size
    rows = torch.randn(17, width, generator=torch.Generator().manual_seed(3)) * 0.5
    wanted = model.generate(
        inputs_embeds=rows[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    pair = Pair(target, pages=96, chunk_size=5)
    for number, is_local in enumerate((False, True)):
        pair.send(name(number), [0] * 17, embeds=embeddings_of(rows), is_local=is_local)
    pair.run()
    assert pair.tokens == {name(0): wanted, name(1): wanted}


@pytest.mark.slow
def test_graphs_of_both_prefills_leave_embeddings_to_the_eager_path(oracle):
    pair = Pair(*oracle, pages=96, chunk_size=8, graphs="on", captured={"chunk_size": 8, "max_running": 4})
    wanted = said(pair, PROMPT, as_embeds=False)
    assert said(pair, PROMPT, as_embeds=True) == wanted
    fallbacks = "graph_fallback_target_prefill_caller_embeds", "graph_fallback_draft_prefill_caller_embeds"
    assert pair.prefill.stats().counters[fallbacks[0]] == 3
    assert pair.decode.stats().counters[fallbacks[1]] > 0


@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "local"])
def test_draft_rows_of_embeddings_are_those_of_the_ids(toy_checkpoint, tmp_path, is_local):
    """Of a head that sees all of them, unlike the oracle's."""
    target = toy_checkpoint("llama", num_hidden_layers=4)
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 3)), head_tensors())
    pair = Pair(target, head, pages=96, chunk_size=16)
    pair.decode.local.budget = pair.decode.local.budget_alone = 16
    rooms = [begin(pair, PROMPT, as_embeds=as_embeds, is_local=is_local) for as_embeds in (False, True)]
    pair.run(until=lambda: pair.decode.queues.count(DecodeState.RUNNING) == 2)
    pages = [room.request.pages for room in pair.decode.queues]
    size, kv = pair.decode.engine.page_size, pair.decode.engine.drafter.pool.kv
    whole = len(PROMPT) // size
    wanted, found = (kv[held[:whole]] for held in pages)
    assert wanted.isfinite().all()
    assert wanted.abs().sum() > 0
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    pair.run()
    assert pair.tokens[rooms[0]] == pair.tokens[rooms[1]]


def lookup(target, directory):
    return "ngram"


def dflash(target, directory):
    return write_dflash(directory, dflash_config(), dflash_tensors())


def mtp(target, directory):
    return write_kinds(directory, target)["chained"]


@pytest.mark.parametrize("draft", [lookup, dflash, mtp])
def test_other_drafters_change_no_token_behind_embeddings(toy_checkpoint, tmp_path, draft):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    plain, pair = Pair(target, pages=96), Pair(target, draft(target, tmp_path / "draft"), pages=96)
    for ids in (PROMPT, [4]):
        wanted = said(plain, ids, as_embeds=False)[0]
        assert said(pair, ids, as_embeds=True, is_local=False)[0] == wanted
        assert said(pair, ids, as_embeds=True, is_local=True)[0] == wanted
    pair.assert_nothing_is_held()


def test_prompts_of_ids_and_of_embeddings_share_a_forward_and_no_page(pair):
    """The order of an embedded prompt has the ids of a prompt of zeros."""
    zeros, asked = [0] * len(PROMPT), []
    wanted = [said(pair, ids, as_embeds=False)[0] for ids in (PROMPT, OTHER, zeros)]
    for worker in (pair.prefill, pair.decode):
        worker.engine.cache.clear()
    for _ in range(2):  # the second time behind what the first left in the caches
        counters = pair.prefill.stats().counters if not pair.is_local else pair.decode.stats().counters
        rooms = [begin(pair, ids, as_embeds=ids is not zeros) for ids in (PROMPT, OTHER, zeros)]
        pair.run()
        assert [pair.tokens[room] for room in rooms] == wanted
        asked.append(counters)
    key = "have_tokens" if pair.is_local else "cached_tokens"
    final = (pair.decode if pair.is_local else pair.prefill).stats().counters[key]
    whole_pages = (len(PROMPT) - 1) // 4 * 4
    assert asked[1][key] == asked[0][key], "no prompt found a page of another"
    assert final == asked[1][key] + 3 * whole_pages, "each found its own"
    pair.assert_nothing_is_held()


def test_a_later_attempt_goes_on_behind_embeddings_and_output(pair):
    whole, _ = said(pair, PROMPT, as_embeds=True, max_new_tokens=12)
    given, room = embedded(pair, PROMPT), name(1)
    more = {"embeds": given, "is_local": pair.is_local, "max_new_tokens": 7}
    pair.send(room, [0] * len(PROMPT) + whole[:5], num_output=5, **more)
    pair.run()
    assert pair.tokens[room] == whole[5:]


def test_penalties_count_no_id_of_an_embedding(pair):
    request = Request(
        room="",
        epoch=0,
        prompt_ids=[0, 0, 0, 7, 8],
        sampling=SamplingParams(),
        num_prior_output=1,
        num_embeds=3,
    )
    assert request.asked_and_chosen == ([7], [8])
    logits = {"logit_bias": {0: 30.0}, "max_new_tokens": 3}
    wanted = said(pair, PROMPT, as_embeds=True, **logits)[0]
    assert wanted[0] == 0
    fine = {"repetition_penalty": 100.0} | logits
    assert said(pair, PROMPT, as_embeds=True, **fine)[0][0] == 0


@pytest.mark.parametrize("lost", ["all", "the first part", "the second part"])
def test_an_order_without_its_rows_is_refused_for_now(pair, lost):
    given, room = embedded(pair, PROMPT), name(2 + len(lost))
    where = {} if pair.is_local else {"prefill_endpoint": "fake://p", "prefill_instance": P}
    order = Reserve(
        room=room,
        epoch=0,
        instance=D,
        prompt_ids=[0] * len(PROMPT),
        sampling=Sampling(),
        deadline_ms=0,
        embeds=given.rows,
        **where,
    )
    (part,) = given.parts_before(order)
    half = 8 * given.width * 4
    parts = [
        replace(part, data=part.data[:half]),
        replace(part, start=8, data=part.data[half:]),
    ]
    kept = {"all": [], "the first part": parts[1:], "the second part": parts[:1]}[lost]
    for each in kept:
        pair.decode.handle(each, pair.clock.now)
    pair.decode.handle(order, pair.clock.now)
    (refused,) = pair.links[D].to_router
    assert isinstance(refused, Refused)
    assert refused.retry_after_ms > 0
    assert f"of {len(PROMPT)} prompt embeddings are here" in refused.reason
    assert pair.decode.embeds.num_bytes == 0
    pair.links[D].to_router.clear()


@pytest.mark.parametrize("kind", ["width", "overflow", "off"])
def test_embeddings_that_do_not_fit_are_refused_for_good(pair, kind):
    inbox = pair.decode.embeds
    rows = torch.full((5, inbox.width + (kind == "width")), 3e38 if kind == "overflow" else 1.0)
    given, room = embeddings_of(rows), name(90 + len(kind))
    try:
        inbox.dtype = torch.float16 if kind == "overflow" else inbox.dtype
        inbox.fault = OFF if kind == "off" else ""
        pair.send(room, [0] * 5, embeds=given, is_local=True)
    finally:
        inbox.dtype, inbox.fault = torch.float32, ""
    (refused,) = pair.links[D].to_router
    said = {
        "width": f"rows of {inbox.width + 1} elements",
        "overflow": "not finite in torch.float16",
        "off": OFF,
    }[kind]
    assert (refused.retry_after_ms, said in refused.reason) == (0, True)
    pair.links[D].to_router.clear()


def test_rows_are_dropped_as_soon_as_nothing_reads_them(pair):
    begin(pair, PROMPT, as_embeds=True, max_new_tokens=40)
    begin(pair, OTHER, as_embeds=True, max_new_tokens=40)
    for worker, state in ((pair.prefill, PrefillState.HANDED), (pair.decode, DecodeState.RUNNING)):
        if worker is pair.decode or not pair.is_local:
            pair.run(until=lambda worker=worker, state=state: worker.queues.of(state))
            requests = [room.request for room in worker.queues.of(state)]
            assert all(each.embeds is None and each.num_embeds == len(PROMPT) for each in requests)
    pair.run()
    assert pair.prefill.embeds.num_bytes == pair.decode.embeds.num_bytes == 0


def test_rows_of_a_cancelled_or_ownerless_prompt_are_dropped(pair):
    given, inbox = embedded(pair, PROMPT), pair.decode.embeds
    order = Reserve(room=name(7), epoch=3, instance=D, prompt_ids=[], sampling=Sampling(), deadline_ms=0)
    for end in ("cancel", "router lost"):
        for part in given.parts_before(order):
            pair.decode.handle(part, pair.clock.now)
        assert inbox.num_bytes == len(given.data)
        if end == "cancel":
            pair.decode.handle(Cancel(room=name(7), epoch=2, instance=D), pair.clock.now)
            assert inbox.num_bytes == len(given.data), "of a later attempt"
            pair.decode.handle(Cancel(room=name(7), epoch=3, instance=D), pair.clock.now)
        else:
            pair.decode.drop_rooms(frozenset(), "lost")
        assert inbox.num_bytes == 0
        order = replace(order, epoch=4)
    pair.links[D].to_router.clear()


def test_logits_that_are_not_finite_are_the_fault_of_embeddings(pair):
    model = (pair.decode if pair.is_local else pair.prefill).engine.runner.model
    weight = model.norm.weight.clone()
    model.norm.weight.fill_(float("nan"))
    room = begin(pair, PROMPT, as_embeds=True)
    pair.run()
    model.norm.weight.copy_(weight)
    assert isinstance(pair.ends[room], Failed)
    assert (pair.ends[room].kind, pair.ends[room].retryable) == ("BadEmbeds", False)
