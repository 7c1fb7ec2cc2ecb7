"""Output under a grammar: every answer follows it, with and without drafts, on every path of the hand-off."""

import itertools
import json
import string
import threading
import time

import jsonschema
import pytest
from baton.cluster.protocol.messages import Failed
from baton.engine.grammar import grammar_compile_pool, guided
from baton.engine.grammar.guided import GrammarCompiler
from baton.router.text.tokenizer import load_tokenizer
from baton.tests.parity.eagle3_toys import write_oracle
from baton.tests.parity.json_schemas import grammar_of, schemas
from baton.tests.sim.worker_pair import Pair, name
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 2
SAMPLED = {"temperature": 1.0, "ignore_eos": False, "max_new_tokens": 700}
SHORT = {"type": "integer"}
PATIENCE_S = 30.0
BAD = '{"grammars": [{"json_schema": {"type": "banana"}}]}'
LETTERS = string.ascii_lowercase + string.digits + '{}[]":,-._ \\'


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy_checkpoint):
    """(target, drafter that is right about it and knows no grammar), and the same target without the drafter.

    The target's tokens are single characters, and what it says next depends on the last one only.
    """
    target, draft = write_oracle(tmp_path_factory.mktemp("oracle"))
    config = json.loads((target / "config.json").read_text()) | {
        "max_position_embeddings": 1024,
        "eos_token_id": EOS,
    }
    (target / "config.json").write_text(json.dumps(config))
    save_letters(target, config["vocab_size"])
    return {True: (target, draft), False: (target, "")}


def save_letters(directory, vocab_size):
    """A tokenizer of one token per character, as a byte-level one has it, behind its special tokens."""
    pieces = ["<pad>", "<s>", "</s>", *LETTERS.replace(" ", "Ġ")]
    backend = Backend(tokenizer_models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(pieces[:3])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(directory)
    assert len(pieces) <= vocab_size


def pair_of(models, drafts, **settings):
    target, draft = models[drafts]
    return GuidedPair(target, draft, **{"pages": 1800, "max_running": 16, "max_context": 800, **settings})


class GuidedPair(Pair):
    max_rounds = 4000

    def __init__(self, target, draft, **settings):
        super().__init__(target, draft, **settings)
        self.numbers = itertools.count()

    def answer(self, jobs, **more):
        """[(grammar, seed)] -> token ids of each answer."""
        rooms = [name(next(self.numbers)) for _ in jobs]
        for room, (grammar, seed) in zip(rooms, jobs, strict=True):
            self.send(room, [5, 6, 7, 8, 9, 10], grammar=grammar, seed=seed, **(SAMPLED | more))
        self.run(turns=self.max_rounds)
        self.rooms = rooms
        return [self.tokens.get(room, []) for room in rooms]


def text_of(models, ids):
    assert ids[-1] == EOS, "it ended by itself"
    return load_tokenizer(str(models[False][0])).decode(ids[:-1])


def check_schemas(models, drafts, count, seed=0, *, poison=True):
    asked = schemas(count, seed)
    pair = pair_of(models, drafts)
    if not poison:  # of which the other tests see enough, and which takes most of the time
        pair._poison = lambda engine: None
    for at in range(0, count, 8):
        part = asked[at : at + 8]
        answers = pair.answer([(grammar_of(schema), at + i) for i, schema in enumerate(part)])
        for schema, ids in zip(part, answers, strict=True):
            jsonschema.validate(json.loads(text_of(models, ids)), schema)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("drafts", [False, True], ids=["no drafts", "drafts"])
def test_every_answer_validates(models, drafts):
    check_schemas(models, drafts, 8)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True], ids=["no drafts", "drafts"])
def test_every_answer_of_200_schemas_validates(models, drafts):
    check_schemas(models, drafts, 200, seed=7, poison=False)


