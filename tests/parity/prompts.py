"""Prompts for comparisons with transformers: 20 chats, 6 texts; short, long, multi-turn, code, languages.

python -m baton.tests.parity.prompts > chats.jsonl      # the chats, for `baton draft evaluate --prompt-file`
"""

import json
from dataclasses import dataclass
from typing import Any

Turn = tuple[str, str]  # role, content


@dataclass(frozen=True)
class ParityPrompt:
    """A chat, rendered with the model's template, or a raw text."""

    name: str
    turns: tuple[Turn, ...] = ()
    text: str = ""

    @property
    def is_chat(self) -> bool:
        return bool(self.turns)

    def messages(self) -> list[dict[str, str]]:
        """The chat in the form of the OpenAI API and of `apply_chat_template`."""
        return [{"role": role, "content": content} for role, content in self.turns]

    def token_ids(self, tokenizer: Any) -> list[int]:
        """The prompt's tokens, generation prompt included."""
        if not self.is_chat:
            return list(tokenizer(self.text).input_ids)
        rendered = tokenizer.apply_chat_template(self.messages(), add_generation_prompt=True, tokenize=False)
        return list(tokenizer(rendered).input_ids)


def chat(name: str, *contents: str, system: str = "") -> ParityPrompt:
    """User and assistant in turn, the user first."""
    turns = [("system", system)] if system else []
    turns += [("user" if i % 2 == 0 else "assistant", content) for i, content in enumerate(contents)]
    return ParityPrompt(name, turns=tuple(turns))


_LIGHTHOUSE = """\
The lighthouse on Skerry Point was lit for the first time on the evening of 3 October 1861. Its keeper, Thomas
Arkwright, had come from the coal harbours of the south with a wife, two daughters and a crate of books, and he
wrote in the log that night: "Lamp lit at 5.40. Wind north-west, fresh. Oil good. The children would not sleep
for the turning of the beam."

For the next eleven years he kept that log without missing a day. He recorded the weather in the morning and at
dusk, the ships that passed, the oil that was burned, and, when there was nothing else, the birds. In the spring
of 1864 he counted four hundred and twelve gannets between breakfast and noon. In the winter of the same year
the supply boat did not come for seven weeks, and the entries grow short: "Flour low." "Fished from the east
rock; three cod." "Flour finished. Anne has made bread of barley and potatoes, which is not bread." When the
boat came at last it brought flour, candles, a letter from the Board that asked why the quarterly accounts had
not been sent, and a kitten.

The storm of January 1868 is the entry for which the log is known. The wind rose through the night of the 23rd,
and by four in the morning spray was going over the lantern, which stood one hundred and thirty feet above the
sea. Two panes broke. Arkwright and his elder daughter Ellen, then sixteen, held a sheet of copper against the
frame by turns for nine hours, while the younger, Ruth, trimmed the wicks. At first light they saw the brig
Margaret Hale on the western reef with nine men in her rigging. There was no boat at the station that could live
in such a sea. Ellen took the signal line, tied it to a cork float, and let the current carry it through the gap
that the children used for their toy ships; the men of the brig caught it at the third attempt. By noon all nine
had come over on the line, the last of them the master, who had lost his boots and asked, before anything else,
whether somebody would be so kind as to write down the position of his ship.

The Board sent a medal for Thomas Arkwright. He returned it with a note: "The line was my daughter's thought and
my daughter's work. If the Board has no medal for women then it may keep this one until it has." The Board did
not answer for three years. In 1871 a parcel came with two medals in it, one engraved E. Arkwright and the other
R. Arkwright, and a letter that asked once more for the quarterly accounts.

Ellen Arkwright became keeper of the light in 1872, the first woman on that coast to hold the post under her own
name. She kept it until 1909. Her log is longer than her father's and has drawings in it.
"""  # noqa: E501

_MODULE = '''\
"""A small inventory service: items, stock movements and a report."""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date


class InventoryError(Exception):
    """Base of the service's errors."""


class UnknownItem(InventoryError):
    def __init__(self, sku: str) -> None:
        super().__init__(f"no item with sku {sku!r}")
        self.sku = sku


class NotEnoughStock(InventoryError):
    def __init__(self, sku: str, wanted: int, held: int) -> None:
        super().__init__(f"{sku}: {wanted} wanted, {held} in stock")


@dataclass(frozen=True)
class Item:
    sku: str
    name: str
    price_cents: int
    reorder_level: int = 10


@dataclass
class Movement:
    sku: str
    quantity: int  # negative: stock leaves
    day: date
    note: str = ""


@dataclass
class Inventory:
    items: dict[str, Item] = field(default_factory=dict)
    movements: list[Movement] = field(default_factory=list)

    def add_item(self, item: Item) -> None:
        if item.sku in self.items:
            raise InventoryError(f"sku {item.sku!r} exists already")
        self.items[item.sku] = item

    def stock(self, sku: str) -> int:
        if sku not in self.items:
            raise UnknownItem(sku)
        return sum(m.quantity for m in self.movements if m.sku == sku)

    def receive(self, sku: str, quantity: int, day: date, note: str = "") -> None:
        if quantity <= 0:
            raise ValueError("quantity must be positive")
        self.stock(sku)
        self.movements.append(Movement(sku, quantity, day, note))

    def ship(self, sku: str, quantity: int, day: date, note: str = "") -> None:
        held = self.stock(sku)
        if quantity > held:
            raise NotEnoughStock(sku, quantity, held)
        self.movements.append(Movement(sku, -quantity, day, note))

    def value_cents(self) -> int:
        return sum(self.stock(sku) * item.price_cents for sku, item in self.items.items())

    def to_reorder(self) -> list[Item]:
        return [item for sku, item in self.items.items() if self.stock(sku) < item.reorder_level]

    def shipped_per_month(self) -> dict[tuple[int, int], int]:
'''

