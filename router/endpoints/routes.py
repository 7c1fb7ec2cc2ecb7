"""The HTTP surface: routes, and errors as OpenAI error objects."""

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...cluster.metrics import CONTENT_TYPE
from ...cluster.trace_context import context_of
from ..answers.answer import Answer
from ..api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from ..api.openai import parse_body
from ..api.request_headers import (
    IDEMPOTENCY_KEY,
    LONGEST_TIMEOUT_MS,
    TIMELINE,
    TIMEOUT,
    TRACEPARENT,
    TRACESTATE,
)
from ..api.response_bodies import ResponseBody
from ..errors import (
    ApiError,
    bad_request,
    internal,
    method_not_allowed,
    not_found,
    unknown_model,
)
from ..http.asgi import EXCHANGE, Exchange
from ..http.auth import CALLER, must_ask, must_see_all
from .dashboard import Dashboard
from .idempotency import Begin, Replay, checked_key, digest_of, seed_of
from .openapi import PAGE_POLICY, openapi_of, page_of
from .service import Call, Service
from .status import ModelCard, ModelList, metrics_of, status_of, why_not_ready


class Routes:
    """The endpoints over one service."""

    def __init__(self, service: Service, *, is_keyed: bool) -> None:
        self._service = service
        self._started = service.clock()
        document = openapi_of(service.served_model, is_keyed=is_keyed)
        self._document, self._page = msgspec.json.encode(document), page_of(document)

    def app(self) -> ASGIApp:
        """The ASGI application. What is asked most does not pass through Starlette's layers."""
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/status", self.status, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            *Dashboard(self._service.dispatcher.history).routes(),
        ]
        handlers: dict[object, Callable[[Request, Exception], Awaitable[Response]]] = {
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_exception,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        busiest = {"/v1/chat/completions": self.chat, "/v1/completions": self.complete}

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            handler = busiest.get(scope["path"]) if scope["method"] == "POST" else None
            if handler is None:
                return await app(scope, receive, send)
            try:
                answer: ASGIApp = await handler(Request(scope, receive))
            except ApiError as error:
                answer = _error_response(error)
            except ClientDisconnect:
                answer = _unread_response()
            await answer(scope, receive, send)

        return serve

    async def chat(self, request: Request) -> Answer | Replay:
        raw, call = self._call(request.scope)
        body = parse_body(raw, ChatBody)
        return await self._answer(request.scope, body, partial(self._service.chat, body, call))

    async def complete(self, request: Request) -> Answer | Replay:
        raw, call = self._call(request.scope)
        body = parse_body(raw, CompletionBody)
        return await self._answer(request.scope, body, partial(self._service.complete, body, call))

    async def respond(self, request: Request) -> Answer | Replay:
        raw, call = self._call(request.scope)
        body = parse_body(raw, ResponseBody)
        return await self._answer(request.scope, body, partial(self._service.respond, body, call))

    async def tokenize(self, request: Request) -> Response:
        raw, call = self._call(request.scope)
        return _json(await self._service.tokenize(parse_body(raw, TokenizeBody), call))

    async def detokenize(self, request: Request) -> Response:
        raw, call = self._call(request.scope)
        return _json(await self._service.detokenize(parse_body(raw, DetokenizeBody), call))

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, headers={"content-type": "application/json"})

    async def docs(self, request: Request) -> Response:
        headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": PAGE_POLICY}
        return Response(self._page, headers=headers)

    def _call(self, scope: Scope) -> tuple[bytes, Call]:
        """The body, and what the headers ask for. Raises ApiError."""
        must_ask(scope[CALLER])
        exchange: Exchange = scope[EXCHANGE]
        arrived, timeout_s = self._service.clock(), _timeout_of(exchange.header(TIMEOUT.name))
        raw = exchange.take_body()
        call = Call(
            arrived=arrived,
            size=len(raw),
            wants_timeline=_wants_timeline(exchange),
            timeout_s=timeout_s,
            caller=scope[CALLER],
            has_left=partial(_has_left, exchange),
            trace=context_of(exchange.headers(TRACEPARENT.name), exchange.headers(TRACESTATE.name)),
        )
        return raw, call

    async def _answer(
        self, scope: Scope, body: ChatBody | CompletionBody | ResponseBody, begin: Begin
    ) -> Answer | Replay:
        """A new answer, or with an Idempotency-Key that of the request before."""
        exchange: Exchange = scope[EXCHANGE]
        key = checked_key(exchange.header(IDEMPOTENCY_KEY.name))
        if not key:
            return await begin()
        key = f"{scope[CALLER].id} {key}"  # a client's keys are its own
        form = f"{scope['path']} {_wants_timeline(exchange)}"
        digest = digest_of(key, form, msgspec.json.encode(body, order="deterministic"))
        if body.seed is None:
            body.seed = seed_of(digest)
        return await self._service.replays.answer(key, digest, begin)

    async def models(self, request: Request) -> Response:
        return _json(ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._service.served_model:
            raise unknown_model(name, self._service.served_model)
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        reason = why_not_ready(self._service.dispatcher, self._service.clock())
        if reason:
            return _json({"status": "not ready", "reason": reason}, status=503, headers={"retry-after": "1"})
        return _json({"status": "ready"})

    async def status(self, request: Request) -> Response:
        must_see_all(request.scope[CALLER])
        service, now = self._service, self._service.clock()
        return _json(status_of(service.dispatcher, service.served_model, now - self._started, now))

    async def metrics(self, request: Request) -> Response:
        must_see_all(request.scope[CALLER])
        body = metrics_of(self._service.dispatcher, self._service.responses)
        return Response(body, headers={"content-type": CONTENT_TYPE})

    def _card(self) -> ModelCard:
        live = self._service.dispatcher.limits()
        return ModelCard(
            id=self._service.served_model,
            created=self._service.started,
            max_model_len=live.context if live is not None else None,
        )


def _has_left(exchange: Exchange) -> bool:
    """Whether the work for it is for nobody; with an Idempotency-Key the client may come back for it."""
    return exchange.has_left and exchange.header(IDEMPOTENCY_KEY.name) is None


def _wants_timeline(exchange: Exchange) -> bool:
    return exchange.header(TIMELINE.name) == "1"


def _timeout_of(header: str | None) -> float:
    """Seconds after which the client wants no answer any more; 0 when it does not say. Raises ApiError (400)."""
    if header is None:
        return 0.0
    milliseconds = int(header) if header.isascii() and header.isdigit() and len(header) <= 9 else 0
    if not 0 < milliseconds <= LONGEST_TIMEOUT_MS:
        text = f"{TIMEOUT.name.decode()} must be a whole number from 1 to {LONGEST_TIMEOUT_MS}"
        raise bad_request(text)
    return milliseconds / 1000


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value), status, {"content-type": "application/json"} | (headers or {})
    )


def _error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    all_headers = {"content-type": "application/json"} | error.headers | (headers or {})
    return Response(error.encode(), error.status, all_headers)


def _unread_response() -> Response:
    """To a client that has left."""
    return Response(status_code=400)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return _error_response(method_not_allowed(allowed), dict(error.headers or {}))
    if error.status_code == 404:
        return _error_response(not_found(request.url.path))
    return _error_response(internal())


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return _unread_response()


async def _on_exception(request: Request, error: Exception) -> Response:
    return _error_response(internal())
