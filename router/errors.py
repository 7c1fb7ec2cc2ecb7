"""The catalogue of errors for clients, as OpenAI error objects."""

import math
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

RETRY_AFTER_S = 1
API_PATHS = ("/chat/completions", "/completions", "/responses", "/messages", "/models")  # below /v1


class ErrorBody(msgspec.Struct, frozen=True):
    """The inner object of an OpenAI error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """An OpenAI error as sent."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with an HTTP status and an error object."""

    def __init__(
        self, status: int, body: ErrorBody, retry_after_s: int = 0, scheme: str = "", allow: str = ""
    ) -> None:
        super().__init__(body.message)
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s
        self._scheme = scheme  # the required authentication scheme
        self._allow = allow  # the methods that the path allows

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
        headers |= {"www-authenticate": self._scheme} if self._scheme else {}
        return headers | ({"allow": self._allow} if self._allow else {})

    def encode(self) -> bytes:
        return msgspec.json.encode(ErrorEnvelope(self.body))

    def as_http(self, more: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
        """The bytes of a complete answer outside of any request, after which the connection closes.

        `more` are further header fields.
        """
        body, status = self.encode(), HTTPStatus(self.status)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = [f"{name}: {value}" for name, value in (headers | self.headers).items()]
        lines += [f"{name.decode()}: {value.decode('latin-1')}" for name, value in more]
        head = "\r\n".join([f"HTTP/1.1 {status.value} {status.phrase}", *lines, "", ""])
        return head.encode("latin-1") + body


class MessageErrorDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """By what Anthropic's client tells errors of one type apart."""

    error_code: str
    unsupported: tuple[str, ...] = ()


class MessageErrorBody(msgspec.Struct, frozen=True):
    """The inner object of an error of Anthropic's Messages API."""

    type: str
    message: str
    param: str | None = None
    details: MessageErrorDetails | None = None


class MessageErrorEnvelope(msgspec.Struct, frozen=True):
    """An error of Anthropic's Messages API as sent."""

    error: MessageErrorBody
    type: str = "error"


MESSAGE_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
UNTHREADED = "thread_unsupported_request"  # the client then sends all messages again
MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageError(ApiError):
    """An ApiError in the words of Anthropic's Messages API."""

    @classmethod
    def of(cls, error: ApiError) -> "MessageError":
        default = "invalid_request_error" if error.status < 500 else "api_error"
        kind = MESSAGE_TYPES.get(error.status, default)
        body = msgspec.structs.replace(error.body, type=kind)
        return cls(error.status, body, error.retry_after_s, error._scheme, error._allow)

    def encode(self) -> bytes:
        told, details = self.body, None
        if told.code is not None:
            unsupported = (told.param,) if told.code == UNTHREADED and told.param else ()
            details = MessageErrorDetails(told.code, unsupported)
        return msgspec.json.encode(
            MessageErrorEnvelope(MessageErrorBody(told.type, told.message, told.param, details))
        )


def worded_for(path: str, error: ApiError) -> ApiError:
    """The error in the words of the API that a path belongs to."""
    return MessageError.of(error) if path in MESSAGE_PATHS else error


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The ApiError (400) for a request at fault. Where a field is named, its default code is
    "invalid_value"."""
    code = "invalid_value" if code is None and param is not None else code
    return ApiError(400, ErrorBody(message, "invalid_request_error", param, code))


def unsupported_parameter(message: str, *, param: str) -> ApiError:
    return bad_request(message, param=param, code="unsupported_parameter")


def unsupported_value(message: str, *, param: str) -> ApiError:
    return bad_request(message, param=param, code="unsupported_value")


def context_too_long(message: str, *, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")


def nested_too_deeply() -> ApiError:
    return bad_request("messages: the arguments of a call are nested too deeply", param="messages")


def template_too_costly() -> ApiError:
    message = (
        "The model's chat template needs more time or memory for these messages than this server gives "
        "it. Send fewer."
    )
    return bad_request(message, param="messages", code="template_too_costly")


def template_failed() -> ApiError:
    message = "The model's chat template could not be rendered. Try again."
    return ApiError(500, ErrorBody(message, "server_error", None, "template_failed"))


def grammar_too_costly(param: str) -> ApiError:
    message = (
        f"{param}: to follow this takes more time or memory than this server gives it. "
        "Ask for something simpler."
    )
    return bad_request(message, param=param, code="grammar_too_costly")


def unknown_model(model: str, served: str) -> ApiError:
    message = f"The model {printable(model)} does not exist; this server serves {served!r}."
    return ApiError(404, ErrorBody(message, "invalid_request_error", "model", "model_not_found"))


def not_found(path: str) -> ApiError:
    message = f"No such address: {printable(path)}"
    asked = next((known for known in API_PATHS if path.rstrip("/").endswith(known)), None)
    if asked is not None:
        message += f"; it is /v1{asked}, so a client's base URL ends with /v1"
    return ApiError(404, ErrorBody(message, "invalid_request_error", None, "not_found"))


def body_is_encoded(coding: str) -> ApiError:
    message = f"Content-Encoding {printable(coding)} is not read here. Send the body as it is."
    return ApiError(415, ErrorBody(message, "invalid_request_error", None, "unsupported_content_encoding"))


def unknown_request(name: str) -> ApiError:
    message = (
        f"No request {printable(name)} is remembered; give the id of an answer, "
        "or the first 8 digits of a room."
    )
    return ApiError(404, ErrorBody(message, "invalid_request_error", "id", "request_not_found"))


def unknown_worker(instance: str) -> ApiError:
    message = f"No decode worker {printable(instance)} with a draft head; /status lists them."
    return ApiError(404, ErrorBody(message, "invalid_request_error", "instance", "worker_not_found"))


def no_such_worker(instance: str) -> ApiError:
    message = f"No worker {printable(instance)}; /status lists them."
    return ApiError(404, ErrorBody(message, "invalid_request_error", "instance", "worker_not_found"))


def role_stays(instance: str, reason: str) -> ApiError:
    message = f"The worker {printable(instance)} {reason}."
    return ApiError(409, ErrorBody(message, "invalid_request_error", "instance", "role_change_refused"))


def method_not_allowed(allowed: str) -> ApiError:
    body = ErrorBody(f"This address takes {allowed} only.", "invalid_request_error")
    return ApiError(405, body, allow=allowed)


def body_too_large(limit: int) -> ApiError:
    text = f"The request body is larger than {limit} bytes, the router's --max-body-mb; send less."
    return ApiError(413, ErrorBody(text, "invalid_request_error"))


def body_too_slow() -> ApiError:
    return ApiError(408, ErrorBody("The request body did not arrive in time.", "invalid_request_error"))


def malformed() -> ApiError:
    return bad_request("This is not an HTTP request that can be read.")


def tls_wanted() -> ApiError:
    return bad_request("This port speaks TLS: write https:// in place of http://.", code="tls_wanted")


def host_not_allowed(name: str) -> ApiError:
    message = (
        f"The Host {printable(name)} is not allowed: this router answers to localhost, to loopback addresses "
        "and to the names of its --allowed-hosts."
    )
    return ApiError(421, ErrorBody(message, "invalid_request_error", None, "host_not_allowed"))


def head_too_large(max_bytes: int, max_headers: int) -> ApiError:
    message = f"The request line and headers exceed {max_bytes} bytes or {max_headers} headers."
    return ApiError(431, ErrorBody(message, "invalid_request_error"))


def expectation_failed() -> ApiError:
    return ApiError(417, ErrorBody("Expect: only 100-continue is understood.", "invalid_request_error"))


def too_many_bodies() -> ApiError:
    message = "Too many large requests are being read. Try again soon."
    return ApiError(503, ErrorBody(message, "service_unavailable", None, "too_many_bodies"), RETRY_AFTER_S)


def head_too_slow() -> ApiError:
    return ApiError(408, ErrorBody("The request's headers did not arrive in time.", "invalid_request_error"))


def too_many_connections() -> ApiError:
    message = "Too many connections are open. Try again soon."
    return ApiError(
        503, ErrorBody(message, "service_unavailable", None, "too_many_connections"), RETRY_AFTER_S
    )


def too_many_pending(limit: int) -> ApiError:
    message = (
        f"More than {limit} requests wait for their answers on this connection. "
        "Send further ones after these."
    )
    return ApiError(429, ErrorBody(message, "rate_limit_error", None, "too_many_pending"), RETRY_AFTER_S)


def overloaded(message: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    return ApiError(429, ErrorBody(message, "rate_limit_error", None, "overloaded"), retry_after_s)


def rate_limited(message: str, wait_s: float) -> ApiError:
    return ApiError(
        429, ErrorBody(message, "rate_limit_error", None, "rate_limit_exceeded"), max(1, math.ceil(wait_s))
    )


def unauthorized() -> ApiError:
    message = "Give a valid API key: `Authorization: Bearer <key>`."
    return ApiError(401, ErrorBody(message, "authentication_error", None, "invalid_api_key"), scheme="Bearer")


def forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, ErrorBody(message, "permission_error", None, code))


def unavailable(message: str) -> ApiError:
    return ApiError(503, ErrorBody(message, "service_unavailable", None, "no_workers"), RETRY_AFTER_S)


def upstream(message: str, code: str) -> ApiError:
    return ApiError(502, ErrorBody(message, "server_error", None, code))


def deadline_exceeded() -> ApiError:
    message = "The request did not end within this server's time limit. Ask for fewer tokens, or try again."
    return ApiError(504, ErrorBody(message, "server_error", None, "deadline_exceeded"))


def internal() -> ApiError:
    return ApiError(
        500, ErrorBody("The server failed to handle the request.", "server_error", None, "internal")
    )


def printable(text: str, limit: int = 80) -> str:
    """A user's text inside an error message: quoted, escaped and cut."""
    cut = text[:limit] + "..." if len(text) > limit else text
    return ascii(cut)
