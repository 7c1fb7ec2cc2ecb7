"""What the router renders itself: what a worker would have made of it, for a bounded effort; all else is the worker's."""

import sys

import msgspec
import pytest
from baton.router.inline_templates import FUEL, REST, InlineRenderer, inline_renderer
from baton.router.rendering import RENDERED, Chat, Renderer, Setup
from baton.router.template_rules import TurnedDown
from baton.tests.cluster.router_fakes import TEMPLATE
from baton.tests.corpora import corpus
from baton.tests.unit import known_templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
KNOWN = known_templates.KNOWN | {"chatml": TEMPLATE}
PARAMETERS = {"type": "object", "x": [1, None]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": PARAMETERS}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, "<é>"]}}}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = {
    "one": Chat(messages=[said("user", "hellö [you] ")]),
    "turns": Chat(
        messages=[said("user", "a"), said("assistant", "<think>\nhm\n</think>\n\nb"), said("user", " c\n")],
        switches={"long": 1 << 70, "form": "%99999999d"},
    ),
    "system": Chat(
        messages=[said("system", "be kind"), said("user", "hi")], switches={"enable_thinking": False}
    ),
    "tools": Chat(messages=[said("user", "hi")], tools=TOOLS, switches={"date_string": 7}),
    "texts": Chat(
        messages=[said("user", "hi")], switches={"date_string": "1 May", "reasoning_effort": "high"}
    ),
    "calls": Chat(
        messages=[said("user", "x"), said("assistant", "", tool_calls=[CALL]), said("tool", "4", name="f")]
    ),
    "last words": Chat(messages=[said("user", "x"), said("assistant", "<think>why</think>y")]),
    "many": Chat(messages=[said("user", "q"), said("assistant", "r")] * 25 + [said("user", "z")]),
}
REFUSED = {("turns", "calls")}
NESTED = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages"
ENDS = "{% endfor %}" * 4 + "x"


def repeated(begin, step, shown="x"):
    """`step` once a message, from ns.s = `begin` on."""
    steps = "{% for m in messages %}" + step + "{% endfor %}"
    return "{% set ns = namespace(s=" + begin + ") %}" + steps + shown


