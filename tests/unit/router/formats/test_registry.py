"""The choice of a model's formats: by its chat template, by the flags, and by what a request forces."""

import pytest
from baton.cluster.config.router_groups import REASONING_PARSERS, TOOL_PARSERS
from baton.router.api.body_checks import parse_body
from baton.router.api.body_types import ChatBody
from baton.router.formats.harmony import SPECIAL
from baton.router.formats.registry import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS, formats_of
from baton.router.text.answer_form import AnswerForm, template_messages
from msgspec import json

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SIGNS = {
    "{% if tools %}<tool_call>{{ tool | tojson }}</tool_call>{% endif %}<think>": ("hermes", "think"),
    "{% if tools %}<tool_call>\n<function=example>{% endif %}": ("qwen3_coder", NONE),
    "{% if tools %}<|python_tag|>{% endif %}": ("llama3_json", NONE),
    "{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}": ("pythonic", NONE),
    "{% if tools %}<｜tool▁calls▁begin｜>{% endif %}</think>": ("deepseek_v3", "think"),
    "<｜tool▁calls▁begin｜>{{ tool_calls }}": (NONE, NONE),  # it shows no tools
    "{% if tools %}<|channel|>analysis{% endif %}": ("harmony", "harmony"),
    "{% if tools %}[TOOL_CALLS]{% endif %}[THINK]": ("mistral", "mistral"),
    "{{ messages }}": (NONE, NONE),
}


def names(formats):
    return formats.tool_name, formats.reasoning.name if formats.reasoning else NONE


@pytest.mark.parametrize("template", SIGNS)
def test_a_template_tells_the_formats_of_its_model(template):
    assert names(formats_of(template, frozenset())) == SIGNS[template]
    assert (
        names(formats_of({"default": "{{ messages }}", "tool_use": template}, frozenset())) == SIGNS[template]
    )


def test_flags_name_other_formats_and_no_template_has_none():
    hermes = next(iter(SIGNS))
    assert names(formats_of(None, frozenset())) == (NONE, NONE)
    assert names(formats_of(hermes, frozenset(), tool_parser=NONE, reasoning_parser=NONE)) == (NONE, NONE)
    for row in TOOL_FORMATS:
        assert formats_of(hermes, frozenset(), tool_parser=row.name).tool is row
    for row in REASONING_FORMATS:
        assert formats_of(None, frozenset(), reasoning_parser=row.name).reasoning is row
    assert {AUTO, NONE, *(row.name for row in TOOL_FORMATS)} == set(TOOL_PARSERS)
    assert {AUTO, NONE, *(row.name for row in REASONING_FORMATS)} == set(REASONING_PARSERS)


def form(template, *, special=(), **more):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]} | more
    return AnswerForm.of(parse_body(json.encode(body), ChatBody), formats_of(template, frozenset(special)))


HERMES, CODER, *_ = SIGNS
HARMONY = "{% if tools %}<|channel|>{% endif %}"
STRICT = {"type": "function", "function": TOOL["function"] | {"strict": True}}


@pytest.mark.parametrize(
    ("template", "more", "is_native", "is_guided"),
    [
        (HERMES, {}, True, True),
        (CODER, {}, True, False),
        (CODER, {"tool_choice": "required"}, False, True),
        (CODER, {"tools": [STRICT]}, False, True),
        (CODER, {"response_format": {"type": "json_object"}}, False, True),
        (HARMONY, {}, True, False),
        ("{{ messages }}", {}, False, True),
    ],
)
def test_calls_are_native_unless_something_has_to_be_guaranteed(template, more, is_native, is_guided):
    made = form(template, **more)
    assert (made.style.is_native, made.style.is_guided, bool(made.plan)) == (is_native, is_guided, is_guided)


def test_a_format_of_control_tokens_is_followed_by_no_grammar():
    made = form(HERMES, special=["<tool_call>", "<think>"])
    assert (made.style.is_native, made.style.is_guided) == (True, False)
    assert made.formats.shown == {"<tool_call>", "<think>"}
    assert form(HERMES, special=["<think>"]).plan.markers is None
    assert form(HERMES).plan.markers == ("<think>", "</think>")
    assert form(HARMONY, special=SPECIAL).formats.shown == set(SPECIAL)


def test_the_end_of_the_prompt_says_whether_the_answer_begins_in_reasoning():
    made = form(HERMES, tool_choice="none", tools=None)
    for prompt, reasoning in (("a<think>\n", "Hm."), ("<think>\n\n</think>\n\n", ""), ("a", "")):
        reader = made.after(prompt).reader()
        split = reader.feed("Hm.</think>Yes.") + reader.flush()
        assert split.reasoning == reasoning
        assert split.text == ("Yes." if reasoning else "Hm.</think>Yes.")


def test_one_call_at_most_holds_for_calls_without_a_grammar():
    text = "<tool_call>\n<function=look>\n</function>\n</tool_call>" * 2
    for more, count in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        reader = form(CODER, **more).reader()
        assert len((reader.feed(text) + reader.flush()).calls) == count == reader.num_calls


def test_templates_get_earlier_reasoning_and_arguments_in_their_own_form():
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm."}
    body = parse_body(json.encode({"model": "m", "messages": [said]}), ChatBody)
    for template, key, arguments in (
        (HERMES, "reasoning_content", {"a": 1}),
        (HARMONY, "thinking", {"a": 1}),
        (list(SIGNS)[4], "reasoning_content", '{"a": 1}'),
    ):
        [message] = template_messages(formats_of(template, frozenset()), body.messages)
        assert message[key] == "Hm."
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
