"""Chats are served under a limit on the router's address space (`ulimit -v`)."""

import asyncio
import resource
import subprocess
import sys
import time

import pytest
from baton.router.errors import ApiError
from baton.router.sandbox.fork_server import ForkServer
from baton.router.sandbox.template_renderer import Chat, Setup
from baton.router.text.templates import Templates
from baton.tests.cluster.router_fakes import TEMPLATE
from msgspec.json import encode

LIMIT = 450 << 20  # bytes: more than the libraries need (200 MiB), less than a worker's own limit beside them
NONE = resource.RLIM_INFINITY
BOMB = (
    "{% if messages[-1]['content'] == 'bomb' %}{% set ns = namespace(s='ab') %}{% for i in range(40) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}{% endif %}" + TEMPLATE
)


@pytest.mark.parametrize("limits", [(LIMIT, LIMIT), (LIMIT, NONE), (2 * LIMIT, 2 * LIMIT)])
def test_template_workers_keep_below_the_limit_of_the_router(limits):
    program = "from baton.tests.cluster.test_address_space import play; play()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits),
        capture_output=True, text=True, timeout=60, cwd="/",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "hi answered, bomb template_too_costly\n"), done.stderr


def play():
    """Renders in a process of its own, and prints what became of two chats."""
    fork_server = ForkServer.forked()
    try:
        print(", ".join([f"{word} {how}" for word, how in asyncio.run(outcomes(fork_server, "hi", "bomb"))]))
    finally:
        fork_server.close()


async def outcomes(fork_server, *words):
    made = Templates(Setup(chat_template=BOMB, special_tokens={}), fork_server, time.monotonic)
    found = []
    for word in words:
        try:
            chat = Chat(messages=[{"role": "user", "content": word}])
            found.append((word, "answered" if await made.render(encode(chat), is_long=False) else "empty"))
        except ApiError as error:
            found.append((word, error.body.code))
    made.close()
    return found
