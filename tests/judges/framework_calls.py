"""The first examples of the guides of litellm, LlamaIndex and OpenAI's agents SDK, in their interpreter.

Where a loop of calls and results shall come to its end, the answers are told (`SAY:`); where answers shall
follow a schema, a model gives them.
"""

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from typing import Literal, TypeVar

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}

import agents
import litellm
import openai
from call_groups import make_all
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel

URL, MODEL, SAYING_URL, SAYING_MODEL = sys.argv[1:5]
LOOP = asyncio.new_event_loop()
PROVIDERS = ("openai", "hosted_vllm")
T = TypeVar("T")


class Paint(BaseModel):
    """What a parsed answer becomes."""

    kind: Literal["red", "green"]
    coats: Literal[1, 2] | None


def weather(city: str) -> str:
    """The weather of a city."""
    return f"SAY:sunny in {city}"


def calls_of(*cities: str) -> str:
    made = (json.dumps({"name": "weather", "arguments": {"city": city}}) for city in cities)
    return "SAY:" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in made)


def run(work: Coroutine[None, None, T]) -> T:
    return LOOP.run_until_complete(asyncio.wait_for(work, 60))


# --- litellm ------------------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def lite(provider, said="SAY:hello world", *, url=SAYING_URL, model=SAYING_MODEL, **more):
    asked = {
        "model": f"{provider}/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "num_retries": 0,
        "timeout": 60,
    }
    return litellm.completion(**asked | {"messages": [{"role": "user", "content": said}]} | more)


def litellm_answers():
    for provider in PROVIDERS:
        whole = lite(provider)
        assert whole.choices[0].message.content == "hello world"
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        built = litellm.stream_chunk_builder(
            list(lite(provider, stream=True, stream_options={"include_usage": True}))
        )
        assert built.choices[0].message.content == "hello world"
        assert built.usage.total_tokens == whole.usage.total_tokens


def litellm_tools():
    for provider in PROVIDERS:
        said = [{"role": "user", "content": calls_of("Rome", "Oslo")}]
        whole = lite(provider, messages=said, tools=[TOOL]).choices[0].message
        streamed = litellm.stream_chunk_builder(
            list(lite(provider, messages=said, tools=[TOOL], stream=True))
        )
        for message in (whole, whole.model_dump(), streamed.choices[0].message):
            calls = message["tool_calls"]
            assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Rome", "Oslo"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": weather("Oslo")} for call in calls
            ]
            reply = lite(provider, messages=[*said, message, *results], tools=[TOOL])
            assert reply.choices[0].message.content == "sunny in Oslo"


def litellm_schemas():
    for provider in PROVIDERS:
        reply = lite(provider, "paint", url=URL, model=MODEL, response_format=Paint, max_tokens=60)
        Paint.model_validate_json(reply.choices[0].message.content)


