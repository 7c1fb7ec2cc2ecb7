"""The routes of the HTTP API: the handler of each method and path, and errors as OpenAI error objects."""

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
from msgspec.structs import replace

from ...cluster.process.release import release
from ...cluster.protocol.messages import PROTOCOL_MAJOR
from ...cluster.telemetry.families import CONTENT_TYPE
from ...cluster.telemetry.trace_context import context_of
from ..api.body_checks import B
from ..api.body_reader import BodyReader
from ..api.body_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from ..api.draft_bodies import DraftOrderReply, draft_order_of
from ..api.message_bodies import VERSION, CountBody, MessageBody
from ..api.request_headers import (
    IDEMPOTENCY_KEY,
    LONGEST_TIMEOUT_MS,
    RECORD,
    TIMELINE,
    TIMEOUT,
    TRACEPARENT,
    TRACESTATE,
)
from ..api.response_bodies import ResponseBody
from ..api.role_bodies import RoleOrderReply, role_order_of
from ..errors import (
    ApiError,
    bad_request,
    method_not_allowed,
    not_found,
    printable,
    unknown_model,
    unknown_worker,
)
from ..http.auth import must_ask, must_be_at_home, must_be_permitted, must_operate, must_see_all
from ..http.exchange import App, ClientGone, Exchange, RawHeaders, send
from ..http.rate_limits import Caller
from .dashboard import Dashboard
from .docs_page import docs_page
from .idempotency import Begin, checked_key, digest_of, seed_of
from .openapi import openapi_of
from .service import Call, Service
from .status import ModelCard, ModelList, VersionReply, metrics_of, serving_of, status_of, why_not_ready

# the endpoints that make tokens, as metrics name them
ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
Handler = Callable[[Exchange], Awaitable[None]]
NamedHandler = Callable[[Exchange, str], Awaitable[None]]
PROBE_PATHS = ("/health", "/ready")  # the paths of --probe-port


