"""Regular expressions, choices and grammars of clients: what they allow, and what is refused."""

import json
import time

import pytest
from baton.router.errors import ApiError
from baton.router.sandbox.client_grammars import MAX_GRAMMAR_TEXT, MAX_TEXT
from baton.router.sandbox.grammar_compiler import GRAMMARS, Plan, SandboxedCompiler, compiled
from llguidance import LLMatcher, LLTokenizer
from msgspec import msgpack

LARK = """start: "I am " NUMBER ("years" | "months")? // an age
NUMBER: /[0-9]{1,3}/
%ignore " "
"""
GBNF = 'root ::= "yes" | "no" num\nnum ::= [0-9<]+ # a number'


@pytest.fixture(scope="module")
def tokenizer():
    return LLTokenizer("byte")


def plan(kind, text):
    return Plan(answer=text.encode(), kind=kind, field="guided_x")


def follows(tokenizer, made, text):
    matcher = LLMatcher(tokenizer, compiled(made), log_level=0)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "a|b+", ["a", "bbb"], ["", "ab", "xa"]),
        ("regex", "^\\d{3}/\\d$", ["123/4"], ["12/4", "123/4 "]),
        ("choice", json.dumps(["yes", 'a "b"\n', "<b>"]), ["yes", 'a "b"\n', "<b>"], ["no", "yes<b>"]),
        ("grammar", LARK, ["I am 7 years", "I am 42"], ["I am", "I am 1234"]),
        ("grammar", GBNF, ["yes", "no17"], ["no", "yes1"]),
        ("grammar", 'start: "<b>" /[a-z]+/ "</b>"', ["<b>xy</b>"], ["<b></b>"]),
    ],
)  # fmt: skip
def test_a_constraint_allows_its_answers_and_no_others(tokenizer, kind, text, good, bad):
    made = plan(kind, text)
    assert [answer for answer in good if not follows(tokenizer, made, answer)] == []
    assert [answer for answer in bad if follows(tokenizer, made, answer)] == []


REFUSED = {
    "look-ahead": ("regex", "a(?=b)"),
    "no expression": ("regex", "a("),
    "long expression": ("regex", "x" * (MAX_TEXT + 1)),
    "many repetitions": ("regex", "(xy){20000}"),
    "long choice": ("choice", json.dumps(["x" * (MAX_TEXT + 1)])),
    "no grammar": ("grammar", "this is no grammar"),
    "a rule is missing": ("grammar", "start: other"),
    "GBNF with a fault": ("grammar", 'root ::= "a'),
    "token of the vocabulary": ("grammar", 'start: <|im_end|> "a"'),
    "token ids": ("grammar", 'start: <[1-5]> "a"'),
    "token ids between patterns": ("grammar", "start: /a\n/ <[1]> /b\n/"),
    "what spells token ids": ("grammar", 'start: "<[1]>"'),
    "token ids in an option": ("grammar", 'start: [ <[1]> ] "a"'),
    "schema that is not checked": ("grammar", 'start: %json {"type": "array", "minItems": 100000}'),
    "another grammar": ("grammar", "start: @answer"),
    "long text in a rule": ("grammar", 'start: "%s"' % ("x" * (MAX_TEXT + 1))),
    "repetitions in a rule": ("grammar", 'start: "x"{100000}'),
    "long grammar": ("grammar", 'start: "a"\n' + "// x\n" * MAX_GRAMMAR_TEXT),
    "endless GBNF": ("grammar", "root ::= " + "(" * 8000),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_constraint_that_cannot_be_followed_is_refused_in_time(name):
    began = time.process_time()
    with pytest.raises(ApiError) as caught:
        compiled(plan(*REFUSED[name]))
    assert time.process_time() - began < 1.0
    assert (caught.value.status, caught.value.body.param) == (400, "guided_x")
    assert caught.value.body.message.isascii()
    assert "\n" not in caught.value.body.message


def test_the_sandboxed_compiler_takes_a_plan_with_a_constraint():
    assert GRAMMARS == b"grammars"
    reply = SandboxedCompiler().answer(msgpack.encode(plan("choice", '["a"]')))
    assert json.loads(reply[1:])["grammars"][0]["name"] == "answer"
