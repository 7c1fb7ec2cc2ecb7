"""A client of many streams at once, or of one stream that it never reads: `python -m
baton.bench.router.streams PORT KEY STREAMS TOKENS`.

Opens STREAMS streams, reports when all have started, reads them to the end and reports the number of chunks.
With STREAMS 0 it opens one stream, reads nothing and waits to be killed.
"""

import asyncio
import json
import socket
import sys
from collections.abc import Sequence

import uvloop


def request_of(key: str, num_tokens: int, **more: object) -> bytes:
    """The bytes of a request for a streamed completion of `num_tokens` tokens."""
    body = {
        "model": "bench",
        "prompt": list(range(100, 200)),
        "max_tokens": num_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    body |= more
    content = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        f"authorization: Bearer {key}",
        "connection: close",
    ]
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


class StreamClients:
    """Opens streams and counts their chunks."""

    def __init__(self, port: int, request: bytes) -> None:
        self.num_begun = self.num_chunks = self.num_whole = 0
        self._port = port
        self._request = request

    async def stream(self) -> None:
        """Reads one stream to its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self._request)
        line = await reader.readline()
        self.num_begun += line.startswith(b"HTTP/1.1 200")
        async for line in reader:
            self.num_chunks += line.startswith(b"data: {")
            self.num_whole += line == b"data: [DONE]\n"
        writer.close()


async def run(port: int, key: str, num_streams: int, num_tokens: int) -> None:
    """Runs the streams. Prints one line of JSON when all have begun, and one at the end."""
    if not num_streams:
        with socket.socket() as silent:
            # a larger buffer would let the kernel read megabytes for a client that does not read
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(("127.0.0.1", port))
            silent.sendall(request_of(key, num_tokens, return_token_ids=True))
            await asyncio.sleep(3600)
    client = StreamClients(port, request_of(key, num_tokens))
    tasks = []
    for number in range(num_streams):
        tasks.append(asyncio.ensure_future(client.stream()))
        if number % 50 == 49:
            await asyncio.sleep(0.02)
    while client.num_begun < num_streams and not all(task.done() for task in tasks):
        await asyncio.sleep(0.05)
    _report(begun=client.num_begun, chunks=client.num_chunks)
    await asyncio.gather(*tasks)
    _report(whole=client.num_whole, chunks=client.num_chunks)


def _report(**counts: int) -> None:
    sys.stdout.write(json.dumps(counts) + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> None:
    """`PORT KEY STREAMS TOKENS`"""
    uvloop.run(run(int(argv[0]), argv[1], int(argv[2]), int(argv[3])))


if __name__ == "__main__":
    main(sys.argv[1:])
