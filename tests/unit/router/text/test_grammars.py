"""Structured output: grammars of plans, hostile schemas, and tool calls told apart from text."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from baton.router.answers.answer import error_of
from baton.router.errors import ApiError
from baton.router.formats.hermes import GuidedReader
from baton.router.rooms.effects import Failure
from baton.router.sandbox.grammar_compiler import LIMITS, MAX_GRAMMAR, Plan, compiled
from baton.router.text.tool_prompts import written_out
from baton.tests.corpora.corpus import schemas
from llguidance import LLMatcher, LLTokenizer

ARGUMENTS = (
    b'{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"],"additionalProperties":false}'
)
LOOK = ("look", ARGUMENTS)
THINK = ("<think>", "</think>")
GO = ("go", b'{"type":"object"}')


def call(name="look", arguments='{"x": 1}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return LLTokenizer("byte")


def follows(tokenizer, plan, text):
    """Whether `text` is a whole answer to a plan."""
    matcher = LLMatcher(tokenizer, compiled(plan), log_level=0)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("plan", "good", "bad"),
    [
        (
            Plan(tools=(LOOK, GO)),
            ["", "hi <b>", call(), f"hi\n{call()}\n{call('go', '{}')}"],
            [call("other"), call() + " and more", call(arguments='{"x": "1"}'), "<tool_call>"],
        ),
        (Plan(tools=(LOOK,), may_repeat=False), ["hi", "a" + call()], [f"{call()}\n{call()}"]),
        (
            Plan(tools=(LOOK, GO), must_call=True),
            [call(), f"{call()}\n{call('go', '{}')}"],
            ["", "hi", "hi" + call()],
        ),
        (Plan(tools=(LOOK,), must_call=True, may_repeat=False), [call()], [f"{call()}\n{call()}"]),
        (Plan(answer=b'{"type":"object"}'), ["{}", '{"a": [1, {}]}'], ["[]", "", "{} ", "x"]),
        (Plan(answer=b'{"const": 1}', tools=(LOOK,)), ["1", call()], ["2", "hi", "1" + call()]),
        (
            Plan(tools=(LOOK,), markers=THINK),
            [
                "hi",
                f"<think>{call('no', '')}</think>\n\nhi",
                f"<think>a</think>{call()}",
                call(),
                "a <think>",
            ],
            ["<think>a", f"<think>a</think>{call('no')}", f"a {call('no')}"],
        ),
        (
            Plan(tools=(LOOK,), must_call=True, markers=THINK, is_thinking=True),
            [f"a</think>{call()}", f"\n{call('no')}\n</think>\n\n{call()}"],
            [call(), "a</think>", f"a</think>b{call()}"],
        ),
        (
            Plan(answer=b'{"const": 1}', markers=THINK, is_thinking=True),
            ["a</think>\n\n1", "</think>1"],
            ["1", "a</think>2", "a</think>" + "\n" * 9 + "1"],
        ),
        (Plan(answer=b'{"const": 1}', markers=THINK), ["1", " <think>\n</think>1"], ["a</think>1", "a1"]),
    ],
    ids=[
        "auto",
        "one at most",
        "required",
        "this one",
        "object",
        "schema or call",
        "thoughts, auto",
        "thoughts, required",
        "thoughts, schema",
        "maybe thoughts, schema",
    ],
)
def test_a_plan_allows_its_answers_and_no_others(bytes_tokenizer, plan, good, bad):
    assert [text for text in good if not follows(bytes_tokenizer, plan, text)] == []
    assert [text for text in bad if follows(bytes_tokenizer, plan, text)] == []


def nested(count):
    return b'{"type":"object","properties":{"a":' * count + b"{}" + b"}}" * count


def wide(count):
    names = [f"k{i}" for i in range(count)]
    return json.dumps(
        {"type": "object", "properties": {n: {"type": "integer"} for n in names}, "required": names}
    ).encode()


def doubling(count):
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return json.dumps({"$defs": defs | {f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}).encode()


HOSTILE = {
    "deep": nested(1000),
    "deeper than Python": b"[" * 30_000 + b"]" * 30_000,
    "wide": wide(1800),
    "doubling": doubling(30),
    "too large": json.dumps({"enum": [f"v{i:06}" for i in range(9000)]}).encode(),
    "redos": b'{"type":"string","pattern":"^(a{1,100}){1,100}$"}',
    "left recursion": b'{"$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"type":"null"}]}},"$ref":"#/$defs/a"}',
    "long string": b'{"type":"string","minLength":1,"maxLength":1000000}',
    "endless array": b'{"type":"array","minItems":1000000000}',
    "many long arrays": json.dumps(
        {"prefixItems": [{"type": "array", "maxItems": 9000, "items": {}}] * 1000}
    ).encode(),
    "long constant": json.dumps({"enum": ["a", {"b": "x" * 2100}]}).encode(),
    "long pattern": json.dumps({"type": "string", "pattern": "x" * 2100}).encode(),
    "repeated pattern": b'{"items":{"type":"string","pattern":"^x{5000}$"}}',
    "repeated names": b'{"type":"object","patternProperties":{"^x{3,5000}$":{"type":"null"}}}',
    "long name": json.dumps({"properties": {"x" * 2100: {}}}).encode(),
    "many alternatives": json.dumps({"anyOf": [{"const": f"{i}{'x' * 20}"} for i in range(1200)]}).encode(),
}
REFUSED = {
    "no schema": b"7",
    "unknown type": b'{"type":"banana"}',
    "missing reference": b'{"$ref":"#/nope"}',
    "remote reference": b'{"$ref":"http://203.0.113.9/s.json"}',
    "not enforced": b'{"type":"array","uniqueItems":true}',
    "unsatisfiable": b'{"type":"integer","minimum":5,"maximum":4}',
    "number out of range": b'{"type":"integer","maximum":1e400}',
    "no JSON": b"{",
    "no UTF-8": b'{"const":"\xff"}',
}


BOMBS = schemas()


def outcome(plan):
    try:
        return compiled(plan)
    except ApiError as error:
        return error


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_or_compiled_in_bounds(name):
    started = time.process_time()
    found = outcome(Plan(answer=HOSTILE[name]))
    assert time.process_time() - started < 2.0
    if isinstance(found, ApiError):
        assert (found.status, found.body.param) == (400, "response_format")
        assert found.body.message.isascii()
    else:
        assert len(found) <= MAX_GRAMMAR


def test_schema_parts_used_by_every_step_are_bounded_and_notes_are_not():
    noted = {
        "type": "object",
        "description": "x" * 9000,
        "properties": {"description": {"title": "y" * 9000}},
    }
    assert not isinstance(outcome(Plan(answer=json.dumps(noted).encode())), ApiError)
    for name in ("long constant", "long pattern", "long name"):
        assert "2100 characters" in outcome(Plan(answer=HOSTILE[name])).body.message
    for name in ("repeated pattern", "repeated names"):
        assert "5000 repetitions" in outcome(Plan(answer=HOSTILE[name])).body.message
    for name in ("endless array", "many long arrays"):
        assert "minItems and maxItems" in outcome(Plan(answer=HOSTILE[name])).body.message


@pytest.mark.parametrize(
    ("text", "is_refused"), [case[1:] for case in BOMBS], ids=[case[0] for case in BOMBS]
)
def test_s18_schemas_of_the_corpus_are_refused_or_followed_within_bounds(bytes_tokenizer, text, is_refused):
    started = time.process_time()
    found = outcome(Plan(answer=text.encode("utf-8", "surrogatepass")))
    if isinstance(found, ApiError):
        assert (found.status, found.body.param) == (400, "response_format")
        assert found.body.message.isascii()
    else:
        assert not is_refused
        matcher = LLMatcher(bytes_tokenizer, found, log_level=0, limits=LIMITS)
        for _ in range(64):
            allowed = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
            ).nonzero()[0]
            if (
                matcher.is_error()
                or not len(allowed)
                or not matcher.consume_token(int(allowed[len(allowed) // 2]))
            ):
                break
    assert time.process_time() - started < 2.0


@pytest.mark.slow
def test_s18_the_corpus_of_schemas_takes_no_512_mib():
    code = """if True:
        import resource
        from baton.router.errors import ApiError
        from baton.router.sandbox.grammar_compiler import Plan, compiled
        from baton.tests.corpora.corpus import schemas
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = peak()
        for _, text, _ in schemas():
            try:
                compiled(Plan(answer=text.encode("utf-8", "surrogatepass")))
            except ApiError:
                pass
        print((peak() - before) // 1024)
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < 512


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_followed_is_refused(name):
    for plan, param in (
        (Plan(answer=REFUSED[name]), "response_format"),
        (Plan(tools=(("f", REFUSED[name]),)), "tools"),
    ):
        with pytest.raises(ApiError) as caught:
            compiled(plan)
        assert (caught.value.status, caught.value.body.param) == (400, param)


def test_a_grammar_that_workers_cannot_follow_is_the_request_s_fault():
    error = error_of(
        Failure(kind="BadGrammar", message="the grammar takes more than 2 s to compile on host-7")
    )
    assert (error.status, error.body.code) == (400, "grammar_too_costly")
    assert "host-7" not in error.body.message


def test_workers_with_too_many_grammars_to_compile_are_asked_again_later():
    error = error_of(
        Failure(kind="GrammarsOverdue", message="4 grammars that take too long are being compiled on host-7")
    )
    assert (error.status, error.body.code) == (429, "overloaded")
    assert "retry-after" in {name.lower() for name in error.headers}
    assert "host-7" not in error.body.message


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_calls_are_parsed_for_every_split_of_their_text(step):
    tricky = '{"q": "a } \\" </tool_call> {", "n": [1, {"m": 2}]}'
    text = f"Let me <b>see</b>.\n{call('look', tricky)}\n{call('go', '{}')}"
    reader, said, parts = GuidedReader(), "", []
    for at in range(0, len(text), step):
        more, calls, _ = reader.feed(text[at : at + step])
        said += more
        parts += calls
    assert said + reader.flush().text == "Let me <b>see</b>.\n"
    assert [(part.index, part.name) for part in parts if part.id] == [(0, "look"), (1, "go")]
    arguments = ["".join(part.arguments for part in parts if part.index == i) for i in (0, 1)]
    assert arguments == [tricky, "{}"]
    assert len({part.id for part in parts if part.id}) == 2


@pytest.mark.parametrize("text", ["no call", "a < b", "ends with <tool_ca", "<", ""])
def test_text_without_calls_stays_as_it_is(text):
    reader = GuidedReader()
    said = "".join(reader.feed(char).text for char in text)
    assert said + reader.flush().text == text


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_json_that_contains_a_call_is_text_and_a_real_call_is_parsed(step):
    for text, num_calls in (('{"q": "<tool_call>\\n{}"}', 0), (f"{call('go', '{}')}\n{call('go', '{}')}", 2)):
        reader, said = GuidedReader(only_first=True), ""
        for at in range(0, len(text), step):
            said += reader.feed(text[at : at + step]).text
        assert (said + reader.flush().text, reader.num_calls) == ("" if num_calls else text, num_calls)


def test_tools_are_written_out_for_templates_that_do_not_know_them():
    tool = {"type": "function", "function": {"name": "look", "parameters": json.loads(ARGUMENTS)}}
    called = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}]
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": called},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    system, user, assistant, result = written_out(chat, [tool])
    assert (system["role"], user) == ("system", chat[0])
    assert '"look"' in system["content"]
    assert '{"name": "...", "arguments": {...}}' in system["content"]
    assert assistant == {"role": "assistant", "content": call()}
    assert result == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    assert written_out([{"role": "system", "content": "Be."}], [tool])[0]["content"].startswith(
        "Be.\n\nYou may call"
    )
    assert written_out(chat[:1], []) == chat[:1]
