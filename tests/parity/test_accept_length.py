"""The accept lengths of the shipped heads over chats (float32, greedy) are the same on every path."""

from dataclasses import replace

import pytest
import torch
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.batch.forward_batch import CaptureHidden
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafting.shape import DraftShape
from baton.engine.speculative.step.async_decoder import AsyncDecoder
from baton.engine.speculative.step.step_graphs import step_graphs
from baton.tests.parity.fresh_chats import FRESH_CHATS
from baton.tests.parity.prompts import CHATS
from baton.tests.parity.test_cluster_tokens import assert_same
from baton.tests.sim.worker_pair import Pair, name

pytestmark = pytest.mark.smollm2

NUM_TOKENS = 128
CHAIN, LONG_CHAIN = DraftShape.of(3), DraftShape.of(5)
# What each keeps more than the chain's 2.46: 0.38, 0.61 and 1.06 in float32 on a CPU.
TREES = {DraftShape.of(3, 2, 8): 0.3, DraftShape.of(3, 4, 13): 0.5, DraftShape.of(4, 4, 24): 0.9}


def load(model, draft):
    config = EngineConfig(model=str(model), draft=str(draft), device="cpu", dtype="float32", kv_memory_mb=512)
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return loader.engine()


def answer(engine, prompts, shift=0, shape=CHAIN, num_tokens=NUM_TOKENS):
    """(accept length, outputs) of all prompts in one batch; `shift` moves the captured layers."""
    engine.model.aux_layer_ids = tuple(layer + shift for layer in engine.feature_ids)
    steps = engine.steps
    if shape != engine.shape:
        steps = step_graphs(
            engine.runner,
            engine.drafter,
            shapes=[shape],
            max_requests=len(prompts),
            max_context=engine.max_context,
        )
    eos_ids = engine.model_config.eos_token_ids
    decoder = AsyncDecoder(steps, shape=shape, eos_token_ids=eos_ids, launches_ahead=False)
    requests = [prefill(engine, decoder, ids, num_tokens) for ids in prompts]
    committed = verifies = 0
    while running := [request for request in requests if not request.is_finished]:
        result = decoder.step(running)
        committed += sum(map(len, result.tokens))
        verifies += len(running)
    for request in requests:
        decoder.forget(request)
        engine.cache.allocator.release(request.pages)
    return committed / verifies, [request.output_ids for request in requests]


