"""Errors for unsupported and unknown request fields."""

import re
from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct

from ..errors import ApiError, bad_request, printable, unsupported_parameter
from .fields import Field

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
RefusedFields = list[tuple[str, str, Field]]  # attribute, name in JSON, and its row of the table


def refused_of(kind: type[Struct]) -> RefusedFields:
    """The fields of a type that its table refuses."""
    table: Mapping[str, Field] = getattr(kind, "TABLE", {})
    known = [
        (info.name, info.encode_name) for info in msgspec.structs.fields(kind) if info.encode_name in table
    ]
    return [(attribute, name, table[name]) for attribute, name in known if table[name].state == "refused"]


def check_refused(asked: Struct, refused: RefusedFields, inside: str = "", param: str = "") -> None:
    """Raises ApiError (400) for an unsupported field, unless its value asks for nothing."""
    for attribute, name, field in refused:
        value = getattr(asked, attribute)
        if isinstance(value, Raw) and not _says_nothing(value, field.harmless):
            text = f"{inside}{name} is not supported: {field.says}"
            if field.code is not None:
                raise bad_request(text, param=param or name, code=field.code)
            raise unsupported_parameter(text, param=param or name)


def _says_nothing(value: Raw, harmless: tuple[bytes, ...]) -> bool:
    compact = bytes(value).translate(None, b" \t\r\n")
    return compact == b"null" or compact in harmless


def unreadable(error: Exception, inside: str = "") -> ApiError:
    """The ApiError (400) for one of UNREADABLE, raised by a body or by its part `inside`, such as
    `input[0]`."""
    if isinstance(error, msgspec.ValidationError):
        return _invalid_field(str(error), inside)
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return bad_request(f"The body is not valid JSON: {reason[:200]}")


def _invalid_field(reason: str, inside: str) -> ApiError:
    """Translates a msgspec error such as "Expected `int`, got `str` - at `$.n`"."""
    text, _, at = reason.partition(" - at `$")
    where = (inside + at.strip("`")).lstrip(".")
    named = re.search(r"(?:field|required field) `([^`]*)`", text)
    path = re.match(r"[A-Za-z_]+", where)
    param = path.group() if path else (named.group(1) if named else None)
    place = f"{where}: " if where else ""
    remedy = "; parts of a message's content are text" if ".content[" in where else ""
    if text.startswith("Object contains unknown field") and named:
        message = f"{place}{printable(named.group(1))} is not a field of this request{remedy}"
        return bad_request(message, param=param, code="unknown_parameter")
    line = "".join(char if char.isascii() and char.isprintable() else "?" for char in f"{place}{text}")
    return bad_request(line[:400] + remedy, param=param, code=_code_of(text))


def _code_of(reason: str) -> str:
    """OpenAI's code for a reason of msgspec."""
    if reason.startswith("Object missing required field"):
        return "missing_required_parameter"
    return "invalid_type" if ", got `" in reason else "invalid_value"


def is_unknown_field(error: Exception) -> bool:
    """Whether a decoder stopped at a field that its type does not have."""
    return isinstance(error, msgspec.ValidationError) and str(error).startswith(
        "Object contains unknown field"
    )
