"""Readers of reasoning and tool calls: any split of a text gives the same parts, and no text is lost."""

import json
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from baton.router.api.tool_bodies import Function, Tool
from baton.router.formats.deepseek import DeepSeekReader
from baton.router.formats.harmony import HarmonyReader
from baton.router.formats.hermes import GuidedReader, HermesReader
from baton.router.formats.llama_json import LlamaJsonReader
from baton.router.formats.mistral import MistralReader
from baton.router.formats.parts import NOTHING
from baton.router.formats.pythonic import PythonicReader
from baton.router.formats.qwen_coder import QwenCoderReader
from baton.router.formats.thinking import Markers, OneCallReader, PlainReader, ThinkingReader
from hypothesis import given
from msgspec import Raw

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "is_hot": {"type": "boolean"},
    },
}
TOOLS = [Tool(Function("look", parameters=Raw(json.dumps(SCHEMA).encode()))), Tool(Function("go"))]
THINK = Markers("<think>", "</think>")
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
TRICKY = '{"q": "a } \\" </tool_call> {", "n": [1, {"m": 2}]}'
LOOK = '{"city": "Rome"}'


def hermes(name="look", arguments=LOOK):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(*parameters, name="look"):
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def v3(name="look", arguments=LOOK):
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def say(channel, text, end="<|end|>", to=""):
    return f"<|channel|>{channel}{to and f' to={to} <|constrain|>json'}<|message|>{text}{end}"


START = "<|start|>assistant"
coder_reader = partial(QwenCoderReader, TOOLS)
channels = partial(HarmonyReader, has_calls=True)


def thinking(after=PlainReader, *, is_thinking=False, markers=THINK):
    return lambda: ThinkingReader(markers, after(), is_thinking=is_thinking)