def litellm_constraints():
    """Extra fields of vLLM, as its users give them to litellm."""
    words = ["positive", "negative"]
    outputs = {"structured_outputs": {"choice": words}}
    for provider, more in (
        ("hosted_vllm", {"guided_choice": words}),
        ("hosted_vllm", outputs),
        ("openai", {"extra_body": {"guided_choice": words}}),
        ("hosted_vllm", {"guided_regex": "positive|negative", "top_k": 5, "min_p": 0.01}),
    ):
        reply = lite(provider, "paint", url=URL, model=MODEL, max_tokens=60, **more)
        assert reply.choices[0].message.content in words, more
    said = [{"role": "user", "content": "SAY: for it"}, {"role": "assistant", "content": "I am"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    reply = lite("hosted_vllm", messages=said, **more)
    assert reply.choices[0].message.content.startswith("I am")


def litellm_errors():
    for provider in PROVIDERS:
        for wrong, error in (
            ({"model": f"{provider}/other"}, litellm.NotFoundError),
            ({"temperature": -1}, litellm.BadRequestError),
            ({"said": "x " * 20_000}, litellm.BadRequestError),
        ):
            try:
                lite(provider, **wrong)
            except error:
                continue
            raise AssertionError(f"{str(wrong)[:60]} was served")


# --- LlamaIndex ---------------------------------------------------------------------------------------------


def llama(kind=OpenAILike, *, url=SAYING_URL, model=SAYING_MODEL, **more):
    fields = {"is_function_calling_model": True, "context_window": 4096, "max_retries": 0, "timeout": 60}
    fields |= {"is_chat_model": True} if kind is OpenAILike else {}
    return kind(**fields | {"model": model, "api_base": f"{url}/v1", "api_key": "none"} | more)


def llama_index_answers():
    for kind in (OpenAILike, OpenAILikeResponses):
        told = [ChatMessage(role="user", content="SAY:hello world")]
        assert llama(kind).chat(told).message.content == "hello world"
        assert "".join(part.delta or "" for part in llama(kind).stream_chat(told)) == "hello world"


def llama_index_tools():
    tools = [FunctionTool.from_defaults(weather)]
    for kind in (OpenAILike, OpenAILikeResponses):
        model = llama(kind)
        *_, last = model.stream_chat_with_tools(tools, user_msg=calls_of("Rome", "Oslo"))
        asked = [call.tool_kwargs["city"] for call in model.get_tool_calls_from_response(last)]
        assert asked == ["Rome", "Oslo"]


def llama_index_agent():
    async def ask():
        return await FunctionAgent(tools=[weather], llm=llama()).run(calls_of("Rome"))

    assert str(run(ask())) == "sunny in Rome"


def llama_index_schemas():
    model = llama(url=URL, model=MODEL, should_use_structured_outputs=True, max_tokens=60)
    assert isinstance(model.structured_predict(Paint, PromptTemplate("paint")), Paint)
    *_, last = model.stream_structured_predict(Paint, PromptTemplate("paint"))
    assert isinstance(last, Paint)


# --- OpenAI's agents SDK ------------------------------------------------------------------------------------


def models(url=SAYING_URL, model=SAYING_MODEL):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    return (agents.OpenAIResponsesModel(model, client), agents.OpenAIChatCompletionsModel(model, client))


async def streamed(agent, said):
    result = agents.Runner.run_streamed(agent, said)
    kinds = [event.type async for event in result.stream_events()]
    assert kinds.count("raw_response_event") > 4
    return result


def agents_tools():
    for model in models():
        agent = agents.Agent(
            name="a", instructions="Be brief.", model=model, tools=[agents.function_tool(weather)]
        )
        for result in (
            run(agents.Runner.run(agent, calls_of("Rome"))),
            run(streamed(agent, calls_of("Rome"))),
        ):
            assert result.final_output == "sunny in Rome"
            again = [*result.to_input_list(), {"role": "user", "content": "SAY:again"}]
            assert run(agents.Runner.run(agent, again)).final_output == "again"


def agents_sessions_and_settings():
    settings = agents.ModelSettings(
        store=False, metadata={"a": "b"}, include_usage=True, verbosity="low", top_p=0.9
    )
    for model in models():
        agent = agents.Agent(
            name="a", model=model, tools=[agents.function_tool(weather)], model_settings=settings
        )
        session = agents.SQLiteSession("s")
        run(agents.Runner.run(agent, calls_of("Rome"), session=session))
        result = run(agents.Runner.run(agent, "SAY:more", session=session))
        assert result.final_output == "more"
        assert result.raw_responses[0].usage.total_tokens > 0


def agents_schemas():
    settings = agents.ModelSettings(max_tokens=60)
    for model in models(URL, MODEL):
        agent = agents.Agent(name="a", model=model, output_type=Paint, model_settings=settings)
        for result in (run(agents.Runner.run(agent, "paint")), run(streamed(agent, "paint"))):
            assert isinstance(result.final_output, Paint)


CALLS = (
    litellm_answers, litellm_tools, litellm_schemas, litellm_constraints, litellm_errors,
    llama_index_answers, llama_index_tools, llama_index_agent, llama_index_schemas,
    agents_tools, agents_sessions_and_settings, agents_schemas,
)  # fmt: skip


def main():
    agents.set_tracing_disabled(True)
    litellm.suppress_debug_info = True
    return make_all(CALLS, "calls")


if __name__ == "__main__":
    sys.exit(main())
