"""The formats in which models write reasoning and tool calls, and the choice of a model's.

A format is recognised by texts in the model's chat template. `--tool-parser` and `--reasoning-parser` name
another one. A new format is a file beside this one and a row of a table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..api.tool_bodies import OPEN, Tool
from . import deepseek, harmony, mistral
from .deepseek import DeepSeekReader
from .harmony import HarmonyReader
from .hermes import GuidedReader, HermesReader
from .llama_json import TAG, LlamaJsonReader
from .mistral import MistralReader
from .parts import Reader
from .pythonic import END, START, PythonicReader
from .qwen_coder import QwenCoderReader
from .thinking import Markers, OneCallReader, PlainReader, ThinkingReader

AUTO, NONE = "auto", "none"
HARMONY = "harmony"
CallReaderOf = Callable[[Sequence[Tool]], Reader]


@dataclass(frozen=True)
class ToolFormat:
    """A form of tool calls. The chat templates of its models match one of the patterns `signs`."""

    name: str
    signs: tuple[str, ...]
    reader: CallReaderOf
    markers: tuple[str, ...] = ()  # texts that some vocabularies have as control tokens
    is_guided: bool = False  # a grammar guarantees the form where tools may be called
    wants_text: bool = False  # the template expects the arguments of earlier calls as JSON text


@dataclass(frozen=True)
class ReasoningFormat:
    """A form of reasoning. Without `markers`, its reader is the format's own."""

    name: str
    signs: tuple[str, ...]
    markers: Markers | None


# the first row whose sign a template has is the model's: rows with rarer signs stand first
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(HARMONY, (r"<\|channel\|>",), lambda _: HarmonyReader(has_calls=True), harmony.SPECIAL),
    ToolFormat(
        "deepseek_v3",
        (re.escape(deepseek.CALLS),),
        lambda _: DeepSeekReader(),
        (*DeepSeekReader.OPENERS, deepseek.SEPARATOR, deepseek.CALL_END),
        wants_text=True,
    ),
    ToolFormat(
        "mistral",
        (re.escape(mistral.OPENER),),
        lambda _: MistralReader(),
        (mistral.OPENER, mistral.CALL_ID, mistral.ARGUMENTS),
    ),
    ToolFormat("qwen3_coder", (r"<function=",), QwenCoderReader, (OPEN,)),
    ToolFormat("hermes", (re.escape(OPEN),), lambda _: HermesReader(), (OPEN,), is_guided=True),
    ToolFormat(
        "pythonic",
        (re.escape(START), r"\[func_name1\(", r"\[func1\("),
        lambda _: PythonicReader(),
        (START, END),
    ),
    ToolFormat(
        "llama3_json", (re.escape(TAG), r'"parameters": dictionary of'), lambda _: LlamaJsonReader(), (TAG,)
    ),
)
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(HARMONY, (r"<\|channel\|>",), None),
    ReasoningFormat("seed_oss", (r"<seed:think>",), Markers("<seed:think>", "</seed:think>")),
    ReasoningFormat("mistral", (r"\[THINK\]",), Markers("[THINK]", "[/THINK]")),
    ReasoningFormat("think", (r"<think>", r"</think>"), Markers("<think>", "</think>")),
)


@dataclass(frozen=True)
class Style:
    """How one answer is written: what its reader needs to know."""

    is_native: bool  # the template writes tools and calls; otherwise they are explained as text
    is_guided: bool  # calls follow a grammar


class Formats:
    """The formats of one model. `special` are the texts of its control tokens."""

    def __init__(
        self, tool: ToolFormat | None, reasoning: ReasoningFormat | None, special: frozenset[str]
    ) -> None:
        self.tool = tool
        self.reasoning = reasoning
        is_spelled = tool is not None and not special.intersection(tool.markers)
        self._is_guided = tool is None or (tool.is_guided and is_spelled)
        markers = reasoning.markers if reasoning is not None else None
        self.guided_markers = None if markers is None or {markers.open, markers.close} & special else markers
        shown = {*(tool.markers if tool else ()), *harmony.SPECIAL * self.is_harmony}
        self.shown = frozenset(shown | ({markers.open, markers.close} if markers else set())) & special

    def __repr__(self) -> str:
        return f"Formats(tools={self.tool_name}, reasoning={self.reasoning.name if self.reasoning else NONE})"

    @property
    def tool_name(self) -> str:
        return self.tool.name if self.tool is not None else NONE

    @property
    def is_harmony(self) -> bool:
        return HARMONY in (self.tool_name, self.reasoning.name if self.reasoning is not None else NONE)

    def style_of(self, *, must_follow: bool) -> Style:
        """The style of an answer. `must_follow`: its calls have to follow a grammar."""
        is_guided = self._is_guided or must_follow
        is_native = self.tool is not None and (not is_guided or self._is_guided)
        return Style(is_native, is_guided)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside of reasoning."""
        markers = self.reasoning.markers if self.reasoning is not None else None
        return markers is not None and prompt.rstrip().endswith(markers.open)

    def reader_of(
        self, style: Style, tools: Sequence[Tool], *, has_schema: bool, is_thinking: bool, is_single: bool
    ) -> Reader | None:
        """The reader of an answer that may call `tools`; None for an answer of plain text only.

        `has_schema`: an answer without calls is JSON of a schema. `is_thinking`: the prompt ends inside of
        reasoning. `is_single`: there is one call at most.
        """
        is_constrained = has_schema or (bool(tools) and style.is_guided)
        if self.is_harmony and not is_constrained:
            reader: Reader = HarmonyReader(has_calls=bool(tools))
            return OneCallReader(reader) if is_single else reader
        markers = self.reasoning.markers if self.reasoning is not None else None
        if is_constrained:
            markers = self.guided_markers
        inner: Reader | None = None
        if tools and style.is_guided:
            inner = GuidedReader(only_first=has_schema)
        elif tools and self.tool is not None:
            inner = self.tool.reader(tools)
            inner = OneCallReader(inner) if is_single else inner
        if markers is None:
            return inner
        return ThinkingReader(markers, inner or PlainReader(), is_thinking=is_thinking)


def formats_of(
    template: object, special: frozenset[str], *, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> Formats:
    """The formats of a model with this chat template (one, several by name, or none).

    `tool_parser` and `reasoning_parser` are `auto`, `none` or the name of a format.
    """
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template or "")
    shows_tools = re.search(r"\btools\b", text) is not None
    tool = _chosen(TOOL_FORMATS, tool_parser, text if shows_tools else "")
    return Formats(tool, _chosen(REASONING_FORMATS, reasoning_parser, text), special)


Row = TypeVar("Row", ToolFormat, ReasoningFormat)


def _chosen(table: Sequence[Row], name: str, template: str) -> Row | None:
    """The row of that name; with AUTO the first row of which the template has a sign."""
    if name != AUTO:
        return next((row for row in table if row.name == name), None)
    return next((row for row in table if any(re.search(sign, template) for sign in row.signs)), None)
