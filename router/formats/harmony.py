"""Harmony, the format of gpt-oss: messages with a channel each.

    <|channel|>analysis<|message|>...<|end|>                       reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>     text

The recipient may also stand before the channel. Text on the channel commentary without a recipient is said to
the user. An answer that does not begin with a header is text.
"""

import re

from .blocks import arguments_of
from .parts import NOTHING, CallPart, Split, held_back, new_call_id

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
HEADS = (START, CHANNEL)
SPECIAL = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
CHANNEL_OF = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."
BETWEEN = "\n"  # between two messages of one kind


class HarmonyReader:
    """Reads an answer of messages. A call goes out when its message is complete."""

    def __init__(self, *, has_calls: bool) -> None:
        self._held = ""
        self._has_calls = has_calls
        self._kind = "head"  # or the kind of the message being read: text, reasoning, call
        self._name = ""  # of the function being called
        self._head = ""  # of a call, which becomes text when its arguments are malformed
        self._is_new = {"text": False, "reasoning": False}  # another message has begun after one of the kind
        self._has_some = {"text": False, "reasoning": False}
        self.num_calls = 0

    def __repr__(self) -> str:
        return f"HarmonyReader({self._kind}, {self.num_calls} calls, held={len(self._held)})"

    @property
    def is_thinking(self) -> bool:
        return self._kind == "reasoning"

    def feed(self, text: str) -> Split:
        self._held += text
        split = NOTHING
        while self._held:
            before = len(self._held), self._kind
            split += self._read_head() if self._kind == "head" else self._read_message()
            if (len(self._held), self._kind) == before:
                break
        return split

    def flush(self) -> Split:
        held, self._held = self._held, ""
        if self._kind == "call":
            return self._called(held)
        return self._said("text" if self._kind == "head" else self._kind, held) if held else NOTHING

    def _read_head(self) -> Split:
        held = self._held
        if not held.startswith(HEADS):
            if any(marker.startswith(held) for marker in HEADS):
                return NOTHING
            self._kind = "text"
            return NOTHING
        end = held.find(MESSAGE)
        if end < 0:
            return NOTHING
        self._head, self._held = held[: end + len(MESSAGE)], held[end + len(MESSAGE) :]
        channel, recipient = CHANNEL_OF.search(self._head), RECIPIENT.search(self._head)
        to = recipient[1] if recipient is not None else ""
        is_call = self._has_calls and to.startswith(FUNCTIONS)
        is_reasoning = channel is not None and channel[1] == "analysis"
        self._name = to.removeprefix(FUNCTIONS)
        self._kind = "call" if is_call else "reasoning" if is_reasoning else "text"
        if self._kind != "call":
            self._is_new[self._kind] = self._has_some[self._kind]
        return NOTHING

    def _read_message(self) -> Split:
        """Reads up to the end of the message. A header without an end before it ends it, too."""
        markers = (*ENDS, START)
        found = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if not found:
            keep = len(self._held) if self._kind == "call" else held_back(self._held, markers)
            cut = len(self._held) - keep
            said, self._held = self._held[:cut], self._held[cut:]
            return self._said(self._kind, said) if said else NOTHING
        at, marker = min(found)
        said, kind = self._held[:at], self._kind
        self._held, self._kind = self._held[at + (len(marker) if marker != START else 0) :], "head"
        return self._called(said) if kind == "call" else self._said(kind, said) if said else NOTHING

    def _said(self, kind: str, text: str) -> Split:
        text = BETWEEN * self._is_new[kind] + text
        self._is_new[kind], self._has_some[kind] = False, True
        return Split(reasoning=text) if kind == "reasoning" else Split(text)

    def _called(self, text: str) -> Split:
        arguments = arguments_of(text if text.strip() else "{}")
        if arguments is None:
            return self._said("text", self._head + text)
        self.num_calls += 1
        return Split(calls=(CallPart(self.num_calls - 1, new_call_id(), self._name, arguments),))
