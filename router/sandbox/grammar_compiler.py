"""Compiles the grammar of an answer, inside a sandboxed worker.

JSON is written without optional white space, so a model cannot generate blanks for ever.

llguidance does not bound all costs of a schema. It expands every element that an array counts. The automaton
of `multipleOf`, or of patterns in conjunction, has the product of their states. To protect decode workers,
this process compiles each grammar first as far as a decode worker will, and `pool_worker` ends it when that
takes too much time or memory. Schema keywords that are unknown, or known to llguidance and not enforced, are
refused. Objects of schemas are closed (`closed_schemas`).

Regular expressions and grammars of clients have the same bounds. A grammar is Lark, or GBNF (EBNF), which is
translated. It cannot name tokens of the vocabulary, since an answer has no control tokens.

The job is a Plan in MessagePack. The reply is its grammar in llguidance's JSON form, or the `param` at fault,
a zero byte and a message.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..api.structured import ConstraintKind
from ..api.tool_bodies import CLOSE, OPEN
from ..errors import ApiError, bad_request
from .client_grammars import MAX_TEXT, check_repeats, lark_of, refused
from .closed_schemas import closed
from .frames import REFUSED, RENDERED, TOO_LARGE
from .schema_relaxing import MAX_ROUNDS, relaxed, without_unknown_formats
from .schema_rewrite import rewritten

GRAMMARS = b"grammars"  # the first frame of a compiling worker, in place of a Setup
MAX_GRAMMAR = 131072  # bytes; the bound of a message to a worker
MAX_SCHEMAS = MAX_GRAMMAR // 2  # bytes of a plan's schemas
MAX_ITEMS = 16384  # total array elements that a schema counts; llguidance expands each of them
# keywords that constrain nothing
NOTES = frozenset({"description", "title", "$comment", "default", "examples"})
MAX_GAP = 4  # characters of white space between reasoning and the answer
MAX_SYMBOLS = 131072  # symbols of a grammar; workers keep some 600 bytes for each
LIMITS = LLParserLimits(verbose_errors=False, max_grammar_size=MAX_SYMBOLS)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The input of a grammar.

    `answer` is the constraint of an answer without calls, by `kind`: a JSON schema, a regular expression, a
    JSON list of texts, or a grammar. None allows any text.
    """

    answer: bytes | None = None
    kind: ConstraintKind = "json"
    field: str = "response_format"  # the request's field with `answer`
    tools: tuple[tuple[str, bytes], ...] = ()  # names and schemas of the callable tools
    strict: tuple[str, ...] = ()  # names of those whose schemas are followed to the letter, or refused
    must_call: bool = False
    may_repeat: bool = True  # whether more than one call is allowed
    markers: tuple[str, str] | None = None  # of reasoning, which may come before all of it and is free
    is_thinking: bool = False  # the prompt ends with the first marker

    @property
    def num_bytes(self) -> int:
        return len(self.answer or b"") + sum(len(name) + len(schema) for name, schema in self.tools)

    @property
    def is_answer_bound(self) -> bool:
        """Whether an answer without calls has to follow something."""
        return self.answer is not None

    @property
    def param(self) -> str:
        """The request field that an error about this plan names."""
        return "tools" if self.tools else self.field

    def __bool__(self) -> bool:
        return self.answer is not None or bool(self.tools)


class SandboxedCompiler:
    """Compiles grammars in a sandboxed worker."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Plan)
        self._tokenizer = LLTokenizer("byte")

    def __repr__(self) -> str:
        return "GrammarCompiler()"

    def answer(self, data: bytes) -> bytes:
        """The reply to an encoded Plan."""
        try:
            plan = self._decoder.decode(data)
            grammar = compiled(plan)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
            matcher.compute_bitmask()  # finds schemas that refer to nothing but themselves
            if matcher.is_error():
                raise refused(plan.param, plan.param, matcher.get_error())
        except MemoryError:
            return TOO_LARGE
        except ApiError as error:
            return REFUSED + f"{error.body.param}\0{error.body.message}".encode()
        return RENDERED + grammar.encode()


def check_size(plan: Plan) -> None:
    """Raises ApiError (400) when the schemas are too large."""
    if plan.num_bytes > MAX_SCHEMAS:
        raise bad_request(
            f"{plan.param}: {plan.num_bytes} bytes of schemas are more than {MAX_SCHEMAS}", param=plan.param
        )


def compiled(plan: Plan) -> str:
    """The checked grammar of a plan, in llguidance's JSON form. Raises ApiError (400)."""
    check_size(plan)
    param = plan.param
    parts: list[dict[str, object]] = []
    if plan.answer is not None:
        parts.append({**_answer_grammar(plan.kind, plan.answer, plan.field), "name": "answer"})
    for i, (name, schema) in enumerate(plan.tools):
        what = f"tools: the parameters of {name}"
        made = _schema_grammar(schema, "tools", what, may_relax=name not in plan.strict)
        known = made["json_schema"]
        if not isinstance(known, dict) or known.get("type") != "object":
            raise bad_request(
                f'tools: the parameters of {name} are not a schema of type "object"', param="tools"
            )
        parts.append({**made, "name": f"arguments_{i}"})
    if plan.tools or plan.markers is not None:
        parts.insert(0, {"name": "main", "lark_grammar": _lark(plan)})
    grammar = json.dumps({"grammars": parts})
    if len(grammar) > MAX_GRAMMAR:
        raise bad_request(f"{param}: the schemas are too large", param=param)
    _check(grammar, param, param)
    return grammar


