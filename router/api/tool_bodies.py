"""The types of tools, tool calls, tool choices and response formats in requests."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from .fields import CALL, CALLED, Field

Json = Raw | UnsetType
# Python's $ also matches before a line's end
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
MAX_TOOLS = 128
OPEN, CLOSE = "<tool_call>", "</tool_call>"  # around a call in the text of an answer
ANY_OBJECT = b'{"type":"object"}'
NO_PARAMETERS = b'{"type":"object","properties":{},"additionalProperties":false}'


class Function(Struct, forbid_unknown_fields=True):
    """A function that the model may call; `parameters` is a JSON schema of an object.

    Calls always follow it.
    """

    name: FunctionName
    description: str | None = None
    parameters: Json = UNSET
    strict: bool | None = None

    @property
    def schema(self) -> bytes:
        """The JSON schema of the function's arguments."""
        return json_of(self.parameters) or NO_PARAMETERS


class Tool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """An entry of `tools`."""

    function: Function


class FunctionChoice(Struct, forbid_unknown_fields=True):
    """The function of a tool choice."""

    name: str


class ToolChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """`tool_choice`: one function."""

    function: FunctionChoice


class AllowedFunctions(Struct, forbid_unknown_fields=True):
    """The functions that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """`tool_choice`: some of the tools."""

    allowed_tools: AllowedFunctions


AnyToolChoice = Literal["none", "auto", "required"] | ToolChoice | AllowedTools


class CalledFunction(Struct, forbid_unknown_fields=True):
    """A called function. `arguments` is JSON text."""

    TABLE: ClassVar[Mapping[str, Field]] = CALLED

    name: str
    arguments: str
    parsed_arguments: Json = UNSET


class ToolCall(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A call in an assistant's message."""

    TABLE: ClassVar[Mapping[str, Field]] = CALL

    id: str
    function: CalledFunction
    index: Json = UNSET


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """`response_format`: any text."""


class ObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """`response_format`: any JSON object."""


class NamedSchema(Struct, forbid_unknown_fields=True):
    """A schema with a name; answers always follow it."""

    name: str = ""
    schema: Json = UNSET
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """`response_format`: JSON of a schema."""

    json_schema: NamedSchema


AnyFormat = TextFormat | ObjectFormat | SchemaFormat


def schema_of(wanted: AnyFormat | None) -> bytes | None:
    """The JSON schema that a format asks for; None: any text."""
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    return (isinstance(wanted, SchemaFormat) and json_of(wanted.json_schema.schema)) or ANY_OBJECT


def json_of(value: Json) -> bytes:
    """The JSON of a field; b"" for null and for an absent field."""
    raw = bytes(value) if isinstance(value, Raw) else b""
    return b"" if raw == b"null" else raw


def as_template_tool(tool: Tool) -> dict[str, object]:
    """A tool in the form that chat templates expect."""
    function: dict[str, object] = {"name": tool.function.name}
    if tool.function.description:
        function["description"] = tool.function.description
    function["parameters"] = msgspec.json.decode(tool.function.schema)
    return {"type": "function", "function": function}