def test_drafts_that_the_grammar_allows_are_kept(models):
    pair = pair_of(models, True)
    (ids,) = pair.answer(
        [(grammar_of({"type": "string", "minLength": 30, "maxLength": 40}), 1)], temperature=0.0
    )
    assert 30 <= len(json.loads(text_of(models, ids))) <= 40
    assert pair.decode.stats().accept_length > 2.0


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_drafts_and_where_the_prompt_is_computed_change_no_token(models, temperature):
    jobs = [(grammar_of(schema), 3) for schema in schemas(2, seed=5)]
    places = ((False, "off"), (True, "off"), (True, "on"))  # on decode or not, launched ahead or not
    ways = [(drafts, *place) for drafts in (False, True) for place in places]
    answers = [
        pair_of(models, drafts, pages=400, overlap=overlap).answer(
            jobs, is_local=is_local, temperature=temperature
        )
        for drafts, is_local, overlap in ways
    ]
    assert answers[1:] == answers[:1] * (len(ways) - 1)


def test_masks_are_filled_in_a_break_of_the_step_beside_other_requests(models):
    """Requests with a grammar wait for the host, by a reason that is counted; while there is none, steps run
    ahead."""
    jobs = [(grammar_of(schema), 3) for schema in schemas(2, seed=5)]
    expected = pair_of(models, False, pages=400).answer(jobs)
    settings = {"pages": 600, "max_running": 4, "overlap": "on", "graphs": "on", "graph_self_test": False}
    pair = pair_of(models, True, captured={"max_running": 4}, **settings)
    plain = name(next(pair.numbers))
    pair.send(plain, [5, 6, 7], frequency_penalty=0.5, logprobs=2, max_new_tokens=250)
    assert pair.answer(jobs) == expected
    counters = pair.decode.stats().counters
    assert counters["graph_replays_edited_step"] > 10
    assert counters["overlap_fallback_guided"] > 5
    assert counters["overlapped_steps"] > 5
    assert not any(key.startswith("graph_fallback") for key in counters), counters
    alone = pair_of(models, False, pages=400)
    alone.send(plain, [5, 6, 7], frequency_penalty=0.5, logprobs=2, max_new_tokens=250)
    alone.run(turns=alone.max_rounds)
    assert pair.tokens[plain] == alone.tokens[plain]


def test_a_resumed_request_continues_in_its_grammar(models):
    jobs = [(grammar_of(schema), 11) for schema in schemas(2, seed=9)]
    pair = pair_of(models, False, pages=400)
    whole = pair.answer(jobs)
    for (grammar, seed), ids in zip(jobs, whole, strict=True):
        for cut in {len(ids) // 2, len(ids) - 1} - {0}:
            room = name(next(pair.numbers))
            pair.send(
                room, [5, 6, 7, 8, 9, 10, *ids[:cut]], num_output=cut, grammar=grammar, seed=seed, **SAMPLED
            )
            pair.run(turns=pair.max_rounds)
            assert pair.tokens[room] == ids[cut:], cut


def test_a_grammar_that_cannot_be_followed_fails_its_request_and_no_other(models):
    pair = pair_of(models, False)
    good, bad = pair.answer([(grammar_of({"const": "fine"}), 1), (BAD, 1)])
    assert text_of(models, good) == '"fine"'
    assert bad == []
    failed = pair.ends[pair.rooms[1]]
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.retryable) == ("BadGrammar", False)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_a_grammar_at_its_limit_fails_its_request_as_the_client_s_fault(models, drafts):
    pair = pair_of(models, drafts)
    deep = LLMatcher.grammar_from_regex("(((a{2,100}){2,100}){2,100}){8,100}b")
    for _ in range(2):
        good, bad = pair.answer([(grammar_of({"const": "fine"}), 1), (deep, 1)])
        assert text_of(models, good) == '"fine"'
        assert len(bad) > 20
        assert set(bad) == {3 + LETTERS.index("a")}
        failed = pair.ends[pair.rooms[1]]
        assert isinstance(failed, Failed)
        assert (failed.kind, failed.retryable) == ("BadGrammar", False)
        assert "the grammar cannot be followed: lexer error" in failed.message
    pair.assert_nothing_is_held()