GROWING = {
    "a text doubled": repeated("'ab'", "{% set ns.s = ns.s + ns.s %}", "{{ ns.s }}"),
    "concatenated": repeated("'ab'", "{% set ns.s = ns.s ~ ns.s %}", "{{ ns.s }}"),
    "a long sum": repeated("'ab'", "{% set ns.s = ns.s" + " + ns.s" * 80 + " %}"),
    "a long row": repeated("'ab'", "{% set ns.s = ns.s" + " ~ ns.s" * 4000 + " %}"),
    "a list doubled": repeated("[1]", "{% set ns.s = ns.s + ns.s %}"),
    "replaced": repeated("'aa'", "{% set ns.s = ns.s | replace('a', 'aaaa') %}"),
    "replaced by a method": repeated("'aa'", "{% set ns.s = ns.s.replace('', 'ab') %}"),
    "joined": repeated("'ab'", "{% set ns.s = ns.s | list | join(ns.s) %}"),
    "blocks": repeated("'ab'", "{% set b %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = b %}"),
    "loops in loops": NESTED + " %}" + ENDS,
    "conditions in loops": NESTED + " if false %}" + ENDS,
    "defaults of macros": "{% macro f(x=[" + "1," * 5000 + "]) %}{% endmacro %}"
    "{% for m in messages %}{{ f() }}{% endfor %}x",
    "letters": "{% for m in messages %}{% for a in m.content %}{% for b in m.content %}"
    + "{% endfor %}" * 3
    + "x",
    "searches": "{% for m in messages %}{% for n in messages %}{% set t = m.content ~ n.content %}"
    "{% if t in t ~ t ~ t ~ t %}{% endif %}{% endfor %}{% endfor %}x",
}
UNUSUAL = {
    "a list of lists": repeated("[1]", "{% set ns.s = [ns.s, ns.s] %}", "{{ ns.s | tojson }}"),
    "nested namespaces": repeated("1", "{% set ns.s = namespace(a=ns.s, b=ns.s) %}", "{{ ns.s }}"),
    "lists compared": "{% if messages[1:] == messages[:-1] %}{% endif %}x",
    "a list shown": "{{ messages }}",
    "a number of any base": "{{ 'ff' | int(0, 16) }}",
    "a long number shown": "{{ '99999999999999999999' | int }}",
    "a long number of a client": "{{ long }}",
    "a long number of a client, divided": "{{ 1 // long }}",
    "a sum of safe texts": "{{ 'a' | safe + 'b' | safe + '<' }}",
    "a safe text that is changed": "{{ 'a' | safe | upper + '<' }}",
    "a part of a safe text": "{{ ('ab' | safe)[1:] + '<' }}",
    "formatting": "{% set wide = '%99999999d' %}{{ wide % 1 }}",
    "formatting by a client": "{{ form % 1 }}",
}
TURNED_DOWN = {
    "a range": "{% for i in range(3) %}{% endfor %}",
    "a product": "{{ 'a' * 3 }}",
    "a power": "{{ 9 ** 9 }}",
    "recursion": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a filter with a width": "{{ 'a' | center(99999999) }}",
    "a wide indent": "{{ messages | tojson(indent=99999999) }}",
    "a wide date": "{{ strftime_now('%999999999d') }}",
    "a date of a client": "{{ strftime_now(messages[0].content) }}",
    "a function as a value": "{% set f = strftime_now %}{{ f('%999999999d') }}",
    "a function in a namespace": "{% set ns = namespace(strip=strftime_now) %}{{ ns.strip('%999999999d') }}",
    "a method of formatting": "{{ '{:99999999}'.format(1) }}",
    "a test that formats": "{{ '%99999999d' is even }}",
    "a look inside": "{{ messages.__class__ }}",
    "a look inside a field": "{{ messages | map(attribute='__class__') | list }}",
    "a call of what was found": "{{ messages[0].content() }}",
    "names made up": "{{ {messages[0].content: 1} }}",
    "an include": "{% include 'x' %}",
    "a text too long": "x" * 40_000,
    "a macro that calls itself": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "two macros that do": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}",
    "a macro in place of another": "{% macro f() %}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}"
    "{% macro f() %}{{ g() }}{% endmacro %}{{ f() }}",
    "a macro as a value": "{% macro f() %}{% endmacro %}{% set g = f %}{{ g }}",
    "a macro with a caller": "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{% endcall %}",
    "half a character": "{{ '\\ud800' }}",
    "half a character as it is": "x\ud800",
    "depth": "{{ " + "(" * 300 + "1" + ")" * 300 + " }}" + "{% if 1 %}" * 200 + "{% endif %}" * 200,
}
GREEDY = Chat(messages=[said("user", "ab" * 15)] * 60)


def of(template):
    return InlineRenderer(Setup(chat_template=template, special_tokens=SPECIAL))


def by_worker(template, chat):
    return Renderer(Setup(chat_template=template, special_tokens=SPECIAL)).answer(msgspec.json.encode(chat))


@pytest.mark.parametrize("name", KNOWN)
def test_templates_of_known_models_are_rendered_here_and_as_by_a_worker(name):
    renderer = of(KNOWN[name])
    for kind, chat in CHATS.items():
        expected = by_worker(KNOWN[name], chat)
        if expected[:1] == RENDERED:
            assert renderer.render(chat) == expected[1:].decode(), kind
        else:
            assert (name, kind) in REFUSED
            assert renderer.render(chat) is None, kind
    assert renderer.render(CHATS["one"]), "none of them took too much"


@pytest.mark.parametrize("name", TURNED_DOWN)
def test_a_template_with_anything_unknown_is_turned_down(name):
    with pytest.raises(TurnedDown):
        of(TURNED_DOWN[name])
    assert inline_renderer(Setup(chat_template=TURNED_DOWN[name], special_tokens={})) is None


@pytest.mark.parametrize("name", GROWING)
def test_what_would_grow_without_end_is_rendered_while_it_is_small_and_ends(name):
    """By itself each would take days or terabytes; the test ends because the rendering does."""
    renderer = of(GROWING[name])
    assert b"t" + renderer.render(CHATS["one"]).encode() == by_worker(GROWING[name], CHATS["one"])
    assert renderer.render(GREEDY) is None
    assert renderer._rest == REST


