"""The API over real workers of a toy model: prompts are judged as transformers judges them."""

import json
import shutil

import jsonschema
import openai
import pytest
import torch
from baton.tests.cluster.conftest import SMALL
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import served_model, serving
from baton.tests.parity.toy_models import reference_logits, reference_model


@pytest.fixture(scope="module")
def roomy_dir(tmp_path_factory, toy_checkpoint):
    """A toy whose context holds a description of tools, letter by letter."""
    directory = tmp_path_factory.mktemp("roomy")
    shutil.copytree(
        toy_checkpoint("llama", vocab_size=330, max_position_embeddings=2048), directory, dirs_exist_ok=True
    )
    return save_tokenizer(directory)


@pytest.fixture(scope="module")
def client(roomy_dir):
    with serving(roomy_dir, **SMALL | {"kv_memory_mb": 16}) as cluster:
        with openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
            made.model = served_model(cluster)
            yield made


@pytest.mark.parametrize("again", [False, True], ids=["cold", "cached"])
def test_echo_with_logprobs_gives_transformers_figures_and_the_next_token(client, roomy_dir, again):
    ids = [(7 * i) % 320 + 3 for i in range(40)]
    wanted = torch.log_softmax(reference_logits(reference_model(roomy_dir), ids), dim=1)
    options = {
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    reply = client.completions.create(model=client.model, prompt=[ids], **options)
    choice = reply.choices[0]
    got, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert (got[0], top[0]) == (None, None)
    assert got[1:-1] == pytest.approx([wanted[i, token].item() for i, token in enumerate(ids[1:])], abs=1e-4)
    assert choice.token_ids == [*ids, int(wanted[-1].argmax())]
    assert got[-1] == max(top[-1].values()), "greedy: the very same figure"
    assert [max(row.values()) for row in top[1:-1]] == pytest.approx(
        wanted[:-1].max(dim=1).values.tolist(), abs=1e-4
    )
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == 41
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (40, 1)


def test_choices_of_one_seed_differ_and_repeat(client):
    def ask():
        made = client.completions.create(model=client.model, prompt="hello", n=3, seed=5, max_tokens=12)
        return [choice.text for choice in made.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_min_tokens_holds_against_stop_tokens(client):
    body = {"min_tokens": 9, "stop_token_ids": list(range(3, 330))}
    reply = client.completions.create(model=client.model, prompt="hello", max_tokens=30, extra_body=body)
    assert 9 < reply.usage.completion_tokens < 30


KINDS = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": KINDS}},
    {"type": "function", "function": {"name": "stop"}},
]


def chat(client, **more):
    return client.chat.completions.create(
        **{"model": client.model, "messages": MESSAGES, "max_tokens": 200} | more
    )


def test_an_answer_follows_its_schema(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "kinds", "schema": KINDS, "strict": True}}
    for seed in range(4):
        reply = chat(client, response_format=wanted, seed=seed)
        jsonschema.validate(json.loads(reply.choices[0].message.content), KINDS)
        assert reply.choices[0].finish_reason == "stop"
    body = {"response_format": wanted}
    text = (
        client.completions.create(model=client.model, prompt="x", max_tokens=200, extra_body=body)
        .choices[0]
        .text
    )
    jsonschema.validate(json.loads(text), KINDS)
    text = client.responses.create(
        model=client.model,
        input="x",
        text={"format": {"type": "json_schema", "name": "kinds", "schema": KINDS}},
    ).output_text
    jsonschema.validate(json.loads(text), KINDS)


def test_a_tool_that_must_be_called_is_called_and_its_result_is_taken(client):
    reply = chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "paint"}}, seed=1)
    message = reply.choices[0].message
    assert (reply.choices[0].finish_reason, message.content, len(message.tool_calls)) == (
        "tool_calls",
        None,
        1,
    )
    called = message.tool_calls[0]
    assert called.function.name == "paint"
    jsonschema.validate(json.loads(called.function.arguments), KINDS)
    result = {"role": "tool", "tool_call_id": called.id, "content": "done"}
    again = chat(client, messages=[*MESSAGES, message.model_dump(), result], tools=TOOLS, tool_choice="none")
    assert again.choices[0].message.tool_calls is None
    plain = chat(client, max_tokens=1).usage.prompt_tokens
    assert again.usage.prompt_tokens > plain + len(called.function.arguments), (
        "call and result are in the prompt"
    )


def test_a_streamed_call_is_the_whole_one_in_parts(client):
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    whole = chat(client, **asked).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **asked)]
    parts = [part for choice in chunks for part in choice.delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.id] == [call.function.name for call in whole]
    assert "".join(part.function.arguments for part in parts) == whole[0].function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(choice.delta.content for choice in chunks)


def test_a_response_has_its_calls_as_items(client):
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    asked = {
        "model": client.model,
        "input": "x",
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    made = client.responses.create(**asked)
    (item,) = made.output
    assert (item.type, item.name, item.status) == ("function_call", "paint", "completed")
    jsonschema.validate(json.loads(item.arguments), KINDS)
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
    again = client.responses.create(
        **asked | {"input": [{"role": "user", "content": "x"}, item.model_dump(), output]}
    )
    assert again.output[0].type == "function_call"
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[0].type == "function_call"
    assert "response.function_call_arguments.done" in kinds


def test_a_grammar_works_with_other_request_options(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "kinds", "schema": KINDS}}
    reply = chat(
        client, response_format=wanted, n=3, logprobs=True, top_logprobs=2, frequency_penalty=0.5, seed=4
    )
    for choice in reply.choices:
        jsonschema.validate(json.loads(choice.message.content), KINDS)
        assert len(choice.logprobs.content) >= len(choice.message.content) / 8
