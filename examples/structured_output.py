"""Reads a text into a typed object. The answer follows the JSON schema of the class, whatever the model.

    python examples/structured_output.py "Ada Lovelace, born 1815, wrote the first program."

Needs `pip install openai`. BATON_URL and BATON_API_KEY are as in chat_client.py.
"""

import os
import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

TEXT = "Ada Lovelace, born 1815, wrote the first program for the Analytical Engine."


class Person(BaseModel):
    """What is read from the text."""

    name: str = Field(max_length=60)
    born: int = Field(ge=0, le=2100)
    field: Literal["mathematics", "physics", "literature", "other"]


def main(text: str) -> None:
    """Asks for a Person and prints it."""
    url = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("BATON_API_KEY", "none"))
    model = client.models.list().data[0].id
    reply = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": f"Who is this text about? {text}"}],
        response_format=Person,
        max_completion_tokens=150,
        temperature=0,
    )
    person = reply.choices[0].message.parsed
    if person is None:  # max_completion_tokens cut it
        raise SystemExit(f"no whole answer: {reply.choices[0].message.content!r}")
    print(person.model_dump_json(indent=1))


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or TEXT)