@pytest.mark.parametrize("name", UNUSUAL)
def test_values_that_could_be_larger_than_they_look_are_left_to_workers(name):
    renderer = of(UNUSUAL[name])
    assert renderer.render(CHATS["turns"]) is None
    assert renderer._rest == 0


@pytest.mark.parametrize(("name", "template", "is_fine"), corpus.templates(), ids=lambda value: None)
def test_hostile_templates_are_turned_down_or_end(name, template, is_fine):
    renderer = inline_renderer(Setup(chat_template=template, special_tokens={}))
    text = renderer.render(CHATS["one"]) if renderer is not None else None
    assert is_fine or not text, name


def test_a_branch_is_paid_when_it_is_taken_and_only_then():
    renderer = of("{% if messages | length > 1 %}" + "{{ bos_token }}" * 100 + "{% endif %}x")
    spent = []
    for kind in ("one", "turns"):
        assert renderer.render(CHATS[kind]).endswith("x")
        spent.append(FUEL - renderer._meter.left)
    assert spent[0] < 20
    assert spent[1] > 100 + 100, "its nodes, and what they show"


def test_macros_that_call_macros_twice_end():
    """Thirty of them would write the last one a billion times."""
    macros = ["{% macro f0() %}x{% endmacro %}"]
    macros += [f"{{% macro f{i + 1}() %}}{{{{ f{i}() }}}}{{{{ f{i}() }}}}{{% endmacro %}}" for i in range(30)]
    for depth, expected in ((3, "x" * 8), (30, None)):
        assert of("".join([*macros, f"{{{{ f{depth}() }}}}"])).render(CHATS["one"]) == expected


@pytest.mark.parametrize("shape", ["wide", "deep"])
def test_json_is_weighed_no_further_than_it_is_paid(shape):
    """A large value that a list holds a thousand times; and one that is so deep that its margin is most of the text."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    value = [1] * 900
    for _ in range(0 if shape == "wide" else 300):
        value = [value]
    grown = "{% set ns = namespace(s=tools) %}" + "{% set ns.s = ns.s + ns.s %}" * 11 + "{{ ns.s | tojson }}"
    renderer = of(grown if shape == "wide" else "{{ tools | tojson(indent=4) }}")
    sys.setprofile(count)
    try:
        text = renderer.render(Chat(messages=[], tools=[{"x": value}]))
    finally:
        sys.setprofile(None)
    assert text is None
    assert calls < FUEL / 2


def test_items_of_a_filter_are_read_once_and_are_there_even_if_there_are_none():
    template = "{% set i = {'a': 1} | items %}{% for k, v in i %}{{ k }}{% endfor %}{% for k in i %}{{ k }}{% endfor %}"
    template += "{% if {} | items %}there{% endif %}"
    assert (
        RENDERED + of(template).render(CHATS["one"]).encode()
        == by_worker(template, CHATS["one"])
        == RENDERED + b"athere"
    )


def test_several_templates_by_name_are_left_to_workers():
    with pytest.raises(TurnedDown, match="several"):
        of({"default": TEMPLATE})


def test_a_template_that_took_all_rests_and_then_is_tried_again():
    renderer = of(GROWING["loops in loops"])
    assert renderer.render(CHATS["one"]) == "x"
    assert renderer.render(GREEDY) is None
    assert [renderer.render(CHATS["one"]) for _ in range(REST + 2)] == [None] * REST + ["x"] * 2


def test_a_refusal_costs_no_rest():
    renderer = of(TEMPLATE)
    assert renderer.render(Chat(messages=[said("user", "refuse me")])) is None
    assert renderer.render(CHATS["one"])


def test_short_chats_of_known_templates_stay_far_from_the_bound():
    """The longest short chats: as many messages as 2000 bytes hold, and one long text."""
    longest = [
        Chat(messages=[said("user", "x"), said("assistant", "y")] * 32),
        Chat(messages=[said("user", "x" * 1900)]),
    ]
    for template in KNOWN.values():
        renderer = of(template)
        for chat in longest:
            assert renderer.render(chat) is not None
            assert renderer._meter.left > FUEL / 2