class Routes:
    """The endpoints over one service.

    A handler answers on its exchange, or raises ApiError before it does.
    """

    def __init__(self, service: Service, *, is_keyed: bool, ignores_unknown: bool = False) -> None:
        self._service = service
        self._reader = BodyReader(ignores_unknown=ignores_unknown)
        self._started = service.clock()
        document = openapi_of(service.served_models, is_keyed=is_keyed)
        self._document, self._docs = msgspec.json.encode(document), docs_page(document)
        dashboard = Dashboard(service.dispatcher.history, service.dispatcher.load_history)
        self._posts: dict[str, Handler] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/v1/responses": self.respond,
            "/v1/messages": self.message,
            "/v1/messages/count_tokens": self.count_tokens,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/drafts": self.swap_draft,
            "/roles": self.change_role,
        }
        self._gets: dict[str, Handler] = {
            "/": dashboard.page,
            "/requests": dashboard.requests,
            "/history": dashboard.load,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
            "/v1/models": self.models,
            "/health": self.health,
            "/ready": self.ready,
            "/version": self.version,
            "/status": self.status,
            "/metrics": self.metrics,
        }
        self._named_gets: dict[str, NamedHandler] = {
            "/v1/models/": self.model,
            "/requests/": dashboard.request,
        }

    def app(self) -> App:
        """The application that the HTTP servers run for each request."""
        return partial(_serve, self._handler_of)

    def probe_app(self) -> App:
        """The application of the port of probes."""
        return partial(_serve, self._probe_of)

    def _probe_of(self, method: str, path: str) -> Handler:
        """Raises ApiError as `_handler_of`; all paths but PROBE_PATHS are unknown."""
        if path not in PROBE_PATHS:
            raise not_found(path)
        return self._handler_of(method, path)

    def _handler_of(self, method: str, path: str) -> Handler:
        """Raises ApiError: 404 for an unknown path, 405 for another method."""
        if (post := self._posts.get(path)) is not None:
            if method == "POST":
                return post
            raise method_not_allowed("POST")
        get = self._gets.get(path) or self._named_get(path)
        if get is None:
            raise not_found(path)
        if method in ("GET", "HEAD"):
            return get
        raise method_not_allowed("GET, HEAD")

    def _named_get(self, path: str) -> Handler | None:
        """The handler of a path that ends with a name."""
        for prefix, handler in self._named_gets.items():
            if path.startswith(prefix) and (name := path.removeprefix(prefix)):
                return lambda exchange: handler(exchange, name)
        return None

    async def chat(self, exchange: Exchange) -> None:
        raw, call = self._call(exchange)
        body, call = self._read(raw, ChatBody, call)
        await self._answer(exchange, body, partial(self._service.chat, body, call))

    async def complete(self, exchange: Exchange) -> None:
        raw, call = self._call(exchange)
        body, call = self._read(raw, CompletionBody, call)
        del raw  # embeddings are long, and an answer takes time
        await self._answer(exchange, body, partial(self._service.complete, body, call))

    async def respond(self, exchange: Exchange) -> None:
        raw, call = self._call(exchange)
        body, call = self._read(raw, ResponseBody, call)
        await self._answer(exchange, body, partial(self._service.respond, body, call))

    async def message(self, exchange: Exchange) -> None:
        _check_version(exchange)
        raw, call = self._call(exchange)
        body, call = self._read(raw, MessageBody, call)
        await self._answer(exchange, body, partial(self._service.message, body, call))

    async def count_tokens(self, exchange: Exchange) -> None:
        _check_version(exchange)
        raw, call = self._call(exchange)
        body, call = self._read(raw, CountBody, call)
        await _send_json(exchange, await self._service.count_tokens(body, call))

    async def tokenize(self, exchange: Exchange) -> None:
        raw, call = self._call(exchange)
        body, call = self._read(raw, TokenizeBody, call)
        await _send_json(exchange, await self._service.tokenize(body, call))

    async def detokenize(self, exchange: Exchange) -> None:
        raw, call = self._call(exchange)
        body, call = self._read(raw, DetokenizeBody, call)
        await _send_json(exchange, await self._service.detokenize(body, call))

    async def swap_draft(self, exchange: Exchange) -> None:
        must_operate(exchange.caller)
        must_be_at_home(exchange)
        order = draft_order_of(exchange.take_body())
        if not self._service.dispatcher.swap_draft(order):
            raise unknown_worker(order.instance)
        await _send_json(exchange, DraftOrderReply(instance=order.instance, order=order.order))

    async def change_role(self, exchange: Exchange) -> None:
        must_operate(exchange.caller)
        must_be_at_home(exchange)
        order = role_order_of(exchange.take_body())
        self._service.dispatcher.change_role(order)
        reply = RoleOrderReply(instance=order.instance, order=order.order, role=order.role)
        await _send_json(exchange, reply)

    async def openapi(self, exchange: Exchange) -> None:
        await send(exchange, self._document)

    async def docs(self, exchange: Exchange) -> None:
        await send(exchange, self._docs.body, headers=self._docs.headers)

    def _read(self, raw: bytes, kind: type[B], call: Call) -> tuple[B, Call]:
        """The checked body, and the call with the fields that were left out of it. Raises ApiError."""
        body, ignored = self._reader.read(raw, kind)
        return body, replace(call, ignored=ignored) if ignored else call

    def _call(self, exchange: Exchange) -> tuple[bytes, Call]:
        """The body, and the options in the headers. Raises ApiError."""
        must_ask(exchange.caller)
        must_be_permitted(exchange)
        if exchange.caller.has_rates:
            exchange.limits = partial(self._limits, exchange.caller)
        arrived, timeout_s = self._service.clock(), _timeout_of(exchange.header(TIMEOUT.name))
        raw = exchange.take_body()
        call = Call(
            arrived=arrived,
            request_id=exchange.given_id,
            size=len(raw),
            route=ROUTES.get(exchange.path, "other"),
            wants_timeline=_wants_timeline(exchange),
            may_record=_may_record(exchange),
            timeout_s=timeout_s,
            caller=exchange.caller,
            has_left=partial(_has_left, exchange),
            trace=context_of(exchange.headers(TRACEPARENT.name), exchange.headers(TRACESTATE.name)),
        )
        return raw, call

    async def _answer(
        self, exchange: Exchange, body: ChatBody | CompletionBody | ResponseBody | MessageBody, begin: Begin
    ) -> None:
        """Serves a new answer, or with an Idempotency-Key the answer of the earlier request."""
        key = checked_key(exchange.header(IDEMPOTENCY_KEY.name))
        if not key:
            answer = await begin()
            exchange.take_id(answer.request_id)
            exchange.work = answer.work
            return await answer.serve(exchange)
        key = f"{exchange.caller.id} {key}"  # separates the keys of different clients
        form = f"{exchange.path} {_wants_timeline(exchange)}"
        digest = digest_of(key, form, msgspec.json.encode(body, order="deterministic"))
        if body.seed is None:
            body.seed = seed_of(digest)
        replay = await self._service.replays.answer(key, digest, begin)
        exchange.take_id(replay.request_id)
        exchange.work = replay.work
        await replay.serve(exchange)

    def _limits(self, caller: Caller) -> RawHeaders:
        """What is left of a caller's limits when its answer begins."""
        return self._service.dispatcher.admission.gate.headers(caller, self._service.clock())

    async def models(self, exchange: Exchange) -> None:
        cards = [self._card(name) for name in self._service.served_models]
        await _send_json(exchange, ModelList(cards, cards[0].id, cards[-1].id))

    async def model(self, exchange: Exchange, name: str) -> None:
        if name not in self._service.served_models:
            raise unknown_model(name, self._service.served_model)
        await _send_json(exchange, self._card(name))

    async def health(self, exchange: Exchange) -> None:
        await _send_json(exchange, {"status": "ok"})

    async def ready(self, exchange: Exchange) -> None:
        dispatcher = self._service.dispatcher
        reason, serving = why_not_ready(dispatcher, self._service.clock()), serving_of(dispatcher.registry)
        if reason:
            body = {"status": "not ready", "reason": reason, "serving": serving}
            return await _send_json(exchange, body, status=503, headers={"retry-after": "1"})
        await _send_json(exchange, {"status": "ready", "serving": serving})

    async def version(self, exchange: Exchange) -> None:
        await _send_json(exchange, VersionReply(version=release(), protocol=PROTOCOL_MAJOR))

    async def status(self, exchange: Exchange) -> None:
        must_see_all(exchange.caller)
        service, now = self._service, self._service.clock()
        shown = status_of(
            service.dispatcher,
            service.served_model,
            now - self._started,
            now,
            limit_parts=service.limit_parts,
        )
        await _send_json(exchange, shown)

    async def metrics(self, exchange: Exchange) -> None:
        must_see_all(exchange.caller)
        service = self._service
        body = metrics_of(service.dispatcher, service.responses, service.worker_metrics)
        await send(exchange, body, headers={"content-type": CONTENT_TYPE})

    def _card(self, name: str) -> ModelCard:
        live = self._service.dispatcher.limits()
        return ModelCard(
            id=name,
            created=self._service.started,
            display_name=name,
            created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._service.started)),
            max_model_len=live.fitting if live is not None else None,
        )


