"""/docs: the OpenAPI document as an HTML page with contents and with examples that can be tried."""

import html
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .html_page import HtmlPage

Json = dict[str, Any]
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")  # of a document that is not here
IGNORED = "Ignored: "
HELLO = "What is a KV cache? Answer in one sentence."

# The body that the page offers to send, by path; `model` is put in front. Other paths have no example.
EXAMPLES: Mapping[str, Json] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": HELLO}], "max_tokens": 64, "stream": True,
    },
    "/v1/completions": {"prompt": "A KV cache is", "max_tokens": 32, "temperature": 0},
    "/v1/responses": {"input": HELLO, "max_output_tokens": 64},
    "/v1/messages": {"messages": [{"role": "user", "content": HELLO}], "max_tokens": 64},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": HELLO}]},
    "/tokenize": {"prompt": HELLO, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip


def docs_page(document: Json) -> HtmlPage:
    """The page of an OpenAPI document of `openapi_of`."""
    operations = [(path, *way) for path, ways in document["paths"].items() for way in ways.items()]
    sections = "\n".join(_section(path, method, made, document) for path, method, made in operations)
    contents = "\n".join(
        f'<li><a href="#{_anchor(path, method)}"><span class="method {method}">{method.upper()}</span> '
        f"{html.escape(path)}</a></li>"
        for path, method, _ in operations
    )
    return HtmlPage.read("docs.html", {"contents": contents, "sections": sections})


def _section(path: str, method: str, made: Json, document: Json) -> str:
    needs = " Needs an API key." * ({} not in made["security"] and bool(made["security"]))
    anchor, schemas = _anchor(path, method), document["components"]["schemas"]
    parts = [
        f'<section class="card" aria-labelledby="{anchor}">',
        f'<h2 id="{anchor}"><span class="method {method}">{method.upper()}</span> {html.escape(path)}</h2>',
        f"<p>{_marked(made['summary'] + needs)}</p>",
    ]
    body = made.get("requestBody")
    parts.append(_trial(path, method, body, schemas))
    if body is not None:
        parts += _fields(_schema_of(body, schemas))
    for place, heading in (("header", "Headers"), ("query", "Query"), ("path", "Path")):
        asked = [field for field in made.get("parameters", ()) if field["in"] == place]
        rows = [(f["name"], _type_of(f["schema"]), f.get("description", "")) for f in asked]
        parts += _folded(heading, ("name", "type", "meaning"), rows)
    statuses = [(code, answer["description"]) for code, answer in made["responses"].items()]
    parts += _folded("Statuses", ("status", "meaning"), statuses)
    return "\n".join([*parts, "</section>"])


def _trial(path: str, method: str, body: Json | None, schemas: Json) -> str:
    """A form that sends the example, or nothing for an operation without one."""
    if "{" in path or (body is not None and path not in EXAMPLES):
        return ""
    name = f"try-{_anchor(path, method)}"
    editor = ""
    if body is not None:
        properties = _schema_of(body, schemas)["properties"]
        model = {"model": properties["model"]["enum"][0]} if "enum" in properties.get("model", {}) else {}
        example = html.escape(json.dumps(model | EXAMPLES[path], indent=2))
        rows = example.count("\n") + 1
        editor = (
            f'<label for="{name}">Body</label>'
            f'<textarea id="{name}" rows="{rows}" spellcheck="false">{example}</textarea>'
        )
    return (
        f'<form class="trial" data-path="{html.escape(path)}" data-method="{method.upper()}">{editor}'
        '<div class="row"><button type="submit" class="primary">Try it</button>'
        '<button type="button" data-stop hidden>Stop</button>'
        '<button type="button" class="plain" data-curl>Show as curl</button>'
        '<span class="quiet" role="status"></span></div>'
        f'<pre tabindex="0" data-scrolls hidden aria-label="Answer of {html.escape(path)}"></pre></form>'
    )


def _fields(schema: Json) -> list[str]:
    """The fields of a body: those that work, and folded those that are ignored."""
    required, heads = schema.get("required", []), ("field", "type", "meaning")
    works: list[tuple[str, ...]] = []
    ignored: list[tuple[str, ...]] = []
    for name, field in schema["properties"].items():
        says = field.get("description", "")
        row = (name + " *" * (name in required), _type_of(field), says.removeprefix(IGNORED))
        (ignored if says.startswith(IGNORED) else works).append(row)
    return [*_folded("Fields", heads, works), *_folded("Ignored fields", heads, ignored)]


def _folded(summary: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table that opens on demand; nothing without rows."""
    lines = [
        f'<tr><th scope="row"><code>{html.escape(first)}</code></th>'
        + "".join(f"<td>{_marked(cell)}</td>" for cell in others)
        + "</tr>"
        for first, *others in rows
    ]
    if not lines:
        return []
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return [f"<details><summary>{summary} ({len(lines)})</summary>{table}</details>"]


def _marked(text: str) -> str:
    """Text of the field table as markup: code in backticks, links as their words."""
    return CODE.sub(r"<code>\1</code>", html.escape(LINK.sub(r"\1", text)))


def _anchor(path: str, method: str) -> str:
    return method + re.sub(r"[^a-z0-9]+", "-", path).rstrip("-")


def _schema_of(body: Json, schemas: Json) -> Json:
    name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
    found: Json = schemas[name]
    return found


def _type_of(schema: Json) -> str:
    if "anyOf" in schema:
        return " or ".join(_type_of(part) for part in schema["anyOf"] if part != {"type": "null"})
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"])
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "items" in schema:
        return f"list of {_type_of(schema['items'])}" if schema["items"] else "list"
    return str(schema.get("type", "any"))
