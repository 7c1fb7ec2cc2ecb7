"""Reasoning and tool calls in a model's own form, over HTTP with the official client: whole, streamed, in
Responses, with their tokens counted."""

import httpx
import openai
import pytest
from baton.cluster.protocol.messages import Reserve
from baton.router.formats.harmony import SPECIAL
from baton.tests.cluster.router_fakes import MODEL, Script, routers, save_tokenizer
from transformers import PreTrainedTokenizerFast

SHOWS_TOOLS = "{% for t in tools or [] %}{{ t['function']['name'] }}\n{% endfor %}"
TURNS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['reasoning_content'] or m['thinking'] }}"
    "{{ m['content'] }}\n{% endfor %}"
)
THINKING = SHOWS_TOOLS + TURNS + "{# <tool_call> #}assistant: <think>\n"
HARMONY = SHOWS_TOOLS + TURNS + "<|start|>assistant{# <|channel|> #}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
CALLED = (
    "<|channel|>analysis<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.look <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)


def save(directory, template, special=()):
    made = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(directory))
    made.add_special_tokens({"additional_special_tokens": list(special)})
    made.chat_template = template
    made.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    directory = tmp_path_factory.mktemp("thinking")
    with routers(directory, save(directory, THINKING)) as make:
        yield make()[0]


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    directory = tmp_path_factory.mktemp("harmony")
    with routers(directory, save(directory, HARMONY, SPECIAL)) as make:
        yield make()[0]


@pytest.fixture
def answering(request):
    """answering(running, text) -> client: the workers of `running` answer with `text`."""
    opened = []

    def answer(running, text):
        output = running.tokenizer._encode(running.tokenizer._backend, text, add_special_tokens=False)
        if not running.workers:
            running.script = Script(output)
            running.pair(running.script, max_context=2048)
        running.script.output = output
        client = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60)
        opened.append(client)
        return client

    yield answer
    for client in opened:
        client.close()


def last_prompt(running):
    return running.tokenizer.decode(running.workers[1].of(Reserve)[-1].prompt_ids)


def test_reasoning_is_a_field_of_its_own_and_its_tokens_are_counted(thinking, answering):
    client = answering(thinking, "Hm, hm.\n</think>\n\nYes.")
    reply = client.chat.completions.create(**ASKED)
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Yes.", "Hm, hm.", "Hm, hm.")
    num_thoughts = len(thinking.tokenizer.encode("Hm, hm.\n</think>"))
    assert reply.usage.completion_tokens_details.reasoning_tokens in (num_thoughts, num_thoughts + 1)
    chunks = list(client.chat.completions.create(**ASKED, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_reasoning_is_an_item_of_a_response_and_goes_back_to_the_template(thinking, answering):
    client = answering(thinking, "Hm, hm.\n</think>\n\nYes.")
    made = client.responses.create(model=MODEL, input="hi")
    thought, said = made.output
    assert (thought.type, thought.summary, thought.content[0].text) == ("reasoning", [], "Hm, hm.")
    assert (said.content[0].text, made.output_text) == ("Yes.", "Yes.")
    assert made.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model=MODEL, input="hi") as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert [kind for kind in kinds if "reasoning_text" in kind][-1] == "response.reasoning_text.done"
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm, hm."
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    client.responses.create(model=MODEL, input=[*made.output, {"role": "user", "content": "go on"}])
    assert "assistant: Hm, hm.Yes." in last_prompt(thinking)


def test_a_grammar_begins_after_the_reasoning(thinking, answering):
    client = answering(thinking, 'Hm.</think>{"a": 1}')
    reply = client.chat.completions.create(**ASKED, response_format={"type": "json_object"})
    assert reply.choices[0].message.content == '{"a": 1}'
    assert "thoughts" in thinking.workers[1].of(Reserve)[-1].sampling.grammar
    called = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    client = answering(thinking, f"I could {called}</think>\n\n{called}")
    message = client.chat.completions.create(**ASKED, tools=[TOOL], tool_choice="required").choices[0].message
    assert (message.reasoning_content, len(message.tool_calls)) == (f"I could {called}", 1)
    assert last_prompt(thinking).startswith("look\n")  # the template shows the tools


def test_calls_between_control_tokens_are_read(harmony, answering):
    client = answering(harmony, CALLED)
    reply = client.chat.completions.create(**ASKED, tools=[TOOL])
    message = reply.choices[0].message
    assert (reply.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert message.reasoning_content == "Let me look."
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"city": "Rome"}')
    assert not harmony.workers[1].of(Reserve)[-1].sampling.grammar
    chunks = list(client.chat.completions.create(**ASKED, tools=[TOOL], stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(call.function.arguments for call in calls) == '{"city": "Rome"}'
    again = [*ASKED["messages"], message.model_dump(exclude_none=True)]
    again.append({"role": "tool", "tool_call_id": call.id, "content": "hot"})
    answering(harmony, "<|channel|>final<|message|>It is hot.<|return|>")
    reply = client.chat.completions.create(**ASKED | {"messages": again}, tools=[TOOL])
    assert reply.choices[0].message.content == "It is hot."
    assert "assistant: Let me look." in last_prompt(harmony)


def test_a_forced_call_follows_a_grammar_whatever_the_format(harmony, answering):
    client = answering(harmony, '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>')
    message = client.chat.completions.create(**ASKED, tools=[TOOL], tool_choice="required").choices[0].message
    assert message.tool_calls[0].function.arguments == '{"a": 1}'
    assert harmony.workers[1].of(Reserve)[-1].sampling.grammar
    assert "You may call these functions" in last_prompt(harmony)


def test_malformed_calls_and_cut_answers_are_text(harmony, answering):
    client = answering(harmony, "<|channel|>commentary to=functions.look<|message|>{oops<|call|>")
    choice = client.chat.completions.create(**ASKED, tools=[TOOL]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content.endswith("to=functions.look<|message|>{oops")
    client = answering(harmony, CALLED)
    choice = client.chat.completions.create(**ASKED | {"max_tokens": 9}, tools=[TOOL]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("length", None, None)


def test_flags_switch_the_readers_off(tmp_path):
    with routers(tmp_path, save(tmp_path, THINKING)) as make:
        running, script = make(tool_parser="none", reasoning_parser="none")
        script.output = running.tokenizer.encode("Hm.</think>Yes.")
        running.pair(script, max_context=2048)
        reply = httpx.post(
            running.url + "/v1/chat/completions", json=ASKED | {"tools": [TOOL]}, timeout=60
        ).json()
        assert reply["choices"][0]["message"] == {
            "content": "Hm.</think>Yes.",
            "role": "assistant",
            "refusal": None,
        }
        assert "You may call these functions" in last_prompt(running)
