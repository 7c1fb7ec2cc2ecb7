"""Request bodies: every field is parsed, every wrong one is named; replies are the API's objects."""

import json

import pytest
from baton.cluster.protocol.messages import TokenLogprob
from baton.router.answers.chat_replies import ChatBuilder
from baton.router.answers.generation import Choice, ChoiceOptions, Piece, Prompt, TokenText
from baton.router.answers.replies import Frame, sse
from baton.router.api.body_checks import (
    check_chat,
    check_token_ids,
    logprobs_of,
    max_new_of,
    parse_body,
    prompts_of,
    sampling_of,
)
from baton.router.api.body_types import ChatBody, CompletionBody
from baton.router.api.response_bodies import ResponseBody, chat_of, told_of
from baton.router.errors import ApiError
from baton.router.formats.parts import CallPart
from baton.router.rooms.effects import Deliver
from baton.router.text.grammars import plan_of
from baton.router.text.tokenizer import load_tokenizer
from baton.tests.cluster.router_fakes import save_tokenizer

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def chat(**more):
    return parse_body(json.dumps(CHAT | more).encode(), ChatBody)


def text(**more):
    return parse_body(json.dumps(TEXT | more).encode(), CompletionBody)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "\na", 'a"', "x" * 65])
def test_a_name_of_a_function_is_letters_digits_and_dashes_to_its_end(name):
    with pytest.raises(ApiError) as caught:
        chat(tools=[{"type": "function", "function": {"name": name}}])
    assert (caught.value.status, caught.value.body.param) == (400, "tools")


def test_defaults_are_the_apis():
    sampling = sampling_of(chat(), max_new=5, choice=0)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (1.0, 1.0, 0, 5)
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.ignore_eos) == ({}, [], False)


def test_a_mark_of_the_byte_order_is_no_part_of_a_body():
    raw = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    assert parse_body(b"\xef\xbb\xbf" + raw, ChatBody) == parse_body(raw, ChatBody)


def test_as_many_stop_strings_as_evaluations_send_are_taken():
    body = {"prompt": "a", "stop": [f"\n{number}" for number in range(64)]}
    assert len(parse_body(json.dumps(body).encode(), CompletionBody).stops) == 64
    with pytest.raises(ApiError, match="65 strings, at most 64"):
        parse_body(json.dumps(body | {"stop": [*body["stop"], "a"]}).encode(), CompletionBody)


@pytest.mark.parametrize(
    "field", ["n", "stop", "seed", "temperature", "top_p", "logit_bias", "stream", "tools", "user"]
)
def test_null_is_the_same_as_absent(field):
    body = chat(**{field: None})
    assert sampling_of(body, max_new=5, choice=0).temperature == 1.0
    assert body.num_choices == 1
    assert body.stops == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tool_choice", "none"),
        ("store", False),
        ("user", "me"),
    ],
)
def test_default_values_of_refused_fields_are_accepted(field, value):
    assert chat(**{field: value}).model == "m"


def test_seeds_differ_per_choice_and_stay_in_range():
    body = chat(seed=2**63 - 1)
    seeds = [sampling_of(body, max_new=1, choice=choice).seed for choice in range(3)]
    assert seeds == [2**63 - 1, 0, 1]
    assert sampling_of(chat(seed=-1), max_new=1, choice=0).seed == 2**63 - 1


def test_top_k_minus_one_is_off():
    assert sampling_of(chat(top_k=-1), max_new=1, choice=0).top_k == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompt_forms(prompt, expected):
    assert prompts_of(text(prompt=prompt)) == expected


@pytest.mark.parametrize("prompt", ["", [], [[]], ["", "a"], ["a", 1], [1, [2]]])
def test_empty_or_mixed_prompts_are_refused(prompt):
    with pytest.raises(ApiError) as caught:
        prompts_of(text(prompt=prompt))
    assert caught.value.body.param == "prompt"


def test_content_parts_are_joined_and_developer_is_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = chat(messages=[{"role": "developer", "content": parts}]).messages[0]
    assert message.as_template_input() == {"role": "system", "content": "ab"}