_READINGS = "\n".join(
    f"{hour:02d}:{minute:02d} station {('Alder', 'Birch', 'Cedar')[(hour + minute) % 3]} "
    f"temperature {12 + (7 * hour + minute) % 11}.{(3 * hour + minute // 10) % 10} C "
    f"wind {(5 * hour + minute) % 23} km/h {('calm', 'rain', 'clear', 'fog')[(hour * hour + minute // 20) % 4]}"  # noqa: E501
    for hour in range(6, 14)
    for minute in (0, 20, 40)
)

CHATS: tuple[ParityPrompt, ...] = (
    chat("capital", "What is the capital of France?"),
    chat("greeting", "Hi!"),
    chat("photosynthesis", "Explain photosynthesis to a ten-year-old in three sentences."),
    chat("list-fruits", "List five fruits that are rich in vitamin C, one per line."),
    chat(
        "arithmetic",
        "A train travels 60 km in 45 minutes. What is its average speed in km/h? Show the steps.",
    ),
    chat("haiku", "Write a haiku about the sea in winter."),
    chat("email", "Write a short, polite email asking my landlord to repair the kitchen tap."),
    chat(
        "pirate",
        "Where can I buy bread?",
        system="You are a pirate. Answer every question as a pirate would.",
    ),
    chat(
        "python-fibonacci",
        "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    ),
    chat(
        "sql", "Write an SQL query that finds the ten customers with the highest total order value in 2023."
    ),
    chat(
        "bug",
        "What is wrong here?\n\n```python\nfor i in range(len(xs)):\n    if xs[i] == 0:\n        del xs[i]\n```",  # noqa: E501
    ),
    chat(
        "translate-german", 'Translate into German: "The weather is nice today and we are going to the park."'
    ),
    chat("french", "Quelle est la différence entre le passé composé et l'imparfait ?"),
    chat("spanish", "Escribe un párrafo corto sobre la historia de la ciudad de Sevilla."),
    chat(
        "two-turns",
        "Name three planets of the solar system.",
        "1. Mercury\n2. Venus\n3. Earth",
        "Which of them is the hottest, and why?",
    ),
    chat(
        "four-turns",
        "I want to learn to cook. Where should I start?",
        "Start with simple dishes: scrambled eggs, a tomato sauce for pasta, and roasted vegetables.",
        "I tried the tomato sauce and it was too sour.",
        "Add a pinch of sugar or a grated carrot, and let it simmer for at least twenty minutes.",
        "That worked! What should I cook next?",
        system="You are a patient cooking teacher.",
    ),
    chat(
        "long-story",
        f"Read this text.\n\n{_LIGHTHOUSE}\nWho was Ellen Arkwright? What did she do in the storm?",
    ),
    chat("long-code", f"Complete the last method of this module.\n\n```python\n{_MODULE}```"),
    chat(
        "long-table", f"These are weather readings.\n\n{_READINGS}\n\nSummarise the morning in one paragraph."
    ),
    chat(
        "json",
        'Turn this into JSON with the keys "name", "age", "city": Maria is 31 years old and lives in Porto.',
    ),
)

TEXTS: tuple[ParityPrompt, ...] = (
    ParityPrompt("one-token", text="The"),
    ParityPrompt(
        "fairy-tale", text="Once upon a time, in a village at the edge of a dark forest, there lived"
    ),
    ParityPrompt("counting", text="1, 2, 3, 5, 8, 13, 21,"),
    ParityPrompt(
        "c-code", text="#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"
    ),
    ParityPrompt(
        "cyrillic-and-cjk", text="Москва — столица России. 東京は日本の首都。 Αθήνα είναι η πρωτεύουσα της"
    ),
    ParityPrompt(
        "markup", text="<html>\n  <head>\n    <title>Café ☕ Menu</title>\n  </head>\n  <body>\n    <h1>"
    ),
)

PROMPTS: tuple[ParityPrompt, ...] = CHATS + TEXTS


if __name__ == "__main__":
    for prompt in CHATS:
        print(json.dumps({"messages": prompt.messages()}, ensure_ascii=False))
