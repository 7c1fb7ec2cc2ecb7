"""Lets the model call a function of this program, and answer with what it returned.

    python examples/tools.py "What is the weather in Paris?"

Needs `pip install openai`. BATON_URL and BATON_API_KEY are as in chat_client.py. The arguments of a call
follow the function's JSON schema, whatever the model: baton constrains sampling to it.
"""

import json
import os
import sys
from typing import Any

from openai import OpenAI

QUESTION = "What is the weather in Paris?"
MAX_ROUNDS = 4
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def weather(city: str, unit: str) -> dict[str, Any]:
    """Stands in for a real service."""
    return {"city": city, "temperature": 21 if unit == "celsius" else 70, "unit": unit, "sky": "clear"}


def main(question: str) -> None:
    """Asks `question` and runs the calls of the model until it answers in text."""
    url = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("BATON_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for round_number in range(MAX_ROUNDS):
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[WEATHER],  # type: ignore[list-item]
            tool_choice="auto" if round_number else "required",
            parallel_tool_calls=False,
            max_completion_tokens=120,
            temperature=0,
        )
        message = reply.choices[0].message
        if message.tool_calls and reply.choices[0].finish_reason == "length":
            raise SystemExit("max_completion_tokens cut a call")
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(f"answer: {message.content}")
            return
        for call in message.tool_calls:
            if call.type != "function":
                continue
            result = weather(**json.loads(call.function.arguments))
            print(f"call: {call.function.name}({call.function.arguments}) -> {json.dumps(result)}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    print(f"no answer after {MAX_ROUNDS} rounds of calls")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or QUESTION)