async def _serve(handler_of: Callable[[str, str], Handler], exchange: Exchange) -> None:
    """Runs the handler of a request. Sends the ApiError that it raises."""
    if (permission := exchange.preflight) is not None:
        await exchange.start(204, permission)
        return await exchange.write(b"", is_last=True)
    try:
        await handler_of(exchange.method, exchange.path)(exchange)
    except ApiError as error:
        await exchange.answer(error)
    except ClientGone:
        pass  # the client has left


def _has_left(exchange: Exchange) -> bool:
    """Whether the client has left for good. With an Idempotency-Key it may come back for the answer."""
    return exchange.has_left and exchange.header(IDEMPOTENCY_KEY.name) is None


def _check_version(exchange: Exchange) -> None:
    """Raises ApiError (400) for a version of the Messages API that is none. It may be left out."""
    version = exchange.header(b"anthropic-version")
    if version is not None and not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", version):
        raise bad_request(f"anthropic-version: {printable(version)} is no version: send {VERSION}")


def _wants_timeline(exchange: Exchange) -> bool:
    return exchange.header(TIMELINE.name) == "1"


def _may_record(exchange: Exchange) -> bool:
    """Raises ApiError (400) for another value than 0: it may be meant as an objection."""
    values = exchange.headers(RECORD.name)
    if any(value != "0" for value in values):
        raise bad_request(f"{RECORD.name.decode()} must be 0, or be left out")
    return not values


def _timeout_of(header: str | None) -> float:
    """The client's timeout in seconds; 0 without one. Raises ApiError (400)."""
    if header is None:
        return 0.0
    milliseconds = int(header) if header.isascii() and header.isdigit() and len(header) <= 9 else 0
    if not 0 < milliseconds <= LONGEST_TIMEOUT_MS:
        text = f"{TIMEOUT.name.decode()} must be a whole number from 1 to {LONGEST_TIMEOUT_MS}"
        raise bad_request(text)
    return milliseconds / 1000


async def _send_json(
    exchange: Exchange, value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    await send(exchange, msgspec.json.encode(value), status, headers)
