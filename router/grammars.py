"""What an answer must look like, as a grammar for the workers: JSON of a schema, calls of tools, or text with calls in it.

A call is written as `<tool_call>`, a line `{"name": ..., "arguments": ...}` and `</tool_call>`, the form that many open
models are trained on. JSON is written without needless white space, so that no model can go on writing blanks for ever.

Schemas come from clients: they are compiled here, off the event loop and within llguidance's own bounds, before a worker
sees them. What is not understood is refused, also what llguidance knows and does not enforce.
"""

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits

from .api_bodies import ChatBody, CompletionBody
from .errors import ApiError, bad_request, overloaded
from .tool_bodies import CLOSE, OPEN, ToolChoice, schema_of

MAX_GRAMMAR = 131072  # bytes; what a message to a worker takes
MAX_KEPT = 64
MAX_WAITING = 64  # grammars to compile
LIMITS = LLParserLimits(verbose_errors=False)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a grammar is made of. `answer`: the schema of an answer that calls nothing, None: any text."""

    answer: bytes | None = None
    tools: tuple[tuple[str, bytes], ...] = ()  # name and schema of those that may be called
    must_call: bool = False
    may_repeat: bool = True  # more than one call

    @property
    def num_bytes(self) -> int:
        return len(self.answer or b"") + sum(len(name) + len(schema) for name, schema in self.tools)

    def __bool__(self) -> bool:
        return self.answer is not None or bool(self.tools)


def plan_of(body: ChatBody | CompletionBody) -> Plan:
    """What the answer to `body` must look like."""
    answer = schema_of(body.response_format)
    if not isinstance(body, ChatBody) or not body.calls_tools:
        return Plan(answer=answer)
    chosen = body.tool_choice
    name = chosen.function.name if isinstance(chosen, ToolChoice) else None
    functions = [tool.function for tool in body.tools or ()]
    return Plan(
        answer=answer,
        tools=tuple((f.name, f.schema) for f in functions if name in (None, f.name)),
        must_call=name is not None or chosen == "required",
        may_repeat=name is None and body.parallel_tool_calls is not False,
    )


class Grammars:
    """Compiles plans in a thread and keeps the last ones. Used on one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._kept: OrderedDict[Plan, str] = OrderedDict()
        self._num_waiting = 0

    def __repr__(self) -> str:
        return f"Grammars({len(self._kept)} kept, {self._num_waiting} waiting)"

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of(self, plan: Plan) -> str:
        """The grammar, "" where anything goes. Raises ApiError: 400 for what cannot be followed, 429."""
        if not plan:
            return ""
        if plan not in self._kept:
            if self._num_waiting >= MAX_WAITING:
                raise overloaded("Too many schemas wait to be compiled. Try again later.")
            self._num_waiting += 1
            try:
                self._kept[plan] = await asyncio.get_running_loop().run_in_executor(self._threads, compiled, plan)
            finally:
                self._num_waiting -= 1
        self._kept.move_to_end(plan)
        grammar = self._kept[plan]
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grammar


def compiled(plan: Plan) -> str:
    """The checked grammar of a plan, in llguidance's JSON form. Raises ApiError (400)."""
    param = "tools" if plan.tools else "response_format"
    if plan.num_bytes > MAX_GRAMMAR // 2:
        text = f"{param}: {plan.num_bytes} bytes of schemas are more than {MAX_GRAMMAR // 2}"
        raise bad_request(text, param=param)
    parts: list[dict[str, object]] = []
    if plan.answer is not None:
        parts.append({**_schema_grammar(plan.answer, "response_format", "response_format"), "name": "answer"})
    for i, (name, schema) in enumerate(plan.tools):
        made = _schema_grammar(schema, "tools", f"tools: the parameters of {name}")
        known = made["json_schema"]
        if not isinstance(known, dict) or known.get("type") != "object":
            raise bad_request(f'tools: the parameters of {name} are not a schema of type "object"', param="tools")
        parts.append({**made, "name": f"arguments_{i}"})
    if plan.tools:
        parts.insert(0, {"name": "main", "lark_grammar": _lark(plan)})
    grammar = json.dumps({"grammars": parts})
    if len(grammar) > MAX_GRAMMAR:
        raise bad_request(f"{param}: the schemas are too large", param=param)
    _check(grammar, param, param)
    return grammar


def _schema_grammar(schema: bytes, param: str, what: str) -> dict[str, object]:
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            schema.decode(), overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
        _check(grammar, param, what)
        part: dict[str, object] = json.loads(grammar)["grammars"][0]
    except (ValueError, RecursionError) as error:
        raise _refused(param, what, str(error)) from None
    return part


def _check(grammar: str, param: str, what: str) -> None:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_error:
        raise _refused(param, what, messages[0] if messages else "it cannot be followed")


def _refused(param: str, what: str, reason: str) -> ApiError:
    line = "".join(char if char.isascii() and char.isprintable() else " " for char in reason[:200])
    return bad_request(f"{what} cannot be followed: {line}", param=param)


def _lark(plan: Plan) -> str:
    """The frame around the schemas: where calls may stand."""
    any_tool = " | ".join(f"tool_{i}" for i in range(len(plan.tools)))
    more = f"({json.dumps(chr(10) + OPEN + chr(10))} any)*" if plan.may_repeat else ""
    rules = ["%llguidance {}", f"any: {any_tool}", f'first: {json.dumps(OPEN + chr(10))} any']
    if plan.must_call:
        rules.insert(1, f"start: first {more}")
    elif plan.answer is not None:
        rules.insert(1, f"start: @answer | first {more}")
    else:
        rules.insert(1, f"start: TEXT | said {more}")
        rules += ['said: head "\\n" any', f"head[lazy]: TEXT {json.dumps(OPEN)}", "TEXT: /(.|\\n)*/"]
    for i, (name, _) in enumerate(plan.tools):
        begin, end = json.dumps(f'{{"name": "{name}", "arguments": '), json.dumps("}\n" + CLOSE)
        rules.append(f"tool_{i}: {begin} @arguments_{i} {end}")
    return "\n".join(rules) + "\n"