def test_length_and_logprob_fields_of_both_apis():
    assert max_new_of(chat()) is None
    assert max_new_of(chat(max_completion_tokens=7)) == 7
    assert max_new_of(chat(max_tokens=7, max_completion_tokens=7)) == 7
    assert [
        logprobs_of(body) for body in (chat(), chat(logprobs=True), chat(logprobs=True, top_logprobs=4))
    ] == [-1, 0, 4]
    assert [logprobs_of(body) for body in (text(), text(logprobs=0), text(logprobs=5))] == [-1, 0, 5]


def test_token_ids_are_checked_in_every_field():
    check_token_ids(chat(logit_bias={"9": 1}, stop_token_ids=[9]), [9], 10)
    for body, ids, param in [
        (chat(), [10], "prompt"),
        (chat(), [-1], "prompt"),
        (chat(logit_bias={"10": 1}), [], "logit_bias"),
        (chat(stop_token_ids=[10]), [], "stop_token_ids"),
    ]:
        with pytest.raises(ApiError, match="vocabulary of 10") as caught:
            check_token_ids(body, ids, 10)
        assert caught.value.body.param == param


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nul", b'{"a": NaN}', b"\xff", b'{"model": "\\ud800"}', b"[" * 10**5]
)
def test_a_body_that_is_not_json_is_one_clear_error(raw):
    with pytest.raises(ApiError) as caught:
        parse_body(raw, ChatBody)
    assert caught.value.status == 400


def test_errors_echo_nothing_unprintable():
    with pytest.raises(ApiError) as caught:
        chat(**{"evil\x1b[31m\n\u202e": 1})
    assert all(char.isascii() and char.isprintable() for char in caught.value.body.message)


def test_event_has_one_line_for_every_reader():
    for odd in ("\u2028", "\u2029", "\x85", "\n", "\r"):
        event = sse(json.dumps(odd, ensure_ascii=False).encode())
        assert len(event.decode().splitlines()) == 2
        assert json.loads(event.removeprefix(b"data: ")) == odd


def test_infinite_logprobs_become_the_apis_number():
    builder = ChatBuilder(Frame(id="x", created=0, model="m", num_top=1))
    tokens = [
        TokenText("a", b"a", value, [("b", b"b", value)], 0) for value in (float("-inf"), float("nan"), -2.0)
    ]
    chunk = json.loads(builder.chunk(0, Piece("a", tokens)).removeprefix(b"data: "))
    content = chunk["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [-9999.0, -9999.0, -2.0]
    assert [token["top_logprobs"][0]["logprob"] for token in content] == [-9999.0, -9999.0, -2.0]


def test_an_event_without_content_makes_no_chunk():
    builder = ChatBuilder(Frame(id="x", created=0, model="m"))
    assert builder.chunk(0, Piece("")) == b""
    assert builder.closing(None, None) == b""


def test_a_call_in_one_chunk_equals_the_call_in_several():
    """Clients read the first call of a chunk."""
    parts = [
        CallPart(0, arguments=' "x"}'), CallPart(1, "call_b", "f"), CallPart(1, arguments="{"), CallPart(1,
        arguments="}"),
        CallPart(2, "call_c", "g"),
    ]  # fmt: skip
    builder = ChatBuilder(Frame(id="x", created=0, model="m", num_top=0))
    piece = Piece("hi", [TokenText("a", b"a", -1.0, [], 0)], finish="tool_calls", calls=parts)
    events = [
        json.loads(event.removeprefix(b"data: ")) for event in builder.chunk(0, piece).split(b"\n\n") if event
    ]
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"]["tool_calls"] for choice in choices] == [
        [{"index": 0, "function": {"arguments": ' "x"}'}}],
        [{"index": 1, "function": {"arguments": "{}", "name": "f"}, "id": "call_b", "type": "function"}],
        [{"index": 2, "function": {"arguments": "", "name": "g"}, "id": "call_c", "type": "function"}],
    ]
    assert [choice["delta"].get("content") for choice in choices] == ["hi", None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "tool_calls"]
    assert [choice["logprobs"] is None for choice in choices] == [True, True, False]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(save_tokenizer(tmp_path_factory.mktemp("tok"))))


