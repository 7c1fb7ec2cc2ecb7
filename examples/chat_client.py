"""Streams one answer from a running baton, and prints what the server counted.

    python examples/chat_client.py "Why is the sky blue?"

Needs `pip install openai`. BATON_URL names the router (default http://127.0.0.1:8000), BATON_API_KEY its key,
if it asks for one.
"""

import os
import sys
import time

from openai import OpenAI

QUESTION = "Why is the sky blue?"


def main(question: str) -> None:
    """Asks `question` and prints the answer as it arrives."""
    url = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("BATON_API_KEY", "none"))
    model = client.models.list().data[0].id
    started, first = time.monotonic(), 0.0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=120,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            first = first or time.monotonic() - started
            sys.stdout.write(choice.delta.content or "")
            sys.stdout.flush()
        if chunk.usage is not None:
            counted = f"{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out"
            sys.stdout.write(f"\n\n{model}: {counted}, first after {first * 1000:.0f} ms\n")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or QUESTION)