def _answer_grammar(kind: ConstraintKind, text: bytes, field: str) -> dict[str, object]:
    if kind == "json":
        return _schema_grammar(text, field, field)
    return {"lark_grammar": lark_of(kind, text.decode(), field)}


def _schema_grammar(schema: bytes, param: str, what: str, *, may_relax: bool = False) -> dict[str, object]:
    try:
        _check_counts(schema, param, what)
        given = closed(without_unknown_formats(json.loads(schema)))
        grammar, fault = _followed(given)
        for _ in range(MAX_ROUNDS if may_relax else 0):
            weaker = relaxed(given, fault) if fault else None
            if weaker is None:
                break
            given = weaker
            grammar, fault = _followed(given)
        if fault:
            raise refused(param, what, fault)
        part: dict[str, object] = json.loads(grammar)["grammars"][0]
    except (ValueError, RecursionError) as error:
        raise refused(param, what, str(error)) from None
    return part


def _followed(schema: object) -> tuple[str, str]:
    """(the grammar of a schema, why it cannot be followed)."""
    grammar = _json_grammar(rewritten(schema))
    if _fault(grammar):  # a pattern for every name overlaps with one that another part of the schema has
        grammar = _json_grammar(rewritten(schema, has_one_spelling=False))
        return grammar, _fault(grammar)
    return grammar, ""


def _json_grammar(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False),
        overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    )


def _check_counts(schema: bytes, param: str, what: str) -> None:
    """Bounds costs that llguidance does not: the elements that arrays count, and the length of texts, given
    or repeated by a pattern, which every decode step walks. Raises ApiError (400), and ValueError for invalid
    JSON.
    """
    num_items, longest, todo = 0, 0, [json.loads(schema)]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            num_items += sum(
                int(part[key]) for key in ("minItems", "maxItems") if isinstance(part.get(key), int)
            )
            for pattern in (part.get("pattern"), *_names_of(part.get("patternProperties"))):
                if isinstance(pattern, str):
                    check_repeats(pattern, param)
            todo += part
            todo += [value for key, value in part.items() if key not in NOTES or isinstance(value, dict)]
        elif isinstance(part, list):
            todo += part
        elif isinstance(part, str):
            longest = max(longest, len(part))
    if num_items > MAX_ITEMS:
        raise bad_request(
            f"{what}: minItems and maxItems add up to {num_items}, more than {MAX_ITEMS}", param=param
        )
    if longest > MAX_TEXT:
        raise bad_request(
            f"{what}: a text of {longest} characters must be met, more than {MAX_TEXT}", param=param
        )


def _names_of(part: object) -> Iterable[str]:
    return part if isinstance(part, dict) else ()


def _check(grammar: str, param: str, what: str) -> None:
    if fault := _fault(grammar):
        raise refused(param, what, fault)


def _fault(grammar: str) -> str:
    """Why a grammar cannot be followed; "" if it can."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return (messages[0] if messages else "it cannot be followed") if is_error else ""


def _lark(plan: Plan) -> str:
    """The Lark grammar around the schemas, which fixes the positions of reasoning and of calls."""
    rules = ["%llguidance {}", *_reasoning_rules(plan)]
    if not plan.tools:
        return "\n".join([*rules, "reply: @answer", ""])
    any_tool = " | ".join(f"tool_{i}" for i in range(len(plan.tools)))
    more = f"({json.dumps(chr(10) + OPEN + chr(10))} any)*" if plan.may_repeat else ""
    rules += [f"any: {any_tool}", f"first: {json.dumps(OPEN + chr(10))} any"]
    if plan.must_call:
        rules.append(f"reply: first {more}")
    elif plan.answer is not None:
        rules.append(f"reply: @answer | first {more}")
    else:
        rules.append(f"reply: TEXT | said {more}")
        rules += ['said: head "\\n" any', f"head[lazy]: TEXT {json.dumps(OPEN)}", f"TEXT: {_text(plan)}"]
    for i, (name, _) in enumerate(plan.tools):
        begin, end = json.dumps(f'{{"name": "{name}", "arguments": '), json.dumps("}\n" + CLOSE)
        rules.append(f"tool_{i}: {begin} @arguments_{i} {end}")
    return "\n".join(rules) + "\n"


def _reasoning_rules(plan: Plan) -> list[str]:
    if plan.markers is None:
        return ["start: reply"]
    opening, closing = (re.escape(marker).replace("/", "\\/") for marker in plan.markers)
    begin = "" if plan.is_thinking else f"\\s*{opening}"
    return [
        "start: thoughts GAP reply" + ("" if plan.is_thinking else " | reply"),
        f"thoughts[lazy]: /{begin}(.|\\n)*{closing}/",
        f"GAP: /[ \\n]{{0,{MAX_GAP}}}/",
    ]


def _text(plan: Plan) -> str:
    """The terminal of free text, which is no reasoning."""
    if plan.markers is None or plan.is_thinking:
        return "/(.|\\n)*/"
    opening = re.escape(plan.markers[0]).replace("/", "\\/")
    return f"/(.|\\n)*/ & ~/\\s*{opening}(.|\\n)*/"