def prefill(engine, decoder, ids, num_tokens):
    params = SamplingParams(temperature=0.0, max_new_tokens=num_tokens)
    request = Request(room="0" * 32, epoch=0, prompt_ids=ids, sampling=params)
    request.pages = engine.cache.alloc(
        -(-(len(ids) + num_tokens + decoder.shape.spare_slots) // engine.page_size)
    )
    batch = extend_batch(
        [(request, 0, len(ids))],
        page_size=engine.page_size,
        device=torch.device("cpu"),
        capture=CaptureHidden.FULL,
    )
    output = engine.runner.forward(batch)
    request.num_computed = len(ids)
    request.append([int(output.logits.argmax())], engine.model_config.eos_token_ids)
    if not request.is_finished:
        decoder.draft_prefill(request, output.hidden, 0)
    return request


class LargePair(Pair):
    """Whose pages are too many to be looked at in every turn."""

    def _poison(self, engine):
        pass


def handed_over(pair, prompts, num_tokens, count):
    """`answer` by way of prefill's worker, the wire and decode's worker, `count` prompts at a time."""
    decoder, batches = pair.decode.decoder, []
    step = decoder.step
    decoder.step = lambda requests: batches.append(len(requests)) or step(requests)
    for i, ids in enumerate(prompts):
        pair.send(name(i), ids, max_new_tokens=num_tokens, ignore_eos=False)
        if (i + 1) % count == 0 or i + 1 == len(prompts):
            pair.run(turns=100_000)
    pair.assert_nothing_is_held()
    outputs = [pair.tokens[name(i)] for i in range(len(prompts))]
    return sum(len(output) - 1 for output in outputs) / sum(batches), outputs


@pytest.fixture
def head(request, eagle3_dir, mtp_dir):
    return {"eagle3": eagle3_dir, "mtp": mtp_dir}[request.param]


ALL = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("head", "chats", "num_tokens"),
    [
        ("eagle3", slice(0, 10, 5), 18),
        pytest.param("eagle3", slice(None), NUM_TOKENS, marks=ALL),
        pytest.param("mtp", slice(0, 10, 5), 18, marks=ALL),
        pytest.param("mtp", slice(None), NUM_TOKENS, marks=ALL),
    ],
    ids=["the beginnings of two chats", "all chats", "mtp, the beginnings of two chats", "mtp, all chats"],
    indirect=["head"],
)
def test_graphs_and_hand_off_keep_accept_length_and_reference_tokens(
    smollm2_dir, head, smollm2_tokenizer, reference_greedy, record_property, chats, num_tokens
):
    prompts = [prompt.token_ids(smollm2_tokenizer) for prompt in CHATS[chats]]
    needed = [len(ids) + num_tokens + CHAIN.spare_slots for ids in prompts]
    count = min(len(prompts), 4)
    pair = LargePair(
        smollm2_dir, head, page_size=16, pages=sum(-(-tokens // 16) for tokens in needed),
        max_context=max(needed), chunk_size=32, max_running=count, captured={"chunk_size": 32,
        "max_running": count},
        graphs="on", graph_self_test=False,
    )  # fmt: skip
    engine, found = pair.decode.engine, {}

    def answer_in_turns():
        parts = [
            answer(engine, prompts[i : i + count], num_tokens=num_tokens)
            for i in range(0, len(prompts), count)
        ]
        outputs = [output for _, some in parts for output in some]
        num_steps = sum((sum(map(len, some)) - len(some)) / length for length, some in parts)
        return (sum(map(len, outputs)) - len(outputs)) / num_steps, outputs

    found["graphs"] = answer_in_turns()
    counters = engine.graph_counters
    assert all(counters[f"graph_replays_{kind}"] > 0 for kind in ("decode_step", "draft_prefill")), counters
    found["handed over"] = handed_over(pair, prompts, num_tokens, count)
    assert pair.prefill.stats().counters["graph_replays_target_prefill"] > 0
    engine.drafter.graphs, engine.steps.families = None, {}
    engine.steps._covered.clear()
    found["eager"] = length, _ = answer_in_turns()
    num_tokens_of = {how: [len(output) for output in outputs] for how, (_, outputs) in found.items()}
    assert num_tokens_of["graphs"] == num_tokens_of["handed over"] == num_tokens_of["eager"]
    for how, (value, outputs) in found.items():
        record_property(f"accept_length_{how}", round(value, 3))
        print(f"accept length over {len(prompts)} chats, {how}: {value:.3f}")
        assert abs(value - length) <= 0.01 * length
        for prompt, output in zip(CHATS[chats], outputs, strict=True):
            reference = reference_greedy[prompt.name]
            compared = min(len(output), len(reference.output_ids))
            assert_same(replace(reference, output_ids=reference.output_ids[:compared]), output[:compared])
    assert length > 1.3


@pytest.mark.parametrize(
    ("head", "shift", "every", "num_tokens", "least"),
    [
        ("eagle3", -3, 4, 40, 2.3),
        pytest.param("eagle3", 1, 1, NUM_TOKENS, 2.5, marks=pytest.mark.slow),
        pytest.param("mtp", -1, 1, NUM_TOKENS, 2.25, marks=pytest.mark.slow),
    ],
    ids=["the beginnings of some fresh chats", "fresh chats", "mtp, fresh chats"],
    indirect=["head"],
)
def test_the_head_reaches_its_accept_length_and_shifted_layers_do_not(
    smollm2_dir, head, smollm2_tokenizer, record_property, shift, every, num_tokens, least
):
    """Chats that no training prompt resembles, up to the end of each answer."""
    engine = load(smollm2_dir, head)
    prompts = [prompt.token_ids(smollm2_tokenizer) for prompt in FRESH_CHATS[::every]]
    assert len(prompts) == -(-20 // every)
    length, outputs = {}, {}
    for layers in (0, shift):
        length[layers], outputs[layers] = answer(engine, prompts, layers, LONG_CHAIN, num_tokens)
        record_property(f"accept_length_shift_{layers}", round(length[layers], 3))
    right, wrong = length.values()
    print(f"accept length over {len(prompts)} chats: {right:.3f}; layers shifted by {shift}: {wrong:.3f}")
    assert outputs[0] == outputs[shift], "a worse draft never changes an answer"
    assert right > least > wrong, "features of the wrong layers are worth visibly less"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_tree_keeps_more_of_the_heads_drafts_than_a_chain(
    smollm2_dir, eagle3_dir, smollm2_tokenizer, record_property
):
    engine = load(smollm2_dir, eagle3_dir)
    prompts = [prompt.token_ids(smollm2_tokenizer) for prompt in CHATS]
    length, outputs = {}, {}
    for shape in (CHAIN, *TREES):
        length[shape], outputs[shape] = answer(engine, prompts, shape=shape)
        record_property(
            f"accept_length_{shape.steps}_{shape.topk}_{shape.num_nodes}", round(length[shape], 3)
        )
        print(f"accept length over 20 chats, {shape}: {length[shape]:.3f}")
    assert all(outputs[shape] == outputs[CHAIN] for shape in TREES), "drafts never change an answer"
    for (shape, gain), before in zip(TREES.items(), (CHAIN, *TREES), strict=False):
        assert length[shape] > length[before], "more nodes, more matches"
        assert length[shape] > length[CHAIN] + gain, shape
