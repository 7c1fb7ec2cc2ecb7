"""Grammars are compiled beside the steps in bounded time. Threads are real; the tests script the compiler."""

import itertools
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
from baton.engine.grammar.grammar_compile_pool import (
    MAX_GIVEN_UP,
    MAX_KEPT,
    NICE,
    NICEST,
    NUM_THREADS,
    Compilations,
)

PATIENCE_S = 30.0
LEAVES = """
from baton.engine.grammar.grammar_compile_pool import Compilations
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
schema = '{"allOf": [{"type": "integer", "multipleOf": 151}, {"type": "integer", "multipleOf": 157}]}'

def compiled(grammar):
    matcher = LLMatcher(tokenizer, grammar)
    print("compiled", flush=True)
    return matcher

compilations = Compilations(compiled)
asked = compilations.ask(LLMatcher.grammar_from_json_schema(schema))
"""
COST_S = 0.02


class Panic(BaseException):
    """As native code raises it, which is no Exception."""


class Compiler:
    """Compiles what `finish` names and what nobody holds; what is "endless" computes until then."""

    def __init__(self, **settings):
        self.begun, self.threads = [], {}
        self._events = {}
        self.compilations = Compilations(self._compile, **settings)

    def ask(self, grammar):
        if grammar.startswith(("held", "endless")):
            self._events.setdefault(grammar, threading.Event())
        return self.compilations.ask(grammar)

    def finish(self, *grammars):
        for grammar in grammars or self._events:
            self._events[grammar].set()

    def until(self, predicate):
        end = time.monotonic() + PATIENCE_S
        while not predicate():
            assert time.monotonic() < end, self.compilations
            time.sleep(0.001)

    def until_given_up(self, compilation):
        def is_given_up():
            self.compilations.check()
            return compilation.fault

        self.until(is_given_up)

    def _compile(self, grammar):
        self.threads[grammar] = threading.get_native_id()
        began = time.thread_time()
        self.begun.append(grammar)
        event = self._events.get(grammar)
        if event is not None and grammar.startswith("held"):
            event.wait(PATIENCE_S)
        while event is not None and not event.is_set():
            sum(range(1000))
        while grammar.startswith("costly") and time.thread_time() < began + COST_S:
            sum(range(1000))
        if grammar.startswith("bad"):
            raise ValueError("it is bad")
        if grammar.startswith("panic"):
            raise Panic("it is broken")
        return f"matcher of {grammar}"


@pytest.fixture
def compiler():
    made = Compiler(max_cpu_s=0.02)
    yield made
    made.finish()
    made.until(lambda: "0 running, 0 given up" in repr(made.compilations))


def test_a_grammar_is_compiled_once_and_the_most_recent_ones_are_kept(compiler):
    first = compiler.ask("held")
    assert compiler.ask("held") is first
    assert not first.is_ready
    compiler.finish("held")
    compiler.until(lambda: first.is_ready)
    assert compiler.ask("held").matcher == "matcher of held"
    for i in range(MAX_KEPT):
        other = compiler.ask(f"g{i}")
        compiler.until(lambda: other.is_ready)  # noqa: B023
    assert compiler.begun.count("held") == 1
    again = compiler.ask("held")
    compiler.until(lambda: again.is_ready)
    assert compiler.begun.count("held") == 2


def test_a_compile_error_belongs_to_its_own_grammar(compiler):
    bad, good = compiler.ask("bad"), compiler.ask("good")
    compiler.until(lambda: bad.fault and good.is_ready)
    assert (bad.fault, bad.is_ours, bad.is_ready) == ("it is bad", False, False)
    assert compiler.ask("bad") is bad


def test_only_the_grammar_that_takes_too_long_is_rejected_for_good(compiler):
    endless = [compiler.ask(f"endless {i}") for i in range(NUM_THREADS)]
    good = compiler.ask("good")
    for one in endless:
        compiler.until_given_up(one)
        assert (one.fault, one.is_ours) == ("the grammar takes more than 0.02 s to compile", False)
    compiler.until(lambda: good.is_ready)
    assert [compiler.ask(one.grammar) for one in endless] == endless
    compiler.finish()
    compiler.until(lambda: "0 running, 0 given up" in repr(compiler.compilations))
    assert not any(one.is_ready for one in endless), "its requests were told"
    assert len(compiler.begun) == NUM_THREADS + 1