# reader, text, its plain text, its calls, its reasoning
CASES = {
    "hermes": (HermesReader, f"See:\n{hermes()}", "See:\n", [("look", LOOK)], ""),
    "hermes, parallel": (
        HermesReader,
        f"{hermes('look', TRICKY)}\n{hermes('go', '{}')}\n",
        "",
        [("look", TRICKY), ("go", "{}")],
        "",
    ),
    "hermes, malformed": (
        HermesReader,
        "<tool_call>\n{name: 3}\n</tool_call> x",
        "<tool_call>\n{name: 3}\n</tool_call> x",
        [],
        "",
    ),
    "hermes, a malformed call before a good one": (
        HermesReader,
        f'<tool_call>{{"name": "f", "arguments": {{</tool_call>{hermes()}',
        '<tool_call>{"name": "f", "arguments": {</tool_call>',
        [("look", LOOK)],
        "",
    ),
    "hermes, no name": (HermesReader, hermes(""), hermes(""), [], ""),
    "hermes, arguments no object": (HermesReader, hermes("f", "[1]"), hermes("f", "[1]"), [], ""),
    "hermes, unfinished": (HermesReader, hermes()[:-30], hermes()[:-30], [], ""),
    "hermes, no end marker": (HermesReader, hermes()[: -len("</tool_call>")], "", [("look", LOOK)], ""),
    "hermes, an opener only": (HermesReader, "a <tool_ca", "a <tool_ca", [], ""),
    "hermes, text after": (HermesReader, f"{hermes()}\n bye", "\n bye", [("look", LOOK)], ""),
    "hermes, plain": (HermesReader, "a < b, <tool> {", "a < b, <tool> {", [], ""),
    "coder": (
        coder_reader,
        "Ok\n"
        + coder(
            ("city", "New\nYork"), ("days", "3"), ("tags", '["a", 1]'), ("is_hot", "True"), ("unit", "null")
        ),
        "Ok\n",
        [("look", '{"city": "New\\nYork", "days": 3, "tags": ["a", 1], "is_hot": true, "unit": null}')],
        "",
    ),
    "coder, parallel": (
        coder_reader,
        coder(("city", "3")) + "\n" + coder(name="go"),
        "",
        [("look", '{"city": "3"}'), ("go", "{}")],
        "",
    ),
    "coder, code in a value": (
        coder_reader,
        coder(("city", "a </function> <b>"), ("days", "x")),
        "",
        [("look", '{"city": "a </function> <b>", "days": "x"}')],
        "",
    ),
    "coder, no opener": (
        coder_reader,
        "<function=go>\n</function>",
        "",
        [("go", "{}")],
        "",
    ),
    "coder, malformed": (
        coder_reader,
        "<tool_call>\n<function=go>\n<oops>\n</function>\n</tool_call>",
        "<tool_call>\n<function=go>\n<oops>\n</function>\n</tool_call>",
        [],
        "",
    ),
    "coder, another thing in it": (
        coder_reader,
        "<tool_call>{} <function",
        "<tool_call>{} <function",
        [],
        "",
    ),
    "llama": (LlamaJsonReader, '{"name": "look", "parameters": {"city": "Rome"}}', "", [("look", LOOK)], ""),
    "llama, parallel": (
        LlamaJsonReader,
        ' <|python_tag|>{"name": "look", "parameters": {"city": "Rome"}}; {"name": "go", "parameters": {}}',
        " ",
        [("look", LOOK), ("go", "{}")],
        "",
    ),
    "llama, plain": (
        LlamaJsonReader,
        'It is {"name": "look", "parameters": {}}',
        'It is {"name": "look", "parameters": {}}',
        [],
        "",
    ),
    "llama, other JSON": (
        LlamaJsonReader,
        '{"name": "Bob", "age": 3}\n',
        '{"name": "Bob", "age": 3}\n',
        [],
        "",
    ),
    "llama, malformed": (
        LlamaJsonReader,
        '{"name": "f", "parameters": {a}}',
        '{"name": "f", "parameters": {a}}',
        [],
        "",
    ),
    "llama, unfinished": (LlamaJsonReader, '{"name": "f", "par', '{"name": "f", "par', [], ""),
    "pythonic": (
        PythonicReader,
        """[look(city="Ro'me", days=-3, tags=['a', 1.5, {'k': None}], is_hot=True), go()]""",
        "",
        [
            ("look", '{"city": "Ro\'me", "days": -3, "tags": ["a", 1.5, {"k": null}], "is_hot": true}'),
            ("go", "{}"),
        ],
        "",
    ),
    "pythonic, marked": (
        PythonicReader,
        "<|python_start|>[a.b(x='\\n]')]<|python_end|>",
        "",
        [("a.b", '{"x": "\\n]"}')],
        "",
    ),
    "pythonic, no call": (PythonicReader, "[1] says so (a) [b]", "[1] says so (a) [b]", [], ""),
    "pythonic, an expression": (PythonicReader, "[look(city=open('x'))]", "[look(city=open('x'))]", [], ""),
    "pythonic, unfinished": (PythonicReader, "[look(city='R", "[look(city='R", [], ""),
    "deepseek v3": (
        DeepSeekReader,
        f"Ok {CALLS}{v3()}\n{v3('go', '{}')}{CALLS_END}",
        "Ok ",
        [("look", LOOK), ("go", "{}")],
        "",
    ),
    "deepseek v3.1": (
        DeepSeekReader,
        f"{CALLS}{CALL}look{SEP}{LOOK}{CALL_END}{CALL}go{SEP}{{}}{CALL_END}{CALLS_END}",
        "",
        [("look", LOOK), ("go", "{}")],
        "",
    ),
    "deepseek, malformed": (
        DeepSeekReader,
        f"{CALLS}{CALL}look{SEP}nope{CALL_END}",
        f"{CALLS}{CALL}look{SEP}nope{CALL_END}",
        [],
        "",
    ),
    "deepseek, unfinished": (DeepSeekReader, f"a{CALLS}{CALL}lo", f"a{CALLS}{CALL}lo", [], ""),
    "mistral": (
        MistralReader,
        'Hm[TOOL_CALLS] [{"name": "look", "arguments": {"city": "Rome"}}, {"name": "go", "arguments": {}}]',
        "Hm",
        [("look", LOOK), ("go", "{}")],
        "",
    ),
    "mistral, named": (
        MistralReader,
        f"[TOOL_CALLS]look{LOOK}[TOOL_CALLS]go[CALL_ID]x1[ARGS]{{}}[TOOL_CALLS]go[ARGS] {{}}",
        "",
        [("look", LOOK), ("go", "{}"), ("go", "{}")],
        "",
    ),
    "mistral, malformed": (
        MistralReader,
        "[TOOL_CALLS] [{]} and [TOOL_CALLS]",
        "[TOOL_CALLS] [{]} and [TOOL_CALLS]",
        [],
        "",
    ),
    "mistral, no call in the list": (
        MistralReader,
        '[TOOL_CALLS][{"a": 1}]',
        '[TOOL_CALLS][{"a": 1}]',
        [],
        "",
    ),
    "harmony": (
        channels,
        say("analysis", "Hm.")
        + START
        + say("commentary", "I look.")
        + START
        + say("commentary", LOOK, "<|call|>", "functions.look"),
        "I look.",
        [("look", LOOK)],
        "Hm.",
    ),
    "harmony, recipient first": (
        channels,
        say("analysis", "a") + START + " to=functions.go<|channel|>commentary<|message|>{}",
        "",
        [("go", "{}")],
        "a",
    ),
    "harmony, final": (
        channels,
        say("analysis", "a") + START + say("analysis", "b") + START + say("final", "Yes < no", "<|return|>"),
        "Yes < no",
        [],
        "a\nb",
    ),
    "harmony, malformed": (
        channels,
        say("commentary", "{oops", "<|call|>", "functions.go"),
        "<|channel|>commentary to=functions.go <|constrain|>json<|message|>{oops",
        [],
        "",
    ),
    "harmony, unfinished": (channels, "<|channel|>analysis<|message|>thin<|e", "", [], "thin<|e"),
    "harmony, a header only": (channels, "<|channel|>anal", "<|channel|>anal", [], ""),
    "harmony, no header": (channels, "plain {text}", "plain {text}", [], ""),
    "thinking": (thinking(), "<think>\nHm.\n</think>\n\nYes.", "Yes.", [], "Hm."),
    "thinking, opened by the prompt": (
        thinking(is_thinking=True),
        "\nHm.\n\nSo </thin.\n</think>Yes. <think>",
        "Yes. <think>",
        [],
        "Hm.\n\nSo </thin.",
    ),
    "thinking, none": (thinking(), " Yes <think>", " Yes <think>", [], ""),
    "thinking, unfinished": (thinking(), "<think>a </thi", "", [], "a </thi"),
    "thinking, a part of a marker": (thinking(), "<thi", "<thi", [], ""),
    "thinking and calls": (
        thinking(HermesReader),
        f"<think>{hermes()}</think>\n\n{hermes()}",
        "",
        [("look", LOOK)],
        hermes(),
    ),
    "thinking, other markers": (
        thinking(markers=Markers("[THINK]", "[/THINK]")),
        "[THINK]a[/THINK]b",
        "b",
        [],
        "a",
    ),
    "guided": (
        GuidedReader,
        f"a {hermes('look', TRICKY)}\n{hermes('go', '{}')}",
        "a ",
        [("look", TRICKY), ("go", "{}")],
        "",
    ),
    "guided, unfinished": (GuidedReader, 'a <tool_call>\n{"na', 'a <tool_call>\n{"na', [], ""),
    "guided JSON": (
        partial(GuidedReader, only_first=True),
        '{"q": "<tool_call>\\n{}"}',
        '{"q": "<tool_call>\\n{}"}',
        [],
        "",
    ),
    "one call": (lambda: OneCallReader(HermesReader()), hermes() + hermes("go"), "", [("look", LOOK)], ""),
}


