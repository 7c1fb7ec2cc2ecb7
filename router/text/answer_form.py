"""The form of one answer to a chat: the grammar that it follows, and the reader that splits it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..api.body_types import ChatBody, RequestMessage
from ..api.tool_bodies import Tool
from ..formats.parts import Reader
from ..formats.registry import Formats, Style
from ..sandbox.grammar_compiler import Plan
from .grammars import plan_of
from .tool_prompts import ChatMessage


@dataclass(frozen=True)
class AnswerForm:
    """What a request and the model's formats say about the answer."""

    formats: Formats
    style: Style
    constraint: Plan  # of the answer and its calls, without reasoning
    tools: Sequence[Tool] = ()  # that may be called
    is_single: bool = False  # there is one call at most
    is_thinking: bool = False  # the prompt ends inside of reasoning; known once it is rendered

    @classmethod
    def of(cls, body: ChatBody, formats: Formats) -> "AnswerForm":
        """Calls follow a grammar where one is forced, a function is strict, the answer has a schema, or the
        model's form of calls is one that a grammar guarantees."""
        plan = plan_of(body)
        tools = tuple(body.tools or ()) if body.calls_tools else ()
        must_follow = plan.must_call or plan.is_answer_bound or any(tool.function.strict for tool in tools)
        style = formats.style_of(must_follow=must_follow)
        is_single = bool(tools) and not plan.may_repeat
        return cls(formats, style, plan if style.is_guided else Plan(), tools, is_single)

    def after(self, prompt: str) -> "AnswerForm":
        """The form of the answer to a rendered prompt."""
        return replace(self, is_thinking=self.formats.opens_reasoning(prompt))

    @property
    def plan(self) -> Plan:
        """The plan of the answer's grammar; an empty plan for none."""
        plan, markers = self.constraint, self.formats.guided_markers
        if not plan or markers is None:
            return plan
        return replace(plan, markers=(markers.open, markers.close), is_thinking=self.is_thinking)

    def reader(self) -> Reader | None:
        """A reader of one choice; None where all text is plain."""
        return self.formats.reader_of(
            self.style,
            self.tools,
            has_schema=self.constraint.is_answer_bound,
            is_thinking=self.is_thinking,
            is_single=self.is_single,
        )


def template_messages(formats: Formats, messages: Sequence[RequestMessage]) -> list[ChatMessage]:
    """The messages of a chat as the template of a model with these formats expects them."""
    wants_text = formats.tool is not None and formats.tool.wants_text
    made = [message.as_template_input() for message in messages]
    for given, message in zip(messages, made, strict=True):
        if wants_text:
            for call, written in zip(given.tool_calls or (), message.get("tool_calls", ()), strict=True):
                written["function"]["arguments"] = call.function.arguments
        if formats.is_harmony and "reasoning_content" in message and not message["content"]:
            message["thinking"] = message.pop("reasoning_content")
    return made