def test_the_end_releases_withheld_text_in_order(tokenizer):
    choice = Choice(tokenizer, ChoiceOptions(stops=("yz",)))
    piece = choice.add(Deliver([*tokenizer.encode("xy"), tokenizer.encode("😀")[0]], []))
    assert (piece.text, choice.end("length")) == ("x", Piece("y�", finish="length"))


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_stop_string_counts_the_same_tokens_however_they_come(tokenizer, step):
    ids = tokenizer.encode("one two END three")
    choice = Choice(tokenizer, ChoiceOptions(stops=("END",), num_top=0))
    pieces = []
    for at in range(0, len(ids), step):
        part = ids[at : at + step]
        pieces.append(choice.add(Deliver(part, [TokenLogprob(logprob=-1.0) for _ in part])))
    assert "".join(piece.text for piece in pieces) == "one two "
    assert (choice.finish, choice.num_tokens) == ("stop", len(tokenizer.encode("one two END")))
    assert sum(len(piece.logprobs) for piece in pieces) == choice.num_tokens
    assert choice.end("length") == Piece("")


def test_history_from_an_answers_own_message_is_taken():
    said = {"role": "assistant", "content": "Hello", "refusal": None, "annotations": None, "audio": None}
    said |= {"function_call": None, "tool_calls": None, "name": None}
    parsed = chat(messages=[said, said | {"tool_calls": [], "annotations": []}])
    assert [message.as_template_input() for message in parsed.messages] == [
        {"role": "assistant", "content": "Hello"}
    ] * 2


def test_extra_fields_of_an_answers_message_are_accepted_and_ignored():
    """`parse` of OpenAI's clients, litellm, and the AI SDK."""
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    more = {"index": 0, "function": function | {"parsed_arguments": {"a": 1}}}
    added = {"parsed": {"a": 1}, "provider_specific_fields": {"refusal": None}}
    added |= {"reasoning": None, "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]}
    cached = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    plain, full = (
        chat(messages=[{"role": "user", "content": content}, message]).messages
        for content, message in (("hi", said), (cached, said | added | {"tool_calls": [call | more]}))
    )
    assert [m.as_template_input() for m in plain] == [m.as_template_input() for m in full]
    assert chat(top_logprobs=0).logprobs is None


def test_the_model_sees_only_allowed_tools_and_calls_one():
    functions = [{"name": name, "parameters": {"type": "object"}} for name in "abc"]
    named = [{"type": "function", "name": name} for name in "ca"]
    spelled = {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": name}} for name in "ca"],
        }},
    }  # fmt: skip
    flat = {
        "tools": [{"type": "function", **function} for function in functions],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": named},
    }
    responded = parse_body(json.dumps({"model": "m", "input": "hi"} | flat).encode(), ResponseBody)
    asked = chat_of(responded)
    check_chat(asked)
    for body in (chat(**spelled), asked):
        plan = plan_of(body)
        assert ([name for name, _ in plan.tools], plan.must_call, plan.may_repeat) == (["a", "c"], True, True)
        assert [tool.function.name for tool in body.tools] == ["a", "c"]
    assert json.loads(bytes(told_of(responded).tool_choice)) == flat["tool_choice"]
    spelled["tool_choice"]["allowed_tools"]["tools"][0]["function"]["name"] = "d"
    with pytest.raises(ApiError, match="'d' is not one of the tools"):
        chat(**spelled)


def test_an_image_part_is_refused_with_the_parts_that_are_served():
    image = {"image_url": {"url": "http://x"}}
    for part in ({"type": "image_url"} | image, image | {"type": "image_url"}):
        with pytest.raises(
            ApiError, match=r"messages\[0\]\.content\[0\].*'image_url'.*content are text"
        ) as caught:
            chat(messages=[{"role": "user", "content": [part]}])
        assert caught.value.body.param == "messages"