def read(reader, pieces):
    split = NOTHING
    for piece in pieces:
        split += reader.feed(piece)
    split += reader.flush()
    calls = {part.index: [part.name, ""] for part in split.calls if part.id}
    for part in split.calls:
        calls[part.index][1] += part.arguments
    assert reader.num_calls == len(calls) == len({part.id for part in split.calls if part.id})
    return split.text, [tuple(call) for call in calls.values()], split.reasoning


@pytest.mark.parametrize("name", CASES)
def test_a_text_has_these_parts_however_it_is_split(name):
    make, text, *parts = CASES[name]
    assert list(read(make(), [text])) == parts
    assert list(read(make(), text)) == parts
    for at in range(1, len(text)):
        assert list(read(make(), [text[:at], text[at:]])) == parts, at


BITS = [
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', '"a": 1', "}", "{", "[", "]", "\n", " x",
    '"', "\\", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<|python_tag|>", ";", "f(",
    ")", "=", "'", ",",
    "[TOOL_CALLS]", "f", "[ARGS]", CALLS, CALL, SEP, CALL_END, CALLS_END, "```json", "```",
    "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>", " to=functions.f", "<think>",
    "</think>",
]  # fmt: skip
MAKERS = [
    HermesReader, coder_reader, LlamaJsonReader, PythonicReader, DeepSeekReader, MistralReader, channels,
    thinking(HermesReader), thinking(LlamaJsonReader, is_thinking=True),
]  # fmt: skip


@given(
    bits=st.lists(st.sampled_from(BITS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    make=st.sampled_from(MAKERS),
)
def test_any_split_of_any_text_gives_the_parts_of_the_whole(bits, cuts, make):
    text = "".join(bits)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole = read(make(), [text])
    assert read(make(), pieces) == whole
    assert read(make(), text) == whole


@given(bits=st.lists(st.sampled_from(BITS), max_size=14), make=st.sampled_from(MAKERS[:6]))
def test_a_text_without_valid_calls_is_not_changed(bits, make):
    text = "".join(bits)
    said, calls, _ = read(make(), text)
    assert calls or said == text
