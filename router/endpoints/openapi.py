"""The OpenAPI document, generated from the types that the server reads and writes.

Of request bodies it shows the fields that work or are ignored; `api/fields` lists the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..answers.chat_replies import ChatChunk, ChatReply
from ..answers.completion_replies import CompletionReply
from ..answers.message_replies import Message, MessageEvent, TokenCount
from ..answers.replies import DetokenizeReply, TokenizeReply
from ..answers.response_replies import Event, Response
from ..api.body_types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RequestMessage,
    StreamOptions,
    TextPart,
    TokenizeBody,
)
from ..api.draft_bodies import DraftOrderBody, DraftOrderReply
from ..api.fields import Field
from ..api.message_bodies import CountBody, MessageBody
from ..api.request_headers import REQUEST_HEADERS
from ..api.response_bodies import ResponseBody, ResponseTool, TextOptions
from ..api.response_items import ITEMS, InputTextPart, OutputTextPart
from ..api.role_bodies import RoleOrderBody, RoleOrderReply
from ..api.structured import StructuredOutputs
from ..api.tool_bodies import CalledFunction, ToolCall
from ..errors import MESSAGE_PATHS, ErrorEnvelope, MessageErrorEnvelope
from ..http.auth import OPEN_PATHS
from ..scheduling.history import KEPT, RequestList, RequestView
from ..scheduling.load_history import HistoryView
from .status import ModelCard, ModelList, Status, VersionReply

REF = "#/components/schemas/{name}"
Json = dict[str, Any]
INNER = (
    RequestMessage,
    TextPart,
    InputTextPart,
    OutputTextPart,
    ToolCall,
    CalledFunction,
    StreamOptions,
    StructuredOutputs,
    TextOptions,
    ResponseTool,
    *ITEMS.values(),
)  # fmt: skip - objects inside of bodies, with tables of their own


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    path: str
    says: str
    body: type | None = None
    reply: type | None = None
    chunk: type | None = None  # type of a stream's events
    statuses: Mapping[int, str] | None = None  # besides 200
    kind: str = "application/json"  # content type of a reply without a schema

    @property
    def method(self) -> str:
        return "get" if self.body is None else "post"

    @property
    def is_generating(self) -> bool:
        return self.chunk is not None

    @property
    def error(self) -> type:
        """The type of its errors."""
        return MessageErrorEnvelope if self.path in MESSAGE_PATHS else ErrorEnvelope

    @property
    def is_open(self) -> bool:
        """Whether the operation needs no key."""
        return self.path.encode() in OPEN_PATHS


_KEY = "key"  # the name of a scheme
_SCHEMES = {
    _KEY: {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key, as `baton keys api add` printed it.",
    }
}
_RETRY_AFTER = {
    "description": "Seconds until it may be worth another try.", "required": True,
    "schema": {"type": "integer", "minimum": 1},
}  # fmt: skip
_RETRIED = (429, 503)  # statuses with a Retry-After
_GENERATING = {
    400: "The request is not one that can be served; `param` names the field at fault.",
    401: "No valid key.",
    403: "A key that may look and nothing else, or a page of an origin that is not allowed.",
    404: "Another model than the served one.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    422: "The Idempotency-Key was used with another request.",
    429: "Too much waits; Retry-After says when to try again.",
    500: "A failure of the server.",
    502: "A worker failed or was lost.",
    503: "No workers, or shutting down; Retry-After says when to try again.",
    504: "The time limit is over.",
}
_READING = {401: _GENERATING[401]}
_CONVERTING = {status: _GENERATING[status] for status in (400, 401, 403, 404, 408, 413, 415, 429)}
_WATCHING = {**_READING, 403: "Neither an operator's nor an observer's key."}

OPERATIONS = (
    Operation("/v1/chat/completions", "An answer to a chat.", ChatBody, ChatReply, ChatChunk, _GENERATING),
    Operation(
        "/v1/completions",
        "What follows a text.",
        CompletionBody,
        CompletionReply,
        CompletionReply,
        _GENERATING,
    ),
    Operation(
        "/v1/responses",
        "An answer, in the words of the Responses API.",
        ResponseBody,
        Response,
        Event,
        _GENERATING,
    ),
    Operation(
        "/v1/messages",
        "An answer, in the words of Anthropic's Messages API.",
        MessageBody,
        Message,
        MessageEvent,
        _GENERATING,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "The number of tokens of a prompt, in the words of Anthropic's Messages API.",
        CountBody,
        TokenCount,
        None,
        _CONVERTING,
    ),
    Operation(
        "/tokenize", "The token ids of a text or of a chat.", TokenizeBody, TokenizeReply, None, _CONVERTING
    ),
    Operation("/detokenize", "The text of token ids.", DetokenizeBody, DetokenizeReply, None, _CONVERTING),
    Operation("/v1/models", "The served model.", None, ModelList, None, _READING),
    Operation(
        "/v1/models/{model}", "The served model.", None, ModelCard, None, {**_READING, 404: _GENERATING[404]}
    ),
    Operation("/health", "Whether the router lives.", None, None, None, None),
    Operation("/ready", "Whether a request can be served now.", None, None, None, {503: "Not now."}),
    Operation("/version", "The version of the router.", None, VersionReply, None, None),
    Operation("/status", "The router, its workers and their load.", None, Status, None, _WATCHING),
    Operation(
        "/metrics", "Counters and times, as Prometheus reads them.", None, None, None, _WATCHING, "text/plain"
    ),
    Operation(
        "/drafts",
        "An order about the draft weights of a decode worker, as `baton draft swap` gives it.",
        DraftOrderBody,
        DraftOrderReply,
        None,
        {
            **{status: _GENERATING[status] for status in (400, 401)},
            403: "Not an operator's key.",
            404: "No such decode worker.",
        },
    ),
    Operation(
        "/roles",
        "An order to change the role of a worker, as `baton role` gives it.",
        RoleOrderBody,
        RoleOrderReply,
        None,
        {
            **{status: _GENERATING[status] for status in (400, 401)},
            403: "Not an operator's key.",
            404: "No such worker.",
            409: "It cannot change its role now.",
        },
    ),
    Operation(
        "/history",
        "The load of the last 15 minutes, a point every 2 seconds.",
        None,
        HistoryView,
        None,
        {**_WATCHING, 400: _GENERATING[400]},
    ),
    Operation(
        "/requests",
        "What became of recent requests.",
        None,
        RequestList,
        None,
        {**_READING, 400: _GENERATING[400]},
    ),
    Operation(
        "/requests/{id}",
        "What became of one request.",
        None,
        RequestView,
        None,
        {**_READING, 404: "It is not remembered."},
    ),
)


def openapi_of(served_models: Sequence[str], *, is_keyed: bool = False) -> Json:
    """The OpenAPI 3.1 document.

    `served_models` are the valid names of the model; with `is_keyed`, requests need a key.
    """
    kinds = {kind for op in OPERATIONS for kind in (op.body, op.reply, op.chunk) if kind is not None}
    ordered = sorted(
        {*kinds, *ITEMS.values(), ErrorEnvelope, MessageErrorEnvelope}, key=lambda kind: kind.__name__
    )
    _, schemas = msgspec.json.schema_components(ordered, ref_template=REF)
    for kind in {*ordered, *INNER}:
        _tell_fields(schemas[kind.__name__], getattr(kind, "TABLE", {}))
        if kind in {op.body for op in OPERATIONS} and "model" in schemas[kind.__name__]["properties"]:
            schemas[kind.__name__]["properties"]["model"] = {"type": "string", "enum": list(served_models)}
    items = {"type": "array", "items": {"anyOf": [_ref(kind) for kind in ITEMS.values()]}}
    schemas[ResponseBody.__name__]["properties"]["input"] |= {"anyOf": [{"type": "string"}, items]}
    paths: Json = {}
    for operation in OPERATIONS:
        made = paths.setdefault(operation.path, {})[operation.method] = _operation(operation, served_models)
        made["security"] = [] if operation.is_open else [{_KEY: []}] if is_keyed else [{}, {_KEY: []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "baton", "version": "1", "description": "Disaggregated LLM serving."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _SCHEMES},
    }


def _tell_fields(schema: Json, table: Mapping[str, Field]) -> None:
    """Removes refused fields from a body's schema, and describes the others as the field table does."""
    for name, field in table.items():
        if field.state == "refused":
            del schema["properties"][name]
        else:
            schema["properties"][name]["description"] = (
                f"{'Ignored: ' * (field.state == 'ignored')}{field.says}"
            )


