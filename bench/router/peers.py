"""The baselines of `baton bench router`: an HTTP backend that answers at once, and proxies in front of it."""

import asyncio
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import httptools
import uvloop

ANSWER = (
    b'{"id":"chatcmpl-6b9ea02d47124aa5f0619826","object":"chat.completion","created":1795180426,'
    b'"model":"bench","choices":'
    b'[{"index":0,"message":{"content":"AAAAAAAAAAAAAAAA","role":"assistant","refusal":null},"logprobs":null,'
    b'"finish_reason":"length"}],"usage":{"prompt_tokens":18,"completion_tokens":16,"total_tokens":34}}'
)
REPLY = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER
)
AIOHTTP = """
import asyncio, sys, aiohttp
from aiohttp import web
target, port = sys.argv[1], int(sys.argv[2])
async def forward(request):
    async with request.app["client"].request(request.method, target + request.path, data=await request.read(),
                                             headers={"content-type": "application/json"}) as reply:
        return web.Response(body=await reply.read(), status=reply.status, content_type="application/json")
async def client(app):
    app["client"] = aiohttp.ClientSession()
    yield
    await app["client"].close()
app = web.Application()
app.cleanup_ctx.append(client)
app.router.add_route("*", "/{path:.*}", forward)
web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)
"""
NGINX = """
daemon off; worker_processes 1; pid %(folder)s/nginx.pid; error_log stderr crit;
events { worker_connections 4096; }
http {
  access_log off; client_body_temp_path %(folder)s/b;
  proxy_temp_path %(folder)s/p; fastcgi_temp_path %(folder)s/f;
  uwsgi_temp_path %(folder)s/u; scgi_temp_path %(folder)s/s;
  upstream backend { server 127.0.0.1:%(target)d; keepalive 64; }
  server {
    listen 127.0.0.1:%(port)d;
    location / { proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ""; }
  }
}
"""


class Backend(asyncio.Protocol):
    """One connection of the HTTP backend."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(REPLY)  # type: ignore[attr-defined]


async def serve(port: int) -> None:
    """Serves on `port` until the process is killed."""
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def commands(folder: Path, python: str, target: int, ports: dict[str, int]) -> dict[str, list[str]]:
    """The command of each installed proxy. `python` is an interpreter with aiohttp and sglang-router."""
    found: dict[str, list[str]] = {}
    if shutil.which("nginx"):
        config = folder / "nginx.conf"
        config.write_text(NGINX % {"folder": folder, "target": target, "port": ports["nginx"]})
        found["nginx"] = ["nginx", "-p", str(folder), "-c", str(config), "-e", "stderr"]
    if python:
        url = f"http://127.0.0.1:{target}"
        found["aiohttp"] = [python, "-c", AIOHTTP, url, str(ports["aiohttp"])]
        launch = [
            "-m",
            "sglang_router.launch_router",
            "--worker-urls",
            url,
            "--host",
            "127.0.0.1",
            "--log-level",
            "error",
        ]
        port = ["--port", str(ports["sglang-router"]), "--prometheus-port", str(ports["metrics"])]
        found["sglang-router"] = [python, *launch, *port]
    return found


def main(argv: Sequence[str]) -> None:
    """Runs the backend on the port in `argv`."""
    uvloop.run(serve(int(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
