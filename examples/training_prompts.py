"""Prints prompts for `baton draft collect --prompts`: chats of mixed kinds and languages, one per line.

    python examples/training_prompts.py 20000 > prompts.jsonl
    baton draft collect --model MODEL --prompts prompts.jsonl --out samples

A drafter learns what its samples hold. The prompts of your users are the best source; these are for a start
without users. No two lines are the same. training_prompts.json has the kinds, each with its chats, and the
words that fill them.
"""

import json
import random
import re
import sys
from pathlib import Path

GRAMMAR = Path(__file__).with_suffix(".json")
SYSTEM = "system: "


def filled(text: str, words: dict[str, list[str]], pick: random.Random, chosen: dict[str, str]) -> str:
    """`text` with each {name} replaced by one of `words[name]`, which may hold names too. {name#1} is one
    word in all of a chat, kept in `chosen`.
    """

    def word(slot: re.Match[str]) -> str:
        if slot[0] in chosen:
            return chosen[slot[0]]
        found = filled(pick.choice(words[slot[1]]), words, pick, chosen)
        if slot[2]:
            chosen[slot[0]] = found
        return found

    return re.sub(r"\{(\w+)(#\d)?\}", word, text)


def messages(turns: list[str], words: dict[str, list[str]], pick: random.Random) -> list[dict[str, str]]:
    """A chat of `turns`: an optional system prompt, then user and assistant in turn."""
    chosen: dict[str, str] = {}
    texts = [filled(turn, words, pick, chosen) for turn in turns]
    chat = []
    if texts[0].startswith(SYSTEM):
        chat.append({"role": "system", "content": texts.pop(0).removeprefix(SYSTEM)})
    for i, text in enumerate(texts):
        chat.append({"role": "assistant" if i % 2 else "user", "content": text})
    return chat


def main(number: int) -> None:
    """Prints `number` different chats as JSON lines, the same ones for the same number."""
    grammar = json.loads(GRAMMAR.read_text(encoding="utf-8"))
    kinds, pick = list(grammar["kinds"].values()), random.Random(0)
    printed: set[str] = set()
    tries = 0
    while len(printed) < number and tries < 10 * number + 1000:
        tries += 1
        chat = messages(pick.choice(pick.choice(kinds)), grammar["words"], pick)
        line = json.dumps({"messages": chat}, ensure_ascii=False)
        if line not in printed:
            printed.add(line)
            print(line)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