def _operation(operation: Operation, served_models: Sequence[str]) -> Json:
    made: Json = {
        "summary": operation.says,
        "operationId": f"{operation.method}{operation.path.replace('/', '_')}",
    }
    if operation.body is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(operation.body)}},
        }
    if parameters := _parameters(operation, served_models):
        made["parameters"] = parameters
    whole = {"type": "object"} if operation.kind == "application/json" else {"type": "string"}
    content: Json = {operation.kind: {"schema": whole if operation.reply is None else _ref(operation.reply)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk, operation.error)}
    made["responses"] = {"200": {"description": "The answer.", "content": content}}
    error = {"type": "object"} if operation.path == "/ready" else _ref(operation.error)
    for status, says in (operation.statuses or {}).items():
        answer: Json = {"description": says, "content": {"application/json": {"schema": error}}}
        if status in _RETRIED:
            answer["headers"] = {"Retry-After": _RETRY_AFTER}
        made["responses"][str(status)] = answer
    return made


def _parameters(operation: Operation, served_models: Sequence[str]) -> list[Json]:
    """The header, path and query parameters of an operation."""
    if "{model}" in operation.path:
        return [
            {
                "name": "model",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "enum": list(served_models)},
            }
        ]
    if "{id}" in operation.path:
        schema = {"type": "string", "description": "Of an answer, or the first 8 digits or more of a room."}
        return [{"name": "id", "in": "path", "required": True, "schema": schema}]
    if operation.reply is RequestList:
        bounds = {"type": "integer", "minimum": 1, "maximum": KEPT}
        return [{"name": "limit", "in": "query", "required": False, "schema": bounds}]
    if operation.reply is HistoryView:
        point = {"type": "integer", "minimum": 0, "description": "Only what came after this point."}
        return [{"name": "since", "in": "query", "required": False, "schema": point}]
    if operation.is_generating:
        is_there = {"in": "header", "required": False}
        return [
            {"name": f.name.decode(), **is_there, "description": f.says, "schema": f.schema}
            for f in REQUEST_HEADERS
        ]
    return []


def _event(chunk: type, error: type) -> Json:
    """The schema of one event, which describes a stream."""
    event = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref(error)]},
    }
    data = event if chunk in (Event, MessageEvent) else {"anyOf": [{"const": "[DONE]"}, event]}
    properties = {"event": {"type": "string"}, "data": {"type": "string", **data}}
    return {"type": "object", "description": "Each event.", "properties": properties, "required": ["data"]}


def _ref(kind: type) -> Json:
    return {"$ref": REF.format(name=kind.__name__)}
