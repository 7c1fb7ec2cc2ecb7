"""The constraint that a request puts on its answer, in the words of OpenAI, vLLM or SGLang: one at most.

JSON of a schema       response_format, guided_json, json_schema, structured_outputs.json
any JSON object        response_format, structured_outputs.json_object
a regular expression   guided_regex, regex, structured_outputs.regex
one of some texts      guided_choice, structured_outputs.choice
a grammar              guided_grammar, ebnf, structured_outputs.grammar
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct

from ..errors import bad_request
from .field_errors import UNREADABLE, check_refused, refused_of
from .fields import STRUCTURED_OUTPUTS, Field
from .tool_bodies import ANY_OBJECT, AnyFormat, Json, json_of, schema_of

MAX_CHOICES = 1024
ConstraintKind = Literal["json", "regex", "choice", "grammar"]
Pattern = Annotated[str, Meta(min_length=1)]
AnswerChoices = Annotated[
    list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)
]


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """`structured_outputs` of vLLM."""

    TABLE: ClassVar[Mapping[str, Field]] = STRUCTURED_OUTPUTS

    json: Json = UNSET  # a schema, or its text
    regex: Pattern | None = None
    choice: AnswerChoices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    structural_tag: Json = UNSET
    disable_fallback: Json = UNSET
    disable_any_whitespace: Json = UNSET
    disable_additional_properties: Json = UNSET
    whitespace_pattern: Json = UNSET


REFUSED = refused_of(StructuredOutputs)


class Constraint(Struct, frozen=True, gc=False):
    """What the text of an answer must be.

    `text` is a JSON schema, a regular expression, a JSON list of texts, or a grammar.
    """

    kind: ConstraintKind
    text: bytes
    param: str  # the field that asks for it

    @property
    def is_json(self) -> bool:
        return self.kind == "json"


class ConstraintFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM and SGLang that constrain an answer."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Json = UNSET
    guided_regex: Pattern | None = None
    guided_choice: AnswerChoices | None = None
    guided_grammar: Pattern | None = None
    guided_decoding_backend: Json = UNSET
    guided_whitespace_pattern: Json = UNSET
    json_schema: Json = UNSET
    regex: Pattern | None = None
    ebnf: Pattern | None = None


class ConstrainedBody(ConstraintFields, kw_only=True, forbid_unknown_fields=True):
    """All fields that constrain an answer."""

    response_format: AnyFormat | None = None

    @property
    def constraint(self) -> Constraint | None:
        """The constraint; None for any text. `check_constraint` has checked that there is one at most."""
        return next(_constraints(self), None)


def check_constraint(body: ConstrainedBody) -> Constraint | None:
    """The constraint of a body.

    Raises ApiError (400) for a schema of another type, and for two constraints.
    """
    outputs = body.structured_outputs
    if outputs is not None:
        check_refused(outputs, REFUSED, "structured_outputs.", "structured_outputs")
    found = list(_constraints(body))
    if outputs is not None and not any(_is_inside(one) for one in found):
        text = "structured_outputs is empty: give json, regex, choice, grammar or json_object: true"
        raise bad_request(text, param="structured_outputs")
    if len(found) > 1:
        names = " and ".join(one.param for one in found)
        param = found[1].param.partition(".")[0]
        raise bad_request(f"{names} each constrain the answer: give one of them", param=param)
    return found[0] if found else None


def _is_inside(constraint: Constraint) -> bool:
    return constraint.param.startswith("structured_outputs.")


def _constraints(body: ConstrainedBody) -> Iterator[Constraint]:
    """Every constraint that the body asks for. Raises ApiError (400)."""
    if (schema := schema_of(body.response_format)) is not None:
        yield Constraint("json", schema, "response_format")
    outputs = body.structured_outputs or StructuredOutputs()
    within = "structured_outputs."
    for value, param in (
        (body.guided_json, "guided_json"),
        (body.json_schema, "json_schema"),
        (outputs.json, f"{within}json"),
    ):
        if schema := _schema_in(value, param):
            yield Constraint("json", schema, param)
    if outputs.json_object:
        yield Constraint("json", ANY_OBJECT, f"{within}json_object")
    for pattern, param in (
        (body.guided_regex, "guided_regex"),
        (body.regex, "regex"),
        (outputs.regex, f"{within}regex"),
    ):
        if pattern is not None:
            yield Constraint("regex", pattern.encode(), param)
    for choices, param in ((body.guided_choice, "guided_choice"), (outputs.choice, f"{within}choice")):
        if choices is not None:
            yield Constraint("choice", msgspec.json.encode(choices), param)
    for grammar, param in (
        (body.guided_grammar, "guided_grammar"),
        (body.ebnf, "ebnf"),
        (outputs.grammar, f"{within}grammar"),
    ):
        if grammar is not None:
            yield Constraint("grammar", grammar.encode(), param)


def _schema_in(value: Json, param: str) -> bytes:
    """A schema that is given as JSON or as its text; b"" for none. Raises ApiError (400)."""
    raw = json_of(value)
    if raw[:1] == b'"':
        text: str = msgspec.json.decode(raw)
        raw = text.strip().encode()
        try:
            msgspec.json.decode(raw, type=Raw)
        except UNREADABLE:
            raise bad_request(f"{param} is text that is no JSON schema", param=param) from None
    if raw and raw[:1] not in b"{tf":  # a schema is an object, true or false
        text = f"{param}: expected a JSON schema as an object or as text"
        raise bad_request(text, param=param.partition(".")[0], code="invalid_type")
    return raw