def test_a_grammar_that_takes_long_to_compile_takes_no_step_from_others(models, monkeypatch):
    goes_on, compiled = threading.Event(), guided.LLMatcher

    def slow(*arguments, **options):
        assert goes_on.wait(PATIENCE_S)
        return compiled(*arguments, **options)

    monkeypatch.setattr(guided, "LLMatcher", slow)
    pair = pair_of(models, False, pages=400)
    mate, room = name(next(pair.numbers)), name(next(pair.numbers))
    pair.send(mate, [5, 6, 7], is_local=True, max_new_tokens=700)
    pair.run(until=lambda: len(pair.tokens.get(mate, ())) > 1)
    pair.send(room, [5, 6, 7, 8], is_local=True, grammar=grammar_of(SHORT), **SAMPLED | {"max_new_tokens": 8})
    guide = next(one.request.guide for one in pair.decode.queues if one.request.guide is not None)
    before = len(pair.tokens[mate])
    pair.run(until=lambda: len(pair.tokens[mate]) > before + 5)
    assert not guide.is_ready
    goes_on.set()
    until(lambda: guide.is_ready)
    pair.run(until=lambda: room in pair.ends)
    assert pair.tokens[room]
    pair.cancel(mate)
    pair.run()
    pair.assert_nothing_is_held()


def test_a_grammar_that_compiles_too_long_fails_only_its_request(models, monkeypatch):
    """The processor time of compilations is the test's, and an endless one uses none of the host's."""
    bad, good, ended, used_s = name(1), name(2), threading.Event(), [0.0]
    compiled = guided.LLMatcher

    def endless(tokenizer, grammar, **options):
        if "endless" in grammar:
            ended.wait()
        return compiled(tokenizer, grammar, **options)

    def clock():
        began = iter([0.0])
        return lambda: next(began, used_s[0])

    monkeypatch.setattr(guided, "LLMatcher", endless)
    monkeypatch.setattr(grammar_compile_pool, "_clock_of_this_thread", clock)
    pair = pair_of(models, False)
    for worker in (pair.prefill, pair.decode):
        grammars = GrammarCompiler(models[False][0] / "tokenizer.json", 64, [EOS], max_cpu_s=0.2)
        grammars.load()
        worker.engine.grammars = grammars
    try:
        for room, text in ((bad, "endless"), (good, "fine")):
            pair.send(room, [5, 6, 7, 8], grammar=grammar_of({"const": text}), seed=1, **SAMPLED)
        until(lambda: pair.turn(None) or good in pair.ends)
        used_s[0] = 0.2
        for _ in range(100):
            pair.turn(None)
        assert bad not in pair.ends, "its time is not over"
        used_s[0] = 0.21
        until(lambda: pair.turn(None) or pair.is_idle)
    finally:
        ended.set()
    assert text_of(models, pair.tokens[good]) == '"fine"'
    assert not pair.tokens.get(bad)
    failed = pair.ends[bad]
    assert (failed.kind, failed.retryable) == ("BadGrammar", False)
    assert "more than 0.2 s" in failed.message
    pair.assert_nothing_is_held()


def test_the_tokenizer_of_grammars_is_read_before_anything_is_served(models, monkeypatch):
    """Since nothing else runs in its process meanwhile."""
    pair = pair_of(models, False)
    monkeypatch.setattr(guided, "load_tokenizer", None)
    (ids,) = pair.answer([(grammar_of({"const": "fine"}), 1)])
    assert text_of(models, ids) == '"fine"'


def until(predicate):
    end = time.monotonic() + PATIENCE_S
    while not predicate():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_masks_look_ahead_along_each_branch_and_come_back(models):
    compiler = GrammarCompiler(models[False][0] / "tokenizer.json", 64, [EOS, 1])
    compiler.load()
    guide = compiler.guide(grammar_of({"enum": ["ab", "ac"]}))
    a, b, c, quote = (compiler._tokenizer.tokenize_str(text)[0] for text in ("a", "b", "c", '"'))

    def allowed(mask):
        return {token for token in range(64) if mask[token // 32] >> (token % 32) & 1}

    until(lambda: guide.is_ready)
    ended = (quote, a, b, quote)
    branches = [(), (quote,), (quote, a), (quote, a, b), (quote, a, c), (a,), ended, (*ended, EOS)]
    for _ in range(2):
        masks = [allowed(mask) for mask in guide.masks([], branches)]
        assert quote in masks[0]
        assert a not in masks[0]
        assert {b, c} <= masks[2]
        assert quote in masks[3]
        assert quote in masks[4]
        assert masks[5] == masks[7] == set(range(64)), "nobody will ask"
        assert masks[6] == {EOS, 1}, "each of the model's end tokens"
    assert allowed(guide.masks([quote, a], [(b,)])[0]) == masks[3]
    assert not guide.masks([quote, a, a], [()]).any(), "lost: nothing may follow"