@pytest.mark.parametrize("name", ["function_call", "audio", "refusal", "annotations"])
def test_an_unsupported_message_part_is_named_with_its_place(name):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", name: [{"id": "1"}]}]
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(CHAT | {"messages": messages}).encode(), ChatBody)
    assert caught.value.body.message.startswith(f"messages[1].{name} is not supported: ")
    assert caught.value.body.param == "messages"


def test_more_messages_than_any_chat_has_are_refused_with_the_number():
    messages = [{"role": "user", "content": "x"}] * 4097
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(CHAT | {"messages": messages}).encode(), ChatBody)
    assert "4097" in str(caught.value)
    assert "4096" in str(caught.value)
    assert len(parse_body(json.dumps(CHAT | {"messages": messages[1:]}).encode(), ChatBody).messages) == 4096


@pytest.mark.parametrize("penalty", [0.0, 1e-30, 0.0099])
def test_a_repetition_penalty_that_float32_cannot_divide_by_is_refused(penalty):
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(CHAT | {"repetition_penalty": penalty}).encode(), ChatBody)
    assert (caught.value.status, caught.value.body.param) == (400, "repetition_penalty")
    assert "0.01" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "served"), [(0, 0.0), (1e-40, 1e-3), (9e-4, 1e-3), (1e-3, 1e-3), (0.5, 0.5)]
)
def test_a_temperature_next_to_zero_is_served_as_the_coldest(asked, served):
    parsed = parse_body(json.dumps(CHAT | {"temperature": asked}).encode(), ChatBody)
    assert sampling_of(parsed, max_new=1, choice=0).temperature == served


def test_offsets_point_into_the_text_also_inside_a_character(tokenizer):
    ids = tokenizer.encode("ab😀cd")
    assert len(ids) > 6, "the emoji is several tokens"
    choice = Choice(tokenizer, ChoiceOptions(num_top=0))
    tokens = [choice.add(Deliver([token], [TokenLogprob(logprob=-1.0)])).logprobs[0] for token in ids]
    assert b"".join(token.data for token in tokens).decode() == "ab😀cd"
    whole = "ab😀cd"
    for token in tokens:
        if not token.text.startswith("bytes:"):
            assert whole[token.at :].startswith(token.text)
    assert {token.at for token in tokens if token.text.startswith("bytes:\\x")} <= {2, 3}
    assert sum(token.text.startswith("bytes:\\x") for token in tokens) > 1


def test_an_echoed_prompt_precedes_the_output_with_its_logprobs(tokenizer):
    ids, starts = tokenizer.encode_with_starts("one two")
    choice = Choice(tokenizer, ChoiceOptions(num_top=1), Prompt(ids, "one two", starts))
    scores = [TokenLogprob(logprob=-float(i), top=[(token, -float(i))]) for i, token in enumerate(ids[1:], 1)]
    piece = choice.add(Deliver(tokenizer.encode("!"), [TokenLogprob(logprob=-9.0)], scores))
    assert piece.text == "one two!"
    assert [token.logprob for token in piece.logprobs] == [
        None,
        *[-float(i) for i in range(1, len(ids))],
        -9.0,
    ]
    assert [token.at for token in piece.logprobs][-1] == len("one two")
    assert (choice.num_tokens, len(piece.ids)) == (1, len(ids) + 1)
    with pytest.raises(ValueError, match="log probabilities of a prompt"):
        Choice(tokenizer, ChoiceOptions(num_top=0), Prompt(ids)).add(
            Deliver([5], [TokenLogprob(logprob=-1.0)], scores[1:])
        )


def test_a_silent_choice_shows_the_prompt_only(tokenizer):
    choice = Choice(tokenizer, ChoiceOptions(is_silent=True), Prompt(tokenizer.encode("one"), "one"))
    assert choice.add(Deliver([9], [])).text == "one"
    assert (choice.end("length").text, choice.num_tokens) == ("", 0)


def test_a_stop_string_does_not_count_before_min_tokens(tokenizer):
    ids = tokenizer.encode("END and END more")
    choice = Choice(tokenizer, ChoiceOptions(stops=("END",), min_tokens=len(tokenizer.encode("END and "))))
    assert choice.add(Deliver(ids, [])).text == "END and "
    assert choice.finish == "stop"
