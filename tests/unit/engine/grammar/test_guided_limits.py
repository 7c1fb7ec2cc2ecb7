"""Limits of llguidance that requests of one grammar reach together or alone."""

import random

import numpy as np
import pytest
from baton.engine.grammar import grammar_compile_pool, guided
from baton.engine.grammar.guided import GrammarCompiler
from baton.tests.sim.test_guided import EOS, LETTERS, save_letters
from llguidance import LLMatcher

VOCAB = 64
WORDS = LLMatcher.grammar_from_regex(r"((\w{1,20} ){0,20}\. ?){0,20}")
DEEP = LLMatcher.grammar_from_regex("(((a{0,100}){0,100}){0,100}){0,100}")
A = 3 + LETTERS.index("a")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(guided, "MAX_STATES", 500)  # three requests of WORDS
    save_letters(tmp_path, VOCAB)
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", VOCAB, [EOS])
    compiler.load()
    return compiler


def guide_of(compiler, grammar):
    guide = compiler.guide(grammar)
    while not guide.is_ready:
        assert not guide.fault
    return guide


def allowed(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(guide, rng, num_tokens):
    """Chosen tokens, and the mask before each."""
    chosen, masks = [], []
    for _ in range(num_tokens):
        (mask,) = guide.masks(chosen, [()])
        assert guide.fault == ""
        masks.append(mask)
        chosen.append(rng.choice([token for token in allowed(mask) if token != EOS]))
    return chosen, masks


def test_requests_of_a_grammar_do_not_use_up_one_anothers_states(compiler):
    rng, first = random.Random(5), guide_of(compiler, WORDS)
    early = walk(first, rng, 20)[0]
    compilations = set()
    for _ in range(40):
        guide = guide_of(compiler, WORDS)
        chosen, masks = walk(guide, rng, 100)
        compilations.add(id(guide._compilation))
        alone = compiler._compile(WORDS)
        for token, mask in zip(chosen, masks, strict=True):
            words = np.frombuffer(alone.compute_bitmask(), dtype=np.int32)[: mask.size]
            assert allowed(mask) == allowed(words)
            assert alone.consume_token(token)
    assert len(compilations) > 1, "the states of one compilation were never used up"
    assert allowed(first.masks(early, [()])[0]), "a request from before"
    assert first.fault == ""


def test_a_request_that_reaches_a_limit_alone_fails_and_harms_no_other(compiler):
    for _ in range(2):
        greedy, chosen = guide_of(compiler, DEEP), []
        while not greedy.fault:
            masks = greedy.masks(chosen, [()])
            assert bool(masks.any()) == (greedy.fault == "")
            chosen.append(A)
            assert len(chosen) < 500
        assert "the grammar cannot be followed: lexer error" in greedy.fault
        assert not greedy.is_fault_ours
        assert not greedy.masks(chosen, [(), (A,)]).any(), "nothing is allowed any more"
        modest = guide_of(compiler, DEEP)
        for num in range(4):
            assert A in allowed(modest.masks([A] * num, [()])[0])


def test_a_limit_behind_drafts_allows_no_token_there(compiler):
    guide, drafts = guide_of(compiler, DEEP), [A] * 400
    branches = [tuple(drafts[:num]) for num in range(len(drafts))]
    assert not guide.masks([], branches).any()
    assert guide.fault


def test_a_costly_grammar_is_compiled_by_the_pool_for_the_next_request(compiler, monkeypatch):
    monkeypatch.setattr(grammar_compile_pool, "RENEWED_S", 0.0)
    guide, chosen = guide_of(compiler, DEEP), []
    while not guide.fault:
        guide.masks(chosen, [()])
        chosen.append(A)
    assert guide.is_fault_ours
    assert A in allowed(guide_of(compiler, DEEP).masks([], [()])[0])
