"""Prints prompts for `baton draft collect --prompts`: chats of mixed kinds and languages, one per line.

    python examples/training_prompts.py 20000 > prompts.jsonl
    baton draft collect --model MODEL --prompts prompts.jsonl --out samples

A drafter learns what its samples hold. The prompts of your users are the best source; these are for a start
without users. training_prompts.json has the kinds, each with its chats, and the words that fill them.
"""

import json
import random
import re
import sys
from pathlib import Path

GRAMMAR = Path(__file__).with_suffix(".json")
SYSTEM = "system: "


def filled(text: str, words: dict[str, list[str]], pick: random.Random) -> str:
    """`text` with each {name} replaced by one of `words[name]`, which may hold names too."""
    return re.sub(r"\{(\w+)\}", lambda slot: filled(pick.choice(words[slot[1]]), words, pick), text)


def messages(turns: list[str], words: dict[str, list[str]], pick: random.Random) -> list[dict[str, str]]:
    """A chat of `turns`: an optional system prompt, then user and assistant in turn."""
    chat = [{"role": "system", "content": filled(turns[0].removeprefix(SYSTEM), words, pick)}]
    chat = chat if turns[0].startswith(SYSTEM) else []
    for i, turn in enumerate(turns[len(chat) :]):
        role = "assistant" if i % 2 else "user"
        chat.append({"role": role, "content": filled(turn, words, pick)})
    return chat


def main(number: int) -> None:
    """Prints `number` chats as JSON lines, the same ones for the same number."""
    grammar = json.loads(GRAMMAR.read_text(encoding="utf-8"))
    kinds, pick = list(grammar["kinds"].values()), random.Random(0)
    for _ in range(number):
        chat = messages(pick.choice(pick.choice(kinds)), grammar["words"], pick)
        print(json.dumps({"messages": chat}, ensure_ascii=False))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
