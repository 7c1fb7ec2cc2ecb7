"""The first examples of the guides of langchain-openai, instructor and `llm`, in their interpreter.

Where a loop of calls and results shall come to its end, the answers are told (`SAY:`); where answers shall
follow a schema, a model gives them.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

os.environ |= {"OPENAI_API_KEY": "none", "LANGSMITH_TRACING": "false"}

import instructor
import openai
from call_groups import make_all
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL, SAYING_URL, SAYING_MODEL = sys.argv[1:5]


class Paint(BaseModel):
    """What a parsed answer becomes."""

    kind: Literal["red", "green"]
    coats: Literal[1, 2] | None


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"SAY:sunny in {city}"


def call_of(city):
    return f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': city}})}\n</tool_call>"


# --- langchain-openai ---------------------------------------------------------------------------------------


def chain(*, url=SAYING_URL, model=SAYING_MODEL, **more):
    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, **more)


def langchain_answers():
    for more in ({}, {"use_responses_api": True}):
        said = chain(**more).invoke("SAY:hello world")
        assert said.text == "hello world", said
        assert said.usage_metadata["total_tokens"] > 0
        parts = list(chain(stream_usage=True, **more).stream("SAY:hello world"))
        assert "".join(part.text for part in parts) == "hello world"
        assert len(parts) > 3


def langchain_tools():
    for more in ({}, {"use_responses_api": True}):
        model = chain(**more).bind_tools([weather])
        told = HumanMessage("SAY:" + call_of("Rome") + "\n" + call_of("Oslo"))
        said = model.invoke([told])
        assert [call["args"]["city"] for call in said.tool_calls] == ["Rome", "Oslo"]
        results = [ToolMessage("SAY:sunny", tool_call_id=call["id"]) for call in said.tool_calls]
        assert model.invoke([told, said, *results]).text == "sunny"


def langchain_schemas():
    for method in ("json_schema", "function_calling"):
        model = chain(url=URL, model=MODEL, max_tokens=200).with_structured_output(Paint, method=method)
        assert isinstance(model.invoke("paint"), Paint)


# --- instructor ---------------------------------------------------------------------------------------------


def instructor_schemas():
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        made = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=MODEL, response_model=Paint, messages=[{"role": "user", "content": "paint"}],
            max_tokens=200, max_retries=0,
        )  # fmt: skip
        assert isinstance(made, Paint)


def instructor_partials():
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60),
        mode=instructor.Mode.JSON_SCHEMA,
    )
    *_, last = client.chat.completions.create_partial(
        model=MODEL, response_model=Paint, messages=[{"role": "user", "content": "paint"}], max_tokens=200
    )
    assert last.kind in ("red", "green")


# --- llm ----------------------------------------------------------------------------------------------------


def llm(*arguments):
    """The command `llm` with the router as an OpenAI-compatible model."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "extra-openai-models.yaml").write_text(
            f"- model_id: baton\n  model_name: {SAYING_MODEL}\n  api_base: {SAYING_URL}/v1\n"
            "  supports_tools: true\n  api_key_name: none\n"
        )
        command = [str(Path(sys.executable).parent / "llm"), *arguments]
        environment = os.environ | {"LLM_USER_PATH": directory}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-300:]
        return done.stdout


def llm_answers():
    assert llm("-m", "baton", "SAY:hello world").strip() == "hello world"
    assert llm("-m", "baton", "--no-stream", "-s", "Be brief.", "SAY:hello").strip() == "hello"


def llm_tools():
    code = 'def weather(city: str) -> str:\n    "Weather."\n    return f"SAY:sunny in {city}"'
    assert "sunny in Rome" in llm("-m", "baton", "--functions", code, "SAY:" + call_of("Rome"))


CALLS = (
    langchain_answers, langchain_tools, langchain_schemas,
    instructor_schemas, instructor_partials,
    llm_answers, llm_tools,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(make_all(CALLS, "calls"))