def test_a_compilation_without_waiters_is_given_up_when_others_queue(compiler):
    for i in range(NUM_THREADS):
        compiler.ask(f"endless {i}")  # whose request is cancelled at once
    good = compiler.ask("good")
    compiler.until(lambda: compiler.compilations.check() or good.is_ready)


def test_a_compiler_panic_frees_its_thread_and_fails_its_request(compiler):
    broken = [compiler.ask(f"panic {i}") for i in range(NUM_THREADS)]
    compiler.until(lambda: all(one.fault for one in broken))
    assert {(one.fault, one.is_ours) for one in broken} == {("it is broken", False)}
    good = compiler.ask("good")
    compiler.until(lambda: good.is_ready)


def test_time_lost_to_a_busy_machine_counts_against_no_grammar(compiler):
    held = compiler.ask("held")
    compiler.until(lambda: compiler.begun)
    time.sleep(0.05)  # more than it may compute
    compiler.compilations.check()
    assert not held.fault
    compiler.finish()
    compiler.until(lambda: held.is_ready)


def test_too_many_endless_compilations_refuse_other_grammars_at_once(compiler):
    known = compiler.ask("known")
    compiler.until(lambda: known.is_ready)
    for i in range(MAX_GIVEN_UP):
        compiler.until_given_up(compiler.ask(f"endless {i}"))
    refused = compiler.ask("new")
    assert refused.is_ours
    assert "grammars that take too long" in refused.fault
    assert compiler.ask("known") is known, "what is compiled serves on"
    compiler.finish("endless 0")
    compiler.until(lambda: f"{MAX_GIVEN_UP - 1} given up" in repr(compiler.compilations))
    again = compiler.ask("new")
    compiler.until(lambda: again.is_ready)


def test_kept_and_used_grammars_are_bounded_by_their_cost():
    compiler = Compiler(held_s=6.5 * COST_S)

    def ask(grammar):
        asked = compiler.ask(grammar)
        compiler.until(lambda: asked.is_ready or asked.fault)
        return asked

    cheap = ask("cheap")
    assert cheap.is_ready
    for i in range(9):
        assert ask(f"costly {i}").is_ready, "nobody uses those before"
    num_begun = len(compiler.begun)
    kept = itertools.takewhile(
        lambda i: ask(f"costly {i}").is_ready and len(compiler.begun) == num_begun, reversed(range(9))
    )
    assert 1 <= len(list(kept)) <= 3, "half of what may be held is for those that nobody uses"
    used = [ask(f"costly used {i}") for i in range(9)]
    assert 3 <= sum(one.is_ready for one in used) <= 6
    refused = used[-1]
    assert refused.is_ours
    assert "as much memory" in refused.fault
    assert ask("another that is cheap").is_ready
    assert ask("cheap") is cheap, "it was kept"
    del used, refused
    assert ask("costly used 8").is_ready, "it is asked for again, and there is room"


def test_a_compilation_without_waiters_does_not_start(compiler):
    held = [compiler.ask(f"held {i}") for i in range(NUM_THREADS)]
    left, waiting = compiler.ask("left"), compiler.ask("waiting")
    del left
    compiler.finish()
    compiler.until(lambda: waiting.is_ready)
    assert sorted(compiler.begun) == sorted([one.grammar for one in held] + ["waiting"])


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_compiling_yields_to_steps_and_given_up_threads_yield_to_all(compiler):
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    endless = compiler.ask("endless")
    compiler.until(lambda: compiler.begun)
    thread = compiler.threads["endless"]
    assert os.getpriority(os.PRIO_PROCESS, thread) == max(own, NICE)
    compiler.until_given_up(endless)
    assert os.getpriority(os.PRIO_PROCESS, thread) == NICEST
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_without_a_new_thread_only_the_request_fails(compiler, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    refused = compiler.ask("new")
    assert refused.is_ours
    assert "can't start new thread" in refused.fault


def test_an_exiting_process_waits_for_native_code_in_its_threads():
    left = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (left.returncode, left.stdout, left.stderr) == (0, "compiled\n", "")


def test_an_unused_compiler_is_garbage_collected(compiler):
    made = Compilations(str)
    gone = weakref.ref(made)
    asked = made.ask("g")
    compiler.until(lambda: asked.is_ready and not asked.thread.is_alive())
    del made
    assert gone() is None
