"""A client of the router: JSON requests, and chat completions streamed as server-sent events."""

import json
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from ...cluster.errors import BatonError, ConfigError
from ...cluster.security.tls_faults import tls_fault

SILENCE_S = 120.0  # longest wait for the next bytes of a reply
KEY_VARIABLE = "BATON_API_KEY"  # environment variable with the key of a router that asks for one


class RequestFailed(BatonError):
    """The server could not be reached, refused the request, or broke the stream off.

    The message may end with a remedy behind a semicolon.
    """


class NotShown(RequestFailed):
    """The key is valid but has no permission (403)."""


@dataclass(kw_only=True)
class StreamedAnswer:
    """One streamed answer, filled while it arrives; complete when `finish_reason` is set."""

    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timeline: dict[str, Any] = field(default_factory=dict)
    first_text_s: float | None = None  # seconds from sending the request
    last_text_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or 0)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first token; None for an answer that is too short."""
        if self.first_text_s is None or self.last_text_s is None or self.num_tokens < 2:
            return None
        elapsed = self.last_text_s - self.first_text_s
        return (self.num_tokens - 1) / elapsed if elapsed > 0 else None

    @property
    def accept_length(self) -> float | None:
        """Mean tokens committed per verify; None without drafts."""
        value = self.timeline.get("accept_length")
        return float(value) if isinstance(value, (int, float)) else None


class ChatClient:
    """Talks to the router at `url`, with one connection per request. Raises ConfigError for a bad URL or key.

    `silence_s` is the longest wait for the next bytes of a reply, in seconds. Proxy settings of the
    environment are ignored.
    """

    def __init__(self, url: str, *, api_key: str = "", silence_s: float = SILENCE_S) -> None:
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
            host.encode("idna")
            httpx.URL(url)
            is_url = (
                parts.scheme in ("http", "https") and bool(host) and (parts.port is None or parts.port >= 0)
            )
        except (
            ValueError,
            httpx.InvalidURL,
        ) as error:  # such as an unpaired bracket or a port that is not a number
            raise ConfigError(f"--url {url!r} is not a URL ({error}); write http://HOST:PORT") from None
        if not is_url or not url.isascii() or not url.isprintable() or " " in url:
            raise ConfigError(f"--url {url!r} is not a URL; write http://HOST:PORT")
        self.url = url.rstrip("/")
        self._root = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        if not api_key.isascii() or not api_key.isprintable():
            raise ConfigError(f"{KEY_VARIABLE} is no API key; `baton keys api add` makes one")
        self._api_key, self._silence_s = api_key, silence_s
        # use OpenSSL's certificate authorities, as other programs do; httpx would use certifi's
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if parts.scheme == "https" else False

    def __repr__(self) -> str:
        return f"<ChatClient {self.url}>"

    def model(self) -> str:
        """The id of the served model. Raises RequestFailed."""
        try:
            return str(self.get("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed(f"{self.url}/v1/models lists no model") from error

    def certificate_end(self) -> float | None:
        """The expiry time of the server's certificate in seconds since the epoch; None without TLS.

        Raises RequestFailed.
        """
        with (
            self._failures(),
            self._client() as client,
            client.stream("GET", f"{self._root}/health") as reply,
        ):
            connection = reply.extensions["network_stream"].get_extra_info("ssl_object")
            shown = connection.getpeercert() if connection is not None else None
            return ssl.cert_time_to_seconds(str(shown["notAfter"])) if shown else None

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises RequestFailed."""
        return self._object("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that answers `body`. Raises RequestFailed."""
        return self._object("POST", path, body)

    def _object(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._reply(method, path, body) as reply:
            return _json(reply.read())

    def stream(self, body: dict[str, Any], on_text: Callable[[str], None]) -> StreamedAnswer:
        """POSTs the chat completion `body`, calls `on_text` with each piece of the answer, and returns the
        whole.

        Raises RequestFailed, and passes on exceptions of `on_text`, since a broken pipe here is not the
        server's fault. An exception from `on_text` or Ctrl-C closes the connection, which cancels the request
        on the server.
        """
        answer, start = StreamedAnswer(), time.monotonic()
        payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with closing(self._chunks(payload)) as chunks:
            for chunk in chunks:
                text = take_chunk(answer, chunk)
                if text:
                    answer.last_text_s = time.monotonic() - start
                    answer.first_text_s = answer.first_text_s or answer.last_text_s
                    on_text(text)
        return answer

    def _chunks(self, payload: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of one streamed answer. Raises RequestFailed."""
        with self._reply("POST", "/v1/chat/completions", payload) as reply:
            yield from read_events(reply.iter_bytes())

    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=self._silence_s, verify=self._tls, trust_env=False)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Translates errors of httpx into RequestFailed."""
        try:
            yield
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    @contextmanager
    def _reply(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[httpx.Response]:
        """An open answer with status 200.

        Raises RequestFailed for any other, and for a connection that breaks.
        """
        headers = {"content-type": "application/json", "x-baton-timeline": "1"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        content = json.dumps(body).encode() if body is not None else None
        with (
            self._failures(),
            self._client() as client,
            client.stream(method, self._root + path, content=content, headers=headers) as reply,
        ):
            if reply.status_code == 401:
                raise RequestFailed(
                    f"{self.url} asks for an API key; put one into the environment variable {KEY_VARIABLE}"
                )
            if reply.status_code != 200:
                kind = NotShown if reply.status_code == 403 else RequestFailed
                raise kind(f"{self.url} answered {reply.status_code}: {_reason(reply.read())}")
            yield reply

    def _lost(self, error: BaseException) -> RequestFailed:
        if isinstance(error, httpx.TimeoutException):
            return RequestFailed(f"{self.url} sent nothing for {self._silence_s:g} s")
        cause = _cause_of(error)
        if isinstance(cause, ConnectionRefusedError):
            return RequestFailed(
                f"nothing listens at {self.url}; start 'baton up', or name a cluster with --url"
            )
        if isinstance(cause, Exception) and (fault := tls_fault(self.url, cause)):
            return RequestFailed(fault)
        return RequestFailed(f"the connection to {self.url} broke: {str(cause) or type(cause).__name__}")


def _cause_of(error: BaseException) -> BaseException:
    """The operating system's error behind one of httpx, or the error itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def read_events(parts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream up to [DONE].

    Lines end at line feeds only: JSON may hold other separators of lines. Raises RequestFailed for an error
    frame and for a stream that ends early.
    """
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            name, _, data = line.strip().partition(b":")
            if name != b"data":
                continue  # a blank line between events, or a comment that keeps the connection alive
            if data.strip() == b"[DONE]":
                return
            event = _json(data)
            if "error" in event:
                raise RequestFailed(f"the server broke the answer off: {_reason(data)}")
            yield event
    raise RequestFailed("the stream ended without [DONE]")


def take_chunk(answer: StreamedAnswer, chunk: dict[str, Any]) -> str:
    """Fold one chat.completion.chunk into `answer`; returns its text."""
    text = ""
    for choice in chunk.get("choices") or []:
        text += (choice.get("delta") or {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.text += text
    answer.usage = chunk.get("usage") or answer.usage
    answer.timeline = chunk.get("timeline") or answer.timeline
    return text


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise RequestFailed(f"the server sent no JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise RequestFailed(f"the server sent {type(value).__name__}, not an object")
    return value


def _reason(data: bytes) -> str:
    """The message of an OpenAI error object, or the start of the raw text."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace").strip() or "no reason given"
